// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <set>

#include "checkpoints/deepspeed/common/affine_map_internal.h"
#include "engine/layout/mesh_rule.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints {
namespace {

using layout::Box;
using layout::Cut;
using layout::Split;
using layout::SplitRule;

struct Piece {
  Box box;
  bool empty = false;
  bool shared = false;  // stored by several ranks
};

Result<std::uint64_t> RankOf(const pickle::Node* key) {
  if (!key->is_string()) return pickle::AsCount(key);
  std::uint64_t rank = 0;
  for (char c : key->text) {
    if (c < '0' || c > '9' || rank > (std::uint64_t{1} << 32)) {
      return Fail(Errc::kBadInput, "\"", key->text, "\" is not a rank");
    }
    rank = rank * 10 + static_cast<std::uint64_t>(c - '0');
  }
  return rank;
}

const pickle::Node* RankEntry(const pickle::Node* ranks, std::uint64_t rank) {
  for (std::size_t i = 0; i < ranks->entry_count(); ++i) {
    const Result<std::uint64_t> key = RankOf(ranks->key(i));
    if (key && *key == rank) return ranks->value(i);
  }
  return nullptr;
}

// Converts an offset with row-major strides to coordinates in `shape`. The strides must equal
// those of the shape in every dimension along which the piece has more than one element.
Result<std::vector<std::uint64_t>> Unravel(const pickle::Node* side, const Shape& piece,
                                           const Shape& shape, const char* what) {
  if (side == nullptr ||
      (side->kind != pickle::Kind::kList && side->kind != pickle::Kind::kTuple) ||
      side->items.size() != 2) {
    return Fail(Errc::kBadInput, what, ": [offset, strides] expected, found ",
                pickle::Describe(side));
  }
  SW_TRY_ASSIGN(std::uint64_t offset, pickle::AsCount(side->items[0]));
  SW_TRY_ASSIGN(const Shape strides, pickle::AsShape(side->items[1]));
  const std::vector<std::uint64_t> expected = ContiguousStrides(shape);
  bool same = strides.size() == piece.size() && piece.size() == shape.size();
  for (std::size_t dim = 0; same && dim < shape.size(); ++dim) {
    same = piece[dim] <= 1 || strides[dim] == expected[dim];
  }
  if (!same) {
    return Fail(Errc::kUnsupported, what, " strides ", ToString(strides), " of a piece of shape ",
                ToString(piece), " are not the contiguous strides of shape ", ToString(shape));
  }
  std::vector<std::uint64_t> at(shape.size(), 0);
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    if (expected[dim] == 0) continue;
    at[dim] = offset / expected[dim];
    offset %= expected[dim];
  }
  if (offset != 0) {
    return Fail(Errc::kBadInput, what, " offset is outside shape ", ToString(shape));
  }
  return at;
}

Result<Piece> ReadPiece(const pickle::Node* node, const Shape& whole, const Shape& shard,
                        std::uint64_t rank) {
  Piece piece;
  SW_TRY_ASSIGN(piece.box.sizes, pickle::AsShape(node->Find("shape")));
  if (const pickle::Node* scale = node->Find("scale")) {
    SW_TRY_ASSIGN(const double factor, pickle::AsFloat(scale));
    if (factor != 1.0) {
      return Fail(Errc::kUnsupported, "a piece is stored scaled by ", std::to_string(factor));
    }
  }
  SW_TRY_ASSIGN(const Shape locations, pickle::AsShape(node->Find("locations")));
  if (std::find(locations.begin(), locations.end(), rank) == locations.end()) {
    return Fail(Errc::kBadInput, "a piece of rank ", rank, " lists only the locations ",
                ToString(locations));
  }
  piece.shared = locations.size() > 1;
  piece.empty = std::count(piece.box.sizes.begin(), piece.box.sizes.end(), 0) > 0;
  if (piece.empty) {
    if (piece.box.sizes.size() != whole.size()) {
      return Fail(Errc::kBadInput, "a piece of shape ", ToString(piece.box.sizes),
                  " has a different number of dimensions than the tensor of shape ",
                  ToString(whole));
    }
    piece.box.at_view.assign(whole.size(), 0);
    piece.box.at_shard.assign(whole.size(), 0);
    return piece;
  }
  SW_TRY_ASSIGN(piece.box.at_view, Unravel(node->Find("source"), piece.box.sizes, whole, "source"));
  SW_TRY_ASSIGN(piece.box.at_shard, Unravel(node->Find("dest"), piece.box.sizes, shard, "dest"));
  return piece;
}

