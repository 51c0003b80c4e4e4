// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/mesh_rule.h"

#include <algorithm>
#include <set>

#include "engine/layout/mesh_rule_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::layout {
namespace {

bool Cuts(const SplitRule& axis) { return axis.split != Split::kReplicated; }

/// Returns "2 x 4", or "2 x any" if an axis has the ranks that the others leave.
std::string MeshText(const SplitRule& rule) {
  std::vector<std::string> sizes;
  for (const SplitRule& axis : rule.axes) {
    sizes.push_back(axis.axis_ranks == 0 ? "any" : std::to_string(axis.axis_ranks));
  }
  return Joined(sizes, " x ");
}

std::string TimesText(std::span<const std::uint64_t> sizes) {
  std::vector<std::string> words;
  for (const std::uint64_t size : sizes) words.push_back(std::to_string(size));
  return Joined(words, "x");
}

std::string OriginText(const SplitRule& rule) {
  return rule.origin.empty() ? "" : " (" + rule.origin + ")";
}

/// Checks one axis on its own.
Status CheckAxis(const SplitRule& axis) {
  if (axis.split != Split::kReplicated && axis.split != Split::kDim && axis.split != Split::kSub) {
    return Fail(Errc::kBadInput, "an axis is \"replicated\", \"dim\" or \"sub\", not ",
                Quoted(Explain(axis)));
  }
  if (axis.padded || !axis.view.empty()) {
    return Fail(Errc::kBadInput, "an axis has neither padding nor a view");
  }
  return {};
}

/// Returns the extents of the shards along one axis of the mesh, in dimension `dim`.
std::vector<std::uint64_t> ExtentsAlong(const std::vector<Shape>& shards, std::uint64_t size,
                                        std::uint64_t stride, std::uint32_t dim) {
  std::vector<std::uint64_t> extents;
  for (std::uint64_t at = 0; at < size; ++at) extents.push_back(shards[at * stride][dim]);
  return extents;
}

}  // namespace

Status CheckMesh(const SplitRule& rule) {
  if (rule.axes.size() < 2) {
    return Fail(Errc::kBadInput, "a mesh of at least 2 axes expected, found ", rule.axes.size());
  }
  std::set<std::uint32_t> dims;
  std::size_t open = 0;
  for (std::size_t i = 0; i < rule.axes.size(); ++i) {
    const SplitRule& axis = rule.axes[i];
    const std::string number = "axis " + std::to_string(i + 1);
    if (Status one = CheckAxis(axis); !one) return Within(number, one.error());
    if (Cuts(axis) && !dims.insert(axis.dim).second) {
      return Fail(Errc::kBadInput, number, ": another axis already splits dimension ", axis.dim);
    }
    if (axis.axis_ranks == 0 && ++open > 1) {
      return Fail(Errc::kBadInput, number,
                  ": another axis already has no number of ranks, and only one can have the rest");
    }
  }
  if (dims.empty()) return Fail(Errc::kBadInput, "no axis of the mesh splits a dimension");
  return {};
}

Result<std::vector<std::uint64_t>> MeshSizes(const SplitRule& rule, std::uint64_t ranks) {
  std::vector<std::uint64_t> sizes;
  std::uint64_t known = 1;
  for (const SplitRule& axis : rule.axes) {
    sizes.push_back(axis.axis_ranks);
    if (axis.axis_ranks == 0) continue;
    SW_TRY_ASSIGN(known, CheckedMul(known, axis.axis_ranks));
  }
  const auto open = std::find(sizes.begin(), sizes.end(), 0);
  const std::uint64_t rest = known == 0 || ranks % known != 0 ? 0 : ranks / known;
  if (open != sizes.end() && rest != 0) *open = rest;
  const bool fits = rest != 0 && (rest == 1 || open != sizes.end());
  if (fits) return sizes;
  return Fail(Errc::kUnsupported, ranks, " tensor-parallel ranks do not form the mesh ",
              MeshText(rule), " of the rule", OriginText(rule));
}

std::uint64_t FirstCopy(const SplitRule& rule, std::uint64_t ranks, std::uint64_t rank) {
  if (rule.split == Split::kReplicated) return 0;
  if (rule.split == Split::kListed && rank < rule.cuts.size()) {
    const auto same = std::find(rule.cuts.begin(), rule.cuts.end(), rule.cuts[rank]);
    return static_cast<std::uint64_t>(same - rule.cuts.begin());
  }
  if (rule.split != Split::kMesh || ranks == 1) return rank;
  const auto sizes = MeshSizes(rule, ranks);
  if (!sizes) return rank;
  const std::vector<std::uint64_t> at = CoordinateOf(*sizes, rank);
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < at.size(); ++i) {
    first = first * (*sizes)[i] + (Cuts(rule.axes[i]) ? at[i] : 0);
  }
  return first;
}

