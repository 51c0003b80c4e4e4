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

/// The pickled form of a mesh, which depends on the PyTorch release.
enum class MeshForm : std::uint8_t {
  kOld,  ///< 2.6 to 2.9: stores the ranks directly
  kNew,  ///< 2.15: stores sizes and strides over a list of ranks
};

/// A mesh of ranks, as pickled by one of them.
struct DeviceMesh {
  MeshForm form = MeshForm::kNew;
  std::string device;                             ///< "cuda"
  std::vector<std::uint64_t> sizes;               ///< outermost first
  std::optional<std::vector<std::string>> names;  ///< names of the dimensions
  std::vector<std::uint64_t> ranks;               ///< ranks in the job, row-major
  /// kNew: the list of ranks that contains the mesh, and strides over it. Two meshes
  /// of the same ranks are not equal if one of them is a part of a larger mesh.
  std::vector<std::uint64_t> strides;
  std::vector<std::uint64_t> all_ranks;
  std::vector<std::uint64_t> coordinate;  ///< coordinate of this rank
  std::vector<std::string> groups;        ///< names of this rank's process groups
};

/// Reads a mesh that rank `rank` pickled.
/// \error kBadInput  attributes that contradict each other, or another rank's mesh
/// Pure.
Result<DeviceMesh> ReadMesh(const pickle::Node* node, std::uint64_t rank);

/// Pickles a mesh for rank `rank`, as a mesh that is not a part of a larger one.
const pickle::Node* MeshNode(Document& document, const DeviceMesh& mesh, std::uint64_t rank);

/// Returns the names of the process groups that a job creates for a mesh of all
/// its ranks. A mesh of one dimension uses "0", the world's group. Otherwise groups
/// have numbers from 1, dimension by dimension, in ascending order of their ranks.
/// \returns the names for the rank at `coordinate`, by dimension
std::vector<std::string> GroupNames(const std::vector<std::uint64_t>& sizes,
                                    const std::vector<std::uint64_t>& coordinate);

}  // namespace shardwright::checkpoints::dtensor
