// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoints/pickled/document.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// How a release of PyTorch pickles a mesh: the attributes of its class are not the same in all.
enum class MeshForm : std::uint8_t {
  kOld,  ///< 2.6 to 2.9: the ranks outright
  kNew,  ///< 2.15: sizes and strides over a list of ranks
};

/// A mesh of ranks as one of them has pickled it.
struct DeviceMesh {
  MeshForm form = MeshForm::kNew;
  std::string device;                             ///< "cuda"
  std::vector<std::uint64_t> sizes;               ///< outermost first
  std::optional<std::vector<std::string>> names;  ///< of the dimensions
  std::vector<std::uint64_t> ranks;               ///< of the job, row-major
  /// kNew: where the ranks stand in the list that the mesh is a part of, and that list. A mesh and
  /// one of the same ranks that is a part of a larger one are not equal.
  std::vector<std::uint64_t> strides;
  std::vector<std::uint64_t> all_ranks;
  std::vector<std::uint64_t> coordinate;  ///< of this rank
  std::vector<std::string> groups;        ///< names of this rank's process groups
};

/// Reads a mesh that rank `rank` has pickled.
/// \error kBadInput  attributes that contradict each other, or another rank's mesh
/// Pure.
Result<DeviceMesh> ReadMesh(const pickle::Node* node, std::uint64_t rank);

/// Pickles a mesh, as a whole of its own, for rank `rank`.
const pickle::Node* MeshNode(Document& document, const DeviceMesh& mesh, std::uint64_t rank);

/// Names of the process groups that a job makes for a mesh of all its ranks: "0", the one of the
/// world, for a mesh of one dimension; else one number for each group, counted from 1, dimension by
/// dimension, groups in ascending order of their ranks.
/// \returns for the rank at `coordinate`, by dimension
std::vector<std::string> GroupNames(const std::vector<std::uint64_t>& sizes,
                                    const std::vector<std::uint64_t>& coordinate);

}  // namespace shardwright::checkpoints::dtensor