std::optional<SplitRule> MeshOfCuts(std::span<const Cut> cuts) {
  struct Axis {
    std::uint64_t stride = 0;
    SplitRule rule;
  };
  std::vector<Axis> found;
  const Shape& shape = cuts.front().view();
  for (std::uint32_t dim = 0; dim < shape.size(); ++dim) {
    Axis axis;
    axis.rule.split = Split::kDim;
    axis.rule.dim = dim;
    axis.rule.widths.resize(1);
    std::set<std::uint64_t> offsets;
    for (std::uint64_t rank = 0; rank < cuts.size(); ++rank) {
      if (cuts[rank].is_composed() || cuts[rank].boxes().size() != 1) return std::nullopt;
      const Box& box = cuts[rank].boxes().front();
      if (!offsets.insert(box.at_view[dim]).second) continue;
      if (offsets.size() == 2) axis.stride = rank;
      axis.rule.widths[0].push_back(box.sizes[dim]);
    }
    axis.rule.axis_ranks = offsets.size();
    if (axis.stride != 0) found.push_back(std::move(axis));
  }
  std::sort(found.begin(), found.end(),
            [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  SplitRule mesh;
  mesh.split = Split::kMesh;
  const auto add_copies = [&](std::uint64_t ranks) {
    if (ranks <= 1) return;
    mesh.axes.emplace_back().axis_ranks = ranks;
  };
  std::uint64_t rest = cuts.size();
  for (Axis& axis : found) {
    const std::uint64_t ranks = axis.stride * axis.rule.axis_ranks;
    if (ranks == 0 || rest % ranks != 0) return std::nullopt;
    add_copies(rest / ranks);
    rest = axis.stride;
    mesh.axes.push_back(std::move(axis.rule));
  }
  add_copies(rest);
  if (!CheckMesh(mesh)) return std::nullopt;
  for (std::uint64_t rank = 0; rank < cuts.size(); ++rank) {
    const Result<Cut> cut = MakeCut(mesh, shape, cuts.size(), rank);
    if (!cut || *cut != cuts[rank]) return std::nullopt;
  }
  return mesh;
}

std::optional<SplitRule> RuleOfSplits(std::span<const std::uint64_t> sizes,
                                      std::span<const MeshSplit> splits) {
  SplitRule mesh;
  mesh.split = Split::kMesh;
  for (std::size_t i = 0; i < splits.size(); ++i) {
    if (splits[i].kind == MeshSplit::Kind::kStridedShard) return std::nullopt;
    if (sizes[i] == 1) continue;
    SplitRule axis;
    axis.split = splits[i].shards() ? Split::kDim : Split::kReplicated;
    axis.dim = splits[i].dim;
    const bool same = !mesh.axes.empty() && mesh.axes.back().split == axis.split &&
                      mesh.axes.back().dim == axis.dim;
    if (same) {
      mesh.axes.back().axis_ranks *= sizes[i];
    } else {
      axis.axis_ranks = sizes[i];
      mesh.axes.push_back(std::move(axis));
    }
  }
  if (mesh.axes.empty()) return SplitRule();
  if (mesh.axes.size() == 1) {
    mesh.axes.front().axis_ranks = 0;
    return mesh.axes.front();
  }
  if (!CheckMesh(mesh)) return std::nullopt;
  return mesh;
}

Result<std::vector<MeshSplit>> SplitsOfRule(const SplitRule& rule,
                                            std::span<const std::uint64_t> sizes) {
  const auto of = [](const SplitRule& axis) {
    return axis.split == Split::kDim ? MeshSplit::Shard(axis.dim) : MeshSplit::Replicate();
  };
  if (rule.split == Split::kReplicated || rule.split == Split::kDim) {
    return std::vector<MeshSplit>(sizes.size(), of(rule));
  }
  const bool listed = std::any_of(rule.axes.begin(), rule.axes.end(),
                                  [](const SplitRule& axis) { return axis.split == Split::kSub; });
  if (rule.split != Split::kMesh || listed) {
    return Fail(Errc::kUnsupported, "sharded by ", Explain(rule),
                ", which no DTensor placement can express");
  }
  std::uint64_t ranks = 1;
  for (const std::uint64_t size : sizes) {
    SW_TRY_ASSIGN(ranks, CheckedMul(ranks, size));
  }
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> wanted, MeshSizes(rule, ranks));
  if (!std::equal(wanted.begin(), wanted.end(), sizes.begin(), sizes.end())) {
    return Fail(Errc::kUnsupported, "sharded by ", Explain(rule),
                ", but the target has tp=", TimesText(sizes),
                "; give the axes of its mesh: tp=", TimesText(wanted));
  }
  std::vector<MeshSplit> splits;
  for (const SplitRule& axis : rule.axes) splits.push_back(of(axis));
  return splits;
}

void CutBoxes(std::uint32_t dim, const std::vector<std::vector<std::uint64_t>>& widths,
              std::uint64_t rank, std::vector<Box>* boxes, Shape* shard) {
  std::vector<Box> cut;
  cut.reserve(boxes->size() * widths.size());
  std::uint64_t sub_at = 0;
  std::uint64_t shard_at = 0;
  for (const std::vector<std::uint64_t>& sub : widths) {
    std::uint64_t before = 0;
    std::uint64_t all = 0;
    for (std::uint64_t other = 0; other < sub.size(); ++other) {
      if (other < rank) before += sub[other];
      all += sub[other];
    }
    for (const Box& box : *boxes) {
      cut.push_back(box);
      cut.back().at_view[dim] = sub_at + before;
      cut.back().at_shard[dim] = shard_at;
      cut.back().sizes[dim] = sub[rank];
    }
    sub_at += all;
    shard_at += sub[rank];
  }
  *boxes = std::move(cut);
  (*shard)[dim] = shard_at;
}

Result<Cut> MakeMeshCut(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                        std::uint64_t rank) {
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> sizes, MeshSizes(rule, ranks));
  const std::vector<std::uint64_t> at = CoordinateOf(sizes, rank);
  std::vector<Box> boxes{
      {std::vector<std::uint64_t>(shape.size()), std::vector<std::uint64_t>(shape.size()), shape}};
  Shape shard = shape;
  for (std::size_t i = 0; i < rule.axes.size(); ++i) {
    const SplitRule& axis = rule.axes[i];
    if (!Cuts(axis)) continue;
    const auto widths = RuleWidths(axis, shape, sizes[i]);
    if (!widths) {
      return Within(
          "axis " + std::to_string(i + 1) + " of the mesh " + MeshText(rule) + OriginText(rule),
          widths.error());
    }
    if (boxes.size() * widths->size() > limits::kMeshBoxes) {
      return Fail(Errc::kLimit, "a mesh of ", boxes.size() * widths->size(),
                  " sub-tensors, at most ", limits::kMeshBoxes, " are supported");
    }
    CutBoxes(axis.dim, *widths, at[i], &boxes, &shard);
  }
  return Cut::Make(shape, std::move(shard), std::move(boxes));
}

