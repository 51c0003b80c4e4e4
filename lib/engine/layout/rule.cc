// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/rule.h"

#include <algorithm>
#include <optional>

#include "engine/layout/mesh_rule_internal.h"
#include "support/base/checked.h"

namespace shardwright::layout {
namespace {

using Widths = std::vector<std::uint64_t>;

std::string Along(const SplitRule& rule) { return "dimension " + std::to_string(rule.dim); }

const Shape& ViewOf(const SplitRule& rule, const Shape& shape) {
  return rule.split == Split::kSub && !rule.view.empty() ? rule.view : shape;
}

Status CheckFits(const SplitRule& rule, const Shape& shape) {
  const Shape& view = ViewOf(rule, shape);
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(shape));
  SW_TRY_ASSIGN(const std::uint64_t view_elems, CountElems(view));
  if (elems != view_elems) {
    return Fail(Errc::kBadInput, "a view ", ToString(view), " of a tensor of shape ",
                ToString(shape));
  }
  if (rule.dim >= view.size()) {
    return Fail(Errc::kBadInput, "cut along ", Along(rule), ", but the shape is ", ToString(view));
  }
  if (rule.split != Split::kSub) return {};
  std::uint64_t sum = 0;
  for (std::uint64_t size : rule.sub_sizes) {
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, size));
  }
  if (sum != view[rule.dim]) {
    return Fail(Errc::kBadInput, "sub-tensors of ", sum, " elements along ", Along(rule),
                ", but the shape is ", ToString(view));
  }
  return {};
}

std::uint64_t GranuleOf(const SplitRule& rule, std::size_t sub) {
  if (rule.granule.empty()) return 1;
  return std::max<std::uint64_t>(rule.granule[std::min(sub, rule.granule.size() - 1)], 1);
}

// Returns the explicit widths of one sub-tensor, if the rule has them for this number of ranks.
const Widths* Explicit(const SplitRule& rule, std::size_t sub, std::uint64_t ranks) {
  if (sub >= rule.widths.size() || rule.widths[sub].size() != ranks) return nullptr;
  return &rule.widths[sub];
}

// Returns the rows of a padded vocabulary that each rank stores, including padding.
Result<Widths> PaddedWidths(const SplitRule& rule, std::uint64_t extent, std::uint64_t ranks) {
  if (const Widths* widths = Explicit(rule, 0, ranks)) return *widths;
  SW_TRY_ASSIGN(const std::uint64_t multiple, CheckedMul(GranuleOf(rule, 0), ranks));
  SW_TRY_ASSIGN(const std::uint64_t padded,
                CheckedMul(CeilDiv(std::max<std::uint64_t>(extent, 1), multiple), multiple));
  return Widths(ranks, padded / ranks);
}

// Removes the rows after the real extent from the end.
Result<Widths> RealOf(Widths padded, std::uint64_t extent) {
  std::uint64_t left = extent;
  for (std::uint64_t& width : padded) {
    width = std::min(width, left);
    left -= width;
  }
  if (left != 0) {
    return Fail(Errc::kBadInput, "widths add up to ", extent - left, " of ", extent, " rows");
  }
  return padded;
}

Result<Widths> PlainWidths(const SplitRule& rule, std::size_t sub, std::uint64_t extent,
                           std::uint64_t ranks) {
  if (const Widths* widths = Explicit(rule, sub, ranks)) {
    std::uint64_t sum = 0;
    for (std::uint64_t width : *widths) {
      SW_TRY_ASSIGN(sum, CheckedAdd(sum, width));
    }
    if (sum != extent) {
      return Fail(Errc::kBadInput, "widths add up to ", sum, ", but the extent along ", Along(rule),
                  " is ", extent);
    }
    return *widths;
  }
  if (ranks == 1) return Widths{extent};
  const std::uint64_t granule = GranuleOf(rule, sub);
  if (extent % granule != 0) {
    return Fail(Errc::kBadInput, "the extent ", extent, " along ", Along(rule),
                " is not a multiple of the granule ", granule);
  }
  const std::uint64_t count = extent / granule;
  if (count % ranks != 0 && !rule.uneven) {
    return Fail(Errc::kUnsupported, "the extent ", extent, " along ", Along(rule),
                (granule > 1 ? ", in units of " + std::to_string(granule) + "," : ""),
                " does not divide by ", ranks, " ranks, and the rule does not allow uneven widths",
                (rule.origin.empty() ? "" : " (" + rule.origin + ")"));
  }
  Widths widths(ranks);
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    widths[rank] = (count / ranks + (rank < count % ranks ? 1 : 0)) * granule;
  }
  return widths;
}