// Returns the shape that the map records for a shard. It may be the shape of a
// view: AutoTP stores shards in the parameter's own number of dimensions, but
// describes shards of layers with a `shape` in the dimensions of that shape.
Result<Shape> DescribedShape(const pickle::Node* entry, const Shape& shard, std::uint64_t rank) {
  SW_TRY_ASSIGN(Shape described, pickle::AsShape(entry->Find("shard_shape")));
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(described));
  if (described != shard && (elems != Elems(shard) || described.size() <= shard.size())) {
    return Fail(Errc::kBadInput, "rank ", rank, " holds a shard of shape ", ToString(shard),
                ", but the map records ", ToString(described));
  }
  return described;
}

Result<std::vector<Piece>> ReadRank(const pickle::Node* entry, const Shape& whole,
                                    const Shape& shard, std::uint64_t rank) {
  const pickle::Node* list = entry->Find("pieces");
  if (list == nullptr || !list->is_list()) {
    return Fail(Errc::kBadInput, "pieces: list expected, found ", pickle::Describe(list));
  }
  std::vector<Piece> pieces;
  for (const pickle::Node* node : list->items) {
    SW_TRY_ASSIGN(Piece piece, ReadPiece(node, whole, shard, rank));
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

// Returns the only dimension that pieces cut, the first one if they cut none, or nothing.
std::optional<std::uint32_t> CutDimension(const std::vector<std::vector<Piece>>& ranks,
                                          const Shape& whole) {
  std::optional<std::size_t> cut;
  for (const auto& pieces : ranks) {
    for (const Piece& piece : pieces) {
      for (std::size_t dim = 0; dim < whole.size(); ++dim) {
        if (piece.box.sizes[dim] == whole[dim] || cut == dim) continue;
        if (cut) return std::nullopt;
        cut = dim;
      }
    }
  }
  if (whole.empty()) return std::nullopt;
  return static_cast<std::uint32_t>(cut.value_or(0));
}

// Describes the pieces as one stack of sub-tensors along `dim`: the i-th pieces of all ranks,
// in rank order, are the i-th sub-tensor. Returns nothing if they are not such a stack.
std::optional<SplitRule> AsStack(const std::vector<std::vector<Piece>>& ranks, const Shape& whole,
                                 std::uint32_t dim) {
  SplitRule rule;
  rule.dim = dim;
  const std::size_t subs = ranks.front().size();
  std::vector<std::uint64_t> shard_at(ranks.size(), 0);
  std::uint64_t at = 0;
  for (std::size_t sub = 0; sub < subs; ++sub) {
    std::vector<std::uint64_t> widths;
    const std::uint64_t first = at;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].size() != subs) return std::nullopt;
      const Piece& piece = ranks[rank][sub];
      const std::uint64_t width = piece.box.sizes[dim];
      if (!piece.empty &&
          (piece.box.at_view[dim] != at || piece.box.at_shard[dim] != shard_at[rank])) {
        return std::nullopt;
      }
      if (width > whole[dim] - at) return std::nullopt;
      at += width;
      shard_at[rank] += width;
      widths.push_back(width);
    }
    rule.sub_sizes.push_back(at - first);
    rule.widths.push_back(std::move(widths));
  }
  if (at != whole[dim]) return std::nullopt;
  rule.split = subs == 1 ? Split::kDim : Split::kSub;
  if (subs == 1) rule.sub_sizes.clear();
  return rule;
}

