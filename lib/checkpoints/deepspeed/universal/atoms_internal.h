// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/universal: folders with one file per parameter and state. These
// files, zero/<parameter>/<state>.pt, are called atoms and do not depend on a layout. The
// reader supports folders of Shardwright and of DeepSpeed's converter. Only the former contain
// shardwright_atoms.json, which has the information missing from atoms (docs/formats/atoms.md).
// foreign_internal.h reads the latter. The writer makes the former, for DeepSpeed's loaders.

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

// atom_names.cc: state names of this format.

/// A state of a parameter that has its own file.
struct AtomFile {
  std::string param;
  std::string state;
};

/// Returns the file name of a state: "fp32.pt". DeepSpeed uses
/// the names of engine/layout/states.h, or the optimizer's names.
/// Pure.
std::string StateFile(std::string_view state);

/// Returns the path of an atom below the tag folder: "zero/emb.weight/fp32.pt".
/// Pure.
std::string AtomName(std::string_view param, std::string_view state);

/// Inverse of AtomName. Returns nothing if the path is not an atom's.
/// Pure.
std::optional<AtomFile> ParseAtomName(std::string_view path);

/// Checks that every parameter's name is a path below `zero` that contains only its own states.
/// DeepSpeed's loaders append names to paths without escaping, so slashes make nested folders.
/// \error kUnsupported  names the parameter and the reason
/// Pure.
Status CheckAtomFolders(std::span<const Param> params);

/// Returns the state for which a parameter always has an atom: its values.
/// Pure.
std::string_view NeededState(ParamKind kind);

/// Describes, as JSON, the parts of a checkpoint that its atoms do not record: parameters,
/// groups, order, topology, states, numbers. Equal checkpoints yield equal text.
/// \param atoms  by parameter: the states that have files
/// \error kUnsupported  a scalar that is not a number; names it
/// Pure. Source: docs/formats/atoms.md.
Result<std::string> DescribeAtoms(const Checkpoint& checkpoint, const Topology& topology,
                                  std::span<const std::vector<std::string>> atoms);

/// Inverse of DescribeAtoms. Fills topology, params, groups (without their options), and states.
/// \error kBadInput  not such a text, beyond the limits, or contradicts itself; names the key
/// Pure.
Status ParseAtoms(std::string_view text, Checkpoint* checkpoint, Topology* topology,
                  std::vector<std::vector<std::string>>* atoms);

/// Returns the DeepSpeed release that saved a checkpoint as a string node, or null if unknown.
/// Pure.
const pickle::Node* ReleaseOf(const Checkpoint& checkpoint);

/// Returns true if state files of trained parameters must be bare tensors instead of dicts. kAuto
/// selects bare tensors at stage 3, unless the source's release can open dicts at that stage.
/// \error kUnsupported bare tensors were requested with tensor parallelism
/// Pure. Source: docs/interop.md, "Universal loaders".
Result<bool> WantsBareStates(const Checkpoint& source, const Topology& topology, Loader loader);

}  // namespace shardwright::checkpoints