Status CheckRank(const SplitRule& rule, std::uint64_t ranks, std::uint64_t rank) {
  SW_CHECK(ranks > 0 && rank < ranks);
  if (rule.split == Split::kUnknown && ranks > 1) {
    return Fail(Errc::kUnsupported, "no rule defines how ", ranks,
                " tensor-parallel ranks shard it");
  }
  if (rule.split == Split::kListed && ranks > 1 && rule.cuts.size() != ranks) {
    return Fail(Errc::kUnsupported, "the layout is only known for ", rule.cuts.size(),
                " tensor-parallel ranks, not for ", ranks,
                (rule.origin.empty() ? "" : " (" + rule.origin + ")"));
  }
  return {};
}

bool CutsNothing(const SplitRule& rule, std::uint64_t ranks) {
  if (rule.padded && rule.split == Split::kDim) return false;
  return ranks == 1 || rule.split == Split::kReplicated || rule.split == Split::kAverage ||
         rule.split == Split::kUnknown;
}

// Groups consecutive view dimensions so that their products are the dimensions of `shape`.
// Returns the first view dimension of every group, plus one past the last, or nothing
// if the view mixes dimensions. The group of a dimension of extent 1 may be empty.
std::optional<std::vector<std::size_t>> GroupView(const Shape& view, const Shape& shape) {
  std::vector<std::size_t> begin{0};
  std::size_t at = 0;
  for (const std::uint64_t extent : shape) {
    std::uint64_t product = 1;
    if (extent == 1) {
      if (at < view.size() && view[at] == 1) ++at;
    } else {
      while (at < view.size() && product != extent) product *= view[at++];
      if (product != extent) return std::nullopt;
    }
    begin.push_back(at);
  }
  while (at < view.size() && view[at] == 1) ++at;
  begin.back() = at;
  if (at != view.size()) return std::nullopt;
  return begin;
}

Result<Shape> ConcatShape(const std::vector<Shape>& shards, std::size_t dim) {
  Shape whole = shards.front();
  if (dim >= whole.size()) {
    return Fail(Errc::kBadInput, "cut along dimension ", dim, ", but a shard's shape is ",
                ToString(whole));
  }
  whole[dim] = 0;
  for (const Shape& shard : shards) {
    bool same = shard.size() == whole.size();
    for (std::size_t i = 0; same && i < whole.size(); ++i) same = i == dim || shard[i] == whole[i];
    if (!same) {
      return Fail(Errc::kBadInput, "shards of shapes ", ToString(shards.front()), " and ",
                  ToString(shard), " differ outside dimension ", dim);
    }
    SW_TRY_ASSIGN(whole[dim], CheckedAdd(whole[dim], shard[dim]));
  }
  SW_TRY(CountElems(whole));
  return whole;
}

// Finds the whole shape: its dimension d is the sum of the shards'
// extents and, in the view, contains the dimension that is cut.
Result<Shape> WholeOfView(const SplitRule& rule, const std::vector<Shape>& shards) {
  std::optional<Shape> found;
  for (std::size_t dim = 0; dim < shards.front().size(); ++dim) {
    const Result<Shape> whole = ConcatShape(shards, dim);
    if (!whole) continue;
    const auto groups = GroupView(rule.view, *whole);
    if (!groups || (*groups)[dim] > rule.dim || rule.dim >= (*groups)[dim + 1]) continue;
    if (found && *found != *whole) {
      return Fail(Errc::kUnsupported, "shards of shape ", ToString(shards.front()),
                  " and the view ", ToString(rule.view), " fit a tensor of shape ",
                  ToString(*found), " and one of ", ToString(*whole),
                  "; give a rule without a view: sub-tensors by their sizes along a dimension "
                  "of the parameter, or a plain cut along it");
    }
    found = *whole;
  }
  if (found) return *std::move(found);
  return Fail(Errc::kBadInput, "shards of shape ", ToString(shards.front()),
              " do not fit the view ", ToString(rule.view));
}

}  // namespace

Result<std::vector<Widths>> RuleWidths(const SplitRule& rule, const Shape& shape,
                                       std::uint64_t ranks) {
  if (rule.split != Split::kDim && rule.split != Split::kSub) return std::vector<Widths>{};
  SW_TRY(CheckFits(rule, shape));
  const std::uint64_t extent = ViewOf(rule, shape)[rule.dim];
  std::vector<Widths> widths;
  if (rule.split == Split::kSub) {
    for (std::size_t sub = 0; sub < rule.sub_sizes.size(); ++sub) {
      SW_TRY_ASSIGN(Widths mine, PlainWidths(rule, sub, rule.sub_sizes[sub], ranks));
      widths.push_back(std::move(mine));
    }
  } else if (rule.padded) {
    SW_TRY_ASSIGN(Widths padded, PaddedWidths(rule, extent, ranks));
    SW_TRY_ASSIGN(Widths mine, RealOf(std::move(padded), extent));
    widths.push_back(std::move(mine));
  } else {
    SW_TRY_ASSIGN(Widths mine, PlainWidths(rule, 0, extent, ranks));
    widths.push_back(std::move(mine));
  }
  return widths;
}