Result<Shape> WholeOfMesh(const SplitRule& rule, const std::vector<Shape>& shards) {
  Shape whole = shards.front();
  for (const SplitRule& axis : rule.axes) {
    if (!Cuts(axis) || axis.dim < whole.size()) continue;
    return Fail(Errc::kBadInput, "cut along dimension ", axis.dim, ", but a shard's shape is ",
                ToString(whole));
  }
  if (shards.size() == 1) return whole;
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> sizes, MeshSizes(rule, shards.size()));
  // The first rank of each other axis shows the extents along an axis.
  std::vector<std::vector<std::uint64_t>> extents(sizes.size());
  std::uint64_t stride = shards.size();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    stride /= sizes[i];
    const SplitRule& axis = rule.axes[i];
    if (!Cuts(axis)) continue;
    for (std::uint64_t at = 0; at < sizes[i]; ++at) {
      if (shards[at * stride].size() == whole.size()) continue;
      return Fail(Errc::kBadInput, "shards of shapes ", ToString(shards.front()), " and ",
                  ToString(shards[at * stride]), " have different numbers of dimensions");
    }
    extents[i] = ExtentsAlong(shards, sizes[i], stride, axis.dim);
    whole[axis.dim] = 0;
    for (const std::uint64_t extent : extents[i]) {
      SW_TRY_ASSIGN(whole[axis.dim], CheckedAdd(whole[axis.dim], extent));
    }
  }
  for (std::uint64_t rank = 0; rank < shards.size(); ++rank) {
    const std::vector<std::uint64_t> at = CoordinateOf(sizes, rank);
    Shape expected = shards.front();
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (Cuts(rule.axes[i])) expected[rule.axes[i].dim] = extents[i][at[i]];
    }
    if (expected == shards[rank]) continue;
    return Fail(Errc::kBadInput, "rank ", rank, ", at ", ToString(at), " of the mesh ",
                MeshText(rule), ": shard ", ToString(expected), " expected, found ",
                ToString(shards[rank]));
  }
  SW_TRY(CountElems(whole));
  return whole;
}

std::string ExplainMesh(const SplitRule& rule) {
  std::vector<std::string> axes;
  for (const SplitRule& axis : rule.axes) axes.push_back(Explain(axis));
  return "mesh " + MeshText(rule) + ": " + Joined(axes, ", ");
}

}  // namespace shardwright::layout
