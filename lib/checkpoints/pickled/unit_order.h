// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright::checkpoints {

/// Selects the number that identifies a block: "layers.3" or "experts.5" of "layers.3.experts.5.w".
enum class BlockIndex : std::uint8_t { kFirst, kLast };

/// Returns the parameters of each FSDP1 unit of a model that wraps its blocks, as indexes into
/// `names`. The root comes first, with all parameters outside of blocks (or is absent if there are
/// none), then the blocks in the order of their first parameters. Parameters of one block have the
/// same name up to a number.
/// Pure. Source: torch/distributed/fsdp/_runtime_utils.py and wrap.py of PyTorch.
std::vector<std::vector<std::uint32_t>> UnitParams(std::span<const std::string_view> names,
                                                   BlockIndex index);

/// Returns true if a parameter group lists its members unit by unit, as optimizers of FSDP1 without
/// use_orig_params do, and not in the order of the model.
/// \param names   the model's parameters, in its order
/// \param listed  the group's members, as indexes into `names`
/// Pure.
bool ListedByUnit(std::span<const std::string_view> names, std::span<const std::uint32_t> listed);

/// Returns true if every module's parameters are consecutive, as in the state dict of one model.
/// Pure.
bool ModulesAreConsecutive(std::span<const std::string_view> names);

/// Returns true if lists of modules ("layers.0", "layers.1") are in ascending order.
/// Pure.
bool ListsAscend(std::span<const std::string_view> names);

/// Returns true if both parameters are in one list of modules, such as "layers.3" and "layers.4".
/// Pure.
bool InOneList(std::string_view a, std::string_view b);

}  // namespace shardwright::checkpoints
