// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dtensor/write_internal.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints::dtensor {

DeviceMesh FilesPlan::MeshOf(std::uint64_t rank, bool whole) const {
  DeviceMesh mesh;
  mesh.form = layout.form;
  mesh.device = layout.device;
  const std::uint64_t ranks = layout.ranks();
  const std::vector<std::uint64_t> at = layout::CoordinateOf(layout.sizes, rank);
  const std::vector<std::string> names =
      rank < layout.groups.size() && layout.groups[rank].size() == layout.sizes.size()
          ? layout.groups[rank]
          : GroupNames(layout.sizes, at);
  if (layout.names) mesh.names.emplace();
  std::uint64_t stride = ranks;
  std::uint64_t base = rank;
  for (std::size_t dim = 0; dim < layout.sizes.size(); ++dim) {
    stride /= layout.sizes[dim];
    if (!whole && layout.roles[dim] == Role::kTensorParallel) continue;
    base -= at[dim] * stride;
    mesh.sizes.push_back(layout.sizes[dim]);
    mesh.strides.push_back(stride);
    mesh.coordinate.push_back(at[dim]);
    mesh.groups.push_back(names[dim]);
    if (layout.names) mesh.names->push_back((*layout.names)[dim]);
  }
  for (std::uint64_t i = 0; i < ranks; ++i) mesh.all_ranks.push_back(i);
  for (std::uint64_t i = 0; i < Elems(mesh.sizes); ++i) {
    const std::vector<std::uint64_t> other = layout::CoordinateOf(mesh.sizes, i);
    std::uint64_t place = base;
    for (std::size_t dim = 0; dim < other.size(); ++dim) place += other[dim] * mesh.strides[dim];
    mesh.ranks.push_back(place);
  }
  return mesh;
}

Result<layout::Piece> FilesPlan::PieceOf(const PlannedParam& param, std::uint64_t rank) const {
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint64_t> coordinate;
  const std::vector<std::uint64_t> at = layout::CoordinateOf(layout.sizes, rank);
  for (std::size_t dim = 0; dim < at.size(); ++dim) {
    if (!param.on_whole_mesh && layout.roles[dim] == Role::kTensorParallel) continue;
    sizes.push_back(layout.sizes[dim]);
    coordinate.push_back(at[dim]);
  }
  return layout::PieceAt(param.param.shape, sizes, param.splits, coordinate);
}

bool FilesPlan::Owns(const PlannedParam& param, std::uint64_t rank) const {
  if (param.plain) return rank == 0;
  std::size_t split = 0;
  const std::vector<std::uint64_t> at = layout::CoordinateOf(layout.sizes, rank);
  for (std::size_t dim = 0; dim < at.size(); ++dim) {
    const bool outside = !param.on_whole_mesh && layout.roles[dim] == Role::kTensorParallel;
    const bool copies = outside || !param.splits[split].shards();
    if (!outside) ++split;
    if (copies && at[dim] != 0) return false;
  }
  return true;
}

std::uint64_t FilesPlan::shards() const {
  std::uint64_t shards = 1;
  for (std::size_t dim = 0; dim < layout.sizes.size(); ++dim) {
    if (layout.roles[dim] == Role::kShard) shards *= layout.sizes[dim];
  }
  return shards;
}

std::uint64_t FilesPlan::FlatLength(std::size_t unit) const {
  return CeilDiv(units[unit].elems, shards());
}

}  // namespace shardwright::checkpoints::dtensor
