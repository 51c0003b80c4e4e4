// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/universal: folders with one file per parameter and state.
// These files, zero/<parameter>/<state>.pt, are the atoms. They depend on no layout. Read: folders
// of ours, whose shardwright_atoms.json says what atoms do not (docs/formats/atoms.md), and those
// of DeepSpeed's own converter, which lack it (foreign_internal.h). Written: ours, in the form that
// DeepSpeed's loaders open.

#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/deepspeed/common/scan.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

inline constexpr const char* kOptimizerStateFile = "optimizer_state.pt";

// atom_names.cc: how this format spells states.

/// A parameter's state that is a file.
struct AtomFile {
  std::string param;
  std::string state;
};

/// Name of the file of a state in its folder: "fp32.pt". DeepSpeed calls states as we do
/// (engine/layout/states.h), or as the optimizer does.
/// Pure.
std::string StateFile(std::string_view state);

/// Path of an atom below the tag folder: "zero/emb.weight/fp32.pt".
/// Pure.
std::string AtomName(std::string_view param, std::string_view state);

/// The inverse; nothing if the path is no atom's.
/// Pure.
std::optional<AtomFile> ParseAtomName(std::string_view path);

/// Checks that every parameter's name is a path below `zero` that contains only its own states.
/// DeepSpeed's loaders append names to paths without escaping, so slashes make nested folders.
/// \error kUnsupported  names the parameter and the reason
/// Pure.
Status CheckAtomFolders(std::span<const Param> params);

/// The state that a parameter has an atom of in any case: its values.
/// Pure.
std::string_view NeededState(ParamKind kind);

/// What an atom folder's files do not say about a checkpoint: parameters, groups, order, topology,
/// states, numbers. JSON text, the same for the same checkpoint.
/// \param atoms  states of every parameter that are files
/// \error kUnsupported a scalar that is no number; names it
/// Pure. Source: docs/formats/atoms.md.
Result<std::string> DescribeAtoms(const Checkpoint& checkpoint, const Topology& topology,
                                  std::span<const std::vector<std::string>> atoms);

/// The inverse: fills the topology, params, groups (without their options), and states.
/// \error kBadInput  not such a text, over the limits, or it contradicts itself; names the key
/// Pure.
Status ParseAtoms(std::string_view text, Checkpoint* checkpoint, Topology* topology,
                  std::vector<std::vector<std::string>>* atoms);

/// The DeepSpeed release that saved a checkpoint: a string node, or null where no file says it.
/// Pure.
const pickle::Node* ReleaseOf(const Checkpoint& checkpoint);

/// Whether the state files of trained parameters have to be bare tensors, not dicts. Without a
/// wish: at stage 3, unless the source's release is known to open dicts there.
/// \error kUnsupported bare tensors are asked for with tensor parallelism
/// Pure. Source: docs/interop.md, "Universal loaders".
Result<bool> WantsBareStates(const Checkpoint& source, const Topology& topology, Loader loader);

}  // namespace shardwright::checkpoints