// Converts the rule of a parameter's view to a rule for the stored parameter.
Status SeeThroughView(std::span<const Shape> shards, Ruled* ruled) {
  SplitRule& rule = ruled->rule;
  if (rule.split == Split::kListed || rule.split == Split::kMesh) {
    return Fail(
        Errc::kUnsupported, "blocks of a tensor viewed as ", ToString(ruled->whole),
        " are not supported if its shards are stored in another shape: ", ToString(shards.front()));
  }
  if (rule.split == Split::kDim) {
    rule.split = Split::kSub;
    rule.sub_sizes = {ruled->whole[rule.dim]};
  }
  if (rule.split == Split::kSub) rule.view = ruled->whole;
  SW_TRY_ASSIGN(ruled->whole, layout::WholeShape(rule, {shards.begin(), shards.end()}));
  for (std::uint64_t rank = 0; rank < shards.size(); ++rank) {
    SW_TRY_ASSIGN(const Shape shard, layout::ShardShape(rule, ruled->whole, shards.size(), rank));
    if (shard == shards[rank]) continue;
    return Fail(Errc::kBadInput, "rank ", rank, " holds a shard of shape ", ToString(shards[rank]),
                ", but the map records ", ToString(shard));
  }
  return {};
}

// Returns the rule for the pieces of all ranks. `shards` has the shape of each rank's shard.
Result<SplitRule> RuleOfPieces(std::vector<std::vector<Piece>>* ranks, const Shape& whole,
                               const std::vector<Shape>& shards) {
  SplitRule rule;
  const bool all = std::all_of(ranks->begin(), ranks->end(), [&](const auto& pieces) {
    return pieces.size() == 1 && pieces.front().box.sizes == whole;
  });
  if (all) {
    rule.split = Split::kReplicated;
    return rule;
  }
  const bool shared = std::any_of(ranks->begin(), ranks->end(), [](const auto& pieces) {
    return std::any_of(pieces.begin(), pieces.end(),
                       [](const Piece& piece) { return piece.shared; });
  });
  if (const auto dim = shared ? std::nullopt : CutDimension(*ranks, whole)) {
    if (auto stack = AsStack(*ranks, whole, *dim)) return *std::move(stack);
  }
  rule.split = Split::kListed;
  for (std::size_t rank = 0; rank < ranks->size(); ++rank) {
    std::vector<Box> boxes;
    for (Piece& piece : (*ranks)[rank]) boxes.push_back(std::move(piece.box));
    SW_TRY_ASSIGN(Cut cut, Cut::Make(whole, shards[rank], std::move(boxes)));
    rule.cuts.push_back(std::move(cut));
  }
  if (auto mesh = layout::MeshOfCuts(rule.cuts)) return *std::move(mesh);
  // Ranks may have equal shards, but not different shards with a common part.
  std::uint64_t covered = 0;
  for (std::uint64_t rank = 0; shared && rank < rule.cuts.size(); ++rank) {
    if (layout::FirstCopy(rule, rule.cuts.size(), rank) != rank) continue;
    SW_TRY_ASSIGN(covered, CheckedAdd(covered, rule.cuts[rank].covered_elems()));
  }
  if (shared && covered != Elems(whole)) {
    return Fail(Errc::kUnsupported,
                "several ranks store the same part of the tensor, but other parts of their shards "
                "differ");
  }
  return rule;
}

const pickle::Node* Ints(pickle::Arena& arena, std::span<const std::uint64_t> values) {
  std::vector<const pickle::Node*> items;
  for (std::uint64_t value : values) items.push_back(arena.Int(static_cast<std::int64_t>(value)));
  return arena.List(std::move(items));
}

