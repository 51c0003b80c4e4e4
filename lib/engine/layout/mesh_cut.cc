// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/mesh_cut.h"

#include <algorithm>
#include <map>
#include <optional>

#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::layout {
namespace {

/// Returns the first position in `dims` with `factor` ranks before it.
std::optional<std::size_t> PlaceAfter(std::uint64_t factor, std::span<const std::uint32_t> dims,
                                      std::span<const std::uint64_t> sizes) {
  std::uint64_t before = 1;
  for (std::size_t at = 0; before <= factor; ++at) {
    if (before == factor) return at;
    if (at == dims.size() || __builtin_mul_overflow(before, sizes[dims[at]], &before)) break;
  }
  return std::nullopt;
}

Status CheckSplits(std::span<const std::uint64_t> sizes, std::span<const MeshSplit> splits) {
  if (sizes.size() != splits.size()) {
    return Fail(Errc::kBadInput, "placements ", Explain(splits), " for a mesh of ",
                Plural(sizes.size(), "dimension"));
  }
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return Fail(Errc::kBadInput, "mesh ", ToString(sizes), " has no ranks");
  }
  return {};
}

Status CheckCoordinate(std::span<const std::uint64_t> sizes,
                       std::span<const std::uint64_t> coordinate) {
  bool inside = sizes.size() == coordinate.size();
  for (std::size_t i = 0; inside && i < sizes.size(); ++i) inside = coordinate[i] < sizes[i];
  if (inside) return {};
  return Fail(Errc::kBadInput, "coordinate ", ToString(coordinate), " is not in a mesh ",
              ToString(sizes));
}

}  // namespace

std::string Explain(const MeshSplit& split) {
  switch (split.kind) {
    case MeshSplit::Kind::kReplicate:
      return "Replicate";
    case MeshSplit::Kind::kShard:
      return "Shard(" + std::to_string(split.dim) + ")";
    case MeshSplit::Kind::kStridedShard:
      break;
  }
  return "StridedShard(" + std::to_string(split.dim) + ", " + std::to_string(split.split_factor) +
         ")";
}

std::string Explain(std::span<const MeshSplit> splits) {
  std::vector<std::string> words;
  for (const MeshSplit& split : splits) words.push_back(Explain(split));
  return "(" + Joined(words, ", ") + ")";
}

Result<std::vector<SplitOrder>> OrderOf(std::span<const std::uint64_t> sizes,
                                        std::span<const MeshSplit> splits) {
  SW_TRY(CheckSplits(sizes, splits));
  std::map<std::uint32_t, std::vector<std::uint32_t>> by_dim;
  for (std::size_t i = splits.size(); i-- > 0;) {
    const MeshSplit& split = splits[i];
    if (!split.shards()) continue;
    std::vector<std::uint32_t>& dims = by_dim[split.dim];
    const std::uint64_t factor =
        split.kind == MeshSplit::Kind::kStridedShard ? split.split_factor : 1;
    const auto place = PlaceAfter(factor, dims, sizes);
    if (!place) {
      return Fail(Errc::kBadInput, "placements ", Explain(splits), " on a mesh ", ToString(sizes),
                  ": no order of the splits fits the factor of ", Explain(split));
    }
    dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(*place), static_cast<std::uint32_t>(i));
  }
  std::vector<SplitOrder> orders;
  orders.reserve(by_dim.size());
  for (auto& [dim, dims] : by_dim) orders.push_back({dim, std::move(dims)});
  return orders;
}

bool Piece::empty() const { return std::find(sizes.begin(), sizes.end(), 0) != sizes.end(); }

Result<Piece> PieceAt(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> sizes,
                      std::span<const SplitOrder> order,
                      std::span<const std::uint64_t> coordinate) {
  SW_TRY(CheckCoordinate(sizes, coordinate));
  Piece piece{std::vector<std::uint64_t>(shape.size(), 0), Shape(shape.begin(), shape.end())};
  std::vector<bool> cut(shape.size(), false);
  std::vector<bool> used(sizes.size(), false);
  for (const SplitOrder& one : order) {
    if (one.dim >= shape.size() || cut[one.dim]) {
      return Fail(Errc::kBadInput, "dimension ", one.dim, " of a tensor ", ToString(shape),
                  (one.dim < shape.size() ? " is split twice" : " does not exist"));
    }
    cut[one.dim] = true;
    std::uint64_t& offset = piece.offset[one.dim];
    std::uint64_t& extent = piece.sizes[one.dim];
    for (const std::uint32_t mesh_dim : one.mesh_dims) {
      if (mesh_dim >= sizes.size() || used[mesh_dim]) {
        return Fail(Errc::kBadInput, "dimension ", mesh_dim, " of a mesh ", ToString(sizes),
                    (mesh_dim < sizes.size() ? " splits a tensor twice" : " does not exist"));
      }
      used[mesh_dim] = true;
      const std::uint64_t step = CeilDiv(extent, sizes[mesh_dim]);
      const std::uint64_t c = coordinate[mesh_dim];
      const std::uint64_t skip = step == 0 || c > extent / step ? extent : c * step;
      offset += skip;
      extent = std::min(step, extent - skip);
    }
  }
  return piece;
}

Result<Piece> PieceAt(std::span<const std::uint64_t> shape, std::span<const std::uint64_t> sizes,
                      std::span<const MeshSplit> splits,
                      std::span<const std::uint64_t> coordinate) {
  SW_TRY_ASSIGN(const std::vector<SplitOrder> order, OrderOf(sizes, splits));
  return PieceAt(shape, sizes, order, coordinate);
}

Result<Cut> CutOf(const Shape& shape, const Piece& piece) {
  std::vector<Box> boxes;
  if (!piece.empty()) {
    boxes.push_back({piece.offset, std::vector<std::uint64_t>(shape.size(), 0), piece.sizes});
  }
  return Cut::Make(shape, piece.sizes, std::move(boxes));
}

std::vector<std::uint64_t> CoordinateOf(std::span<const std::uint64_t> sizes,
                                        std::uint64_t position) {
  std::vector<std::uint64_t> coordinate(sizes.size());
  for (std::size_t i = sizes.size(); i-- > 0;) {
    coordinate[i] = position % sizes[i];
    position /= sizes[i];
  }
  return coordinate;
}

bool IsFirstCopy(std::span<const MeshSplit> splits, std::span<const std::uint64_t> coordinate) {
  for (std::size_t i = 0; i < splits.size(); ++i) {
    if (!splits[i].shards() && coordinate[i] != 0) return false;
  }
  return true;
}

MeshSplit FullyShard(std::uint32_t dim, std::span<const std::uint64_t> inner_sizes,
                     std::span<const MeshSplit> inner) {
  std::uint64_t factor = 1;
  for (std::size_t i = 0; i < inner.size(); ++i) {
    if (inner[i].shards() && inner[i].dim == dim) factor *= inner_sizes[i];
  }
  return factor > 1 ? MeshSplit::StridedShard(dim, factor) : MeshSplit::Shard(dim);
}

}  // namespace shardwright::layout