Result<Cut> MakeCut(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                    std::uint64_t rank) {
  SW_TRY(CheckRank(rule, ranks, rank));
  SW_TRY(CountElems(shape));
  if (CutsNothing(rule, ranks)) return Cut::Whole(shape);
  if (rule.split == Split::kListed) {
    if (Elems(rule.cuts[rank].view()) != Elems(shape)) {
      return Fail(Errc::kBadInput, "the listed layout is for a tensor of shape ",
                  ToString(rule.cuts[rank].view()), ", not ", ToString(shape));
    }
    return rule.cuts[rank];
  }
  if (rule.split == Split::kMesh) return MakeMeshCut(rule, shape, ranks, rank);
  SW_TRY_ASSIGN(const std::vector<Widths> widths, RuleWidths(rule, shape, ranks));
  const Shape& view = ViewOf(rule, shape);
  const std::uint32_t dim = rule.dim;
  std::vector<Box> boxes{
      {std::vector<std::uint64_t>(view.size()), std::vector<std::uint64_t>(view.size()), view}};
  Shape shard = view;
  CutBoxes(dim, widths, rank, &boxes, &shard);
  if (rule.padded) {
    SW_TRY_ASSIGN(const Widths padded, PaddedWidths(rule, view[dim], ranks));
    shard[dim] = padded[rank];
  }
  return Cut::Make(view, std::move(shard), std::move(boxes));
}

Result<Shape> ShardShape(const SplitRule& rule, const Shape& shape, std::uint64_t ranks,
                         std::uint64_t rank) {
  SW_TRY_ASSIGN(const Cut cut, MakeCut(rule, shape, ranks, rank));
  if (cut.view() == shape) return cut.shard();
  const auto groups = GroupView(cut.view(), shape);
  if (!groups) {
    return Fail(Errc::kUnsupported, "the view ", ToString(cut.view()),
                " mixes dimensions of the shape ", ToString(shape),
                ", so a shard of it has no shape of that rank");
  }
  Shape shard(shape.size(), 1);
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    for (std::size_t at = (*groups)[dim]; at < (*groups)[dim + 1]; ++at) {
      shard[dim] *= cut.shard()[at];
    }
  }
  return shard;
}

Result<Shape> WholeShape(const SplitRule& rule, const std::vector<Shape>& shards) {
  SW_CHECK(!shards.empty());
  switch (rule.split) {
    case Split::kListed:
      if (rule.cuts.size() == shards.size() && shards.size() > 1) {
        for (std::size_t rank = 0; rank < shards.size(); ++rank) {
          if (rule.cuts[rank].shard() == shards[rank]) continue;
          return Fail(Errc::kBadInput, "rank ", rank, ": shard of shape ",
                      ToString(rule.cuts[rank].shard()), " expected from the listed layout, found ",
                      ToString(shards[rank]));
        }
        return rule.cuts.front().view();
      }
      [[fallthrough]];
    case Split::kUnknown:
      if (shards.size() > 1) {
        SW_TRY(CheckRank(rule, shards.size(), 0));
      }
      return shards.front();
    case Split::kReplicated:
    case Split::kAverage:
      for (const Shape& shard : shards) {
        if (shard == shards.front()) continue;
        return Fail(Errc::kBadInput, "copies of shapes ", ToString(shards.front()), " and ",
                    ToString(shard), " differ");
      }
      return shards.front();
    case Split::kDim:
      return ConcatShape(shards, rule.dim);
    case Split::kMesh:
      return WholeOfMesh(rule, shards);
    case Split::kSub:
      break;
  }
  SW_TRY_ASSIGN(Shape whole,
                rule.view.empty() ? ConcatShape(shards, rule.dim) : WholeOfView(rule, shards));
  SW_TRY(CheckFits(rule, whole));
  return whole;
}

std::string Explain(const SplitRule& rule) {
  const std::string along = " along dim " + std::to_string(rule.dim);
  switch (rule.split) {
    case Split::kReplicated:
      return "replicated";
    case Split::kAverage:
      return "average of all ranks";
    case Split::kDim:
      return (rule.dim == 0   ? "rows (dim 0)"
              : rule.dim == 1 ? "columns (dim 1)"
                              : "cut" + along) +
             std::string(rule.padded ? ", padded" : "");
    case Split::kSub: {
      const std::string in = rule.view.empty() ? "" : " of the view " + ToString(rule.view);
      std::string sizes;
      for (std::uint64_t size : rule.sub_sizes) {
        sizes += (sizes.empty() ? "" : "+") + std::to_string(size);
      }
      return "sub-tensors " + sizes + along + in;
    }
    case Split::kMesh:
      return ExplainMesh(rule);
    case Split::kListed:
      return "boxes listed for " + std::to_string(rule.cuts.size()) + " ranks";
    case Split::kUnknown:
      break;
  }
  return "unknown";
}

}  // namespace shardwright::layout