const pickle::Node* Side(pickle::Arena& arena, const std::vector<std::uint64_t>& at,
                         const Shape& shape) {
  const std::vector<std::uint64_t> strides = ContiguousStrides(shape);
  std::uint64_t offset = 0;
  for (std::size_t dim = 0; dim < at.size(); ++dim) offset += at[dim] * strides[dim];
  return arena.List({arena.Int(static_cast<std::int64_t>(offset)), Ints(arena, strides)});
}

}  // namespace

Result<Ruled> RuleFromAffine(const pickle::Node* entry, std::span<const Shape> shards) {
  Ruled ruled;
  SW_TRY_ASSIGN(ruled.whole, pickle::AsShape(entry->Find("logical_shape")));
  SW_TRY(CountElems(ruled.whole));
  const pickle::Node* by_rank = entry->Find("ranks");
  if (by_rank == nullptr || !by_rank->is_dict() || by_rank->entry_count() != shards.size()) {
    return Fail(Errc::kBadInput, "the map is for ",
                (by_rank != nullptr && by_rank->is_dict() ? std::to_string(by_rank->entry_count())
                                                          : std::string("no")),
                " ranks, the checkpoint has ", shards.size());
  }
  std::vector<std::vector<Piece>> ranks;
  std::vector<Shape> described;
  for (std::uint64_t rank = 0; rank < shards.size(); ++rank) {
    const pickle::Node* mine = RankEntry(by_rank, rank);
    if (mine == nullptr) {
      return Fail(Errc::kBadInput, "the map lacks rank ", rank);
    }
    SW_TRY_ASSIGN(Shape shape, DescribedShape(mine, shards[rank], rank));
    SW_TRY_ASSIGN(std::vector<Piece> pieces, ReadRank(mine, ruled.whole, shape, rank));
    described.push_back(std::move(shape));
    ranks.push_back(std::move(pieces));
  }
  SW_TRY_ASSIGN(ruled.rule, RuleOfPieces(&ranks, ruled.whole, described));
  if (!std::equal(described.begin(), described.end(), shards.begin())) {
    SW_TRY(SeeThroughView(shards, &ruled));
  }
  return ruled;
}

const pickle::Node* AffineFromCuts(pickle::Arena& arena, std::span<const Cut> cuts,
                                   const SplitRule& rule) {
  std::vector<std::vector<std::uint64_t>> sharing(cuts.size());
  for (std::size_t rank = 0; rank < cuts.size(); ++rank) {
    sharing[layout::FirstCopy(rule, cuts.size(), rank)].push_back(rank);
  }
  pickle::Node* ranks = arena.Dict();
  for (std::size_t rank = 0; rank < cuts.size(); ++rank) {
    const Cut& cut = cuts[rank];
    const std::vector<std::uint64_t>& locations =
        sharing[layout::FirstCopy(rule, cuts.size(), rank)];
    std::vector<const pickle::Node*> pieces;
    for (const Box& box : cut.boxes()) {
      pickle::Node* piece = arena.Dict();
      Set(arena, piece, "shape", Ints(arena, box.sizes));
      Set(arena, piece, "source", Side(arena, box.at_view, cut.view()));
      Set(arena, piece, "dest", Side(arena, box.at_shard, cut.shard()));
      Set(arena, piece, "locations", Ints(arena, locations));
      pieces.push_back(piece);
    }
    pickle::Node* mine = arena.Dict();
    Set(arena, mine, "shard_shape", Ints(arena, cut.shard()));
    Set(arena, mine, "pieces", arena.List(std::move(pieces)));
    ranks->items.push_back(arena.Int(static_cast<std::int64_t>(rank)));
    ranks->items.push_back(mine);
  }
  pickle::Node* entry = arena.Dict();
  Set(arena, entry, "logical_shape", Ints(arena, cuts.front().view()));
  Set(arena, entry, "ranks", ranks);
  return entry;
}

}  // namespace shardwright::checkpoints
