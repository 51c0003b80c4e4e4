// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/write/dist_internal.h"
#include "support/base/text.h"

// Writes the optimizer state in gradient buffers (dp_reshardable).

namespace shardwright::checkpoints::megatron {

using pickle::Node;

/// Adds the optimizer state in gradient buffers.
Status DistWriter::AddBuffers() {
  if (!writing_.has_optimizer || to_.optimizer != OptimizerForm::kDpReshardable) return {};
  SW_TRY(CheckBuffers(writing_));
  SW_TRY_ASSIGN(step_, StepOf(source_));
  Shards shards(writing_, stages_, ModelOrder(source_.params));
  BucketKey key;
  key.chained = shards.chained();
  for (key.part = 0; key.part < (key.chained ? 2U : 1U); ++key.part) {
    key.group = 0;
    for (const Rank& rank : BufferRanks(args_, key.part == 1)) {
      SW_TRY(AddBuffersOf(&shards, key, rank));
      ++key.group;
    }
  }
  return {};
}

Status DistWriter::AddBuffersOf(Shards* shards, BucketKey key, const Rank& rank) {
  std::vector<std::vector<Mine>> chunks;
  for (std::uint64_t chunk = 0; chunk < to_.vpp; ++chunk) {
    SW_TRY_ASSIGN(std::vector<Mine> mine, shards->MineOf(rank, chunk));
    chunks.push_back(std::move(mine));
  }
  const std::string where = StrCat("dp_reshardable: stage ", rank.p);
  auto buffers = shards->BuffersOf(rank, chunks, key.part == 1);
  if (!buffers) return Within(where, buffers.error());
  if (buffers->empty()) {
    return Fail(Errc::kUnsupported, where, " has no ", (key.part == 1 ? "experts" : "parameters"),
                ", so it has fewer optimizers than the others, which "
                "Megatron-Core cannot load");
  }
  SW_TRY(AddGroupObjects(key, *buffers, rank));
  for (const StateBuffer& one : *buffers) {
    key.dtypes = "(torch." + std::string(Name(one.dtype)) + ", torch." +
                 std::string(Name(one.gradient)) + ")";
    for (const std::string& state : one.states) {
      key.slot = SlotOf(state);
      SW_TRY(AddState(shards, key, one, state, rank));
    }
    ++key.buffer;
  }
  return {};
}

/// Adds one state of all parameters in a buffer. Each item is one parameter or gap,
/// so that data-parallel ranks read little more than they need, whatever their number.
Status DistWriter::AddState(Shards* shards, BucketKey key, const StateBuffer& one,
                            const std::string& state, const Rank& rank) {
  std::uint64_t at = 0;
  for (std::size_t i = one.mine.size(); i-- > 0;) {
    if (one.buffer.bucket_of[i] != key.bucket) at = 0;
    key.bucket = one.buffer.bucket_of[i];
    const std::uint64_t elems = Elems(one.mine[i].shape);
    const std::uint64_t first = one.buffer.offsets[i];
    const std::size_t entry =
        EntryOf(BucketKeyText(key), DType::kF32, {one.buffer.unpadded[key.bucket]});
    if (first > at) pieces_.push_back({entry, std::nullopt, at, first - at, rank});
    at = first + elems;
    if (elems > 0) {
      const std::uint32_t array = builder_.AddArray(DType::kF32, 1);
      SW_TRY(shards->AddShard(rank, one.mine[i], state, DType::kF32, array, 0));
      pieces_.push_back({entry, array, first, elems, rank});
    }
    // A gap before an embedding that two stages share ends the bucket.
    const bool ends = i == 0 || one.buffer.bucket_of[i - 1] != key.bucket;
    const std::uint64_t all = one.buffer.unpadded[key.bucket];
    if (ends && at < all) pieces_.push_back({entry, std::nullopt, at, all - at, rank});
  }
  return {};
}

/// Adds the objects of every rank's buffers: sizes of buckets, groups.
Status DistWriter::AddGroupObjects(BucketKey key, const std::vector<StateBuffer>& buffers,
                                   const Rank& rank) {
  const auto add = [&](const char* slot, Document document, const Node* value) -> Status {
    document.root = document.arena.List({value});
    key.slot = slot;
    return AddObject(ObjectKeyText(BucketKeyText(key), {0}, {1}), document, rank);
  };
  for (const bool padded : {true, false}) {
    Document document;
    pickle::Arena& arena = document.arena;
    std::vector<const Node*> all;
    for (const StateBuffer& one : buffers) {
      std::vector<const Node*> counts;
      for (const std::uint64_t count : padded ? one.buffer.padded : one.buffer.unpadded) {
        counts.push_back(arena.Int(static_cast<std::int64_t>(count)));
      }
      Node* sizes = arena.Dict();
      sizes->items = {TypesNode(arena, one), arena.List(std::move(counts))};
      all.push_back(sizes);
    }
    const Node* list = arena.List(std::move(all));
    SW_TRY(
        add(padded ? "per_bucket_numel" : "per_bucket_numel_unpadded", std::move(document), list));
  }
  Document document;
  std::vector<const Node*> groups;
  for (const TargetGroup& group :
       GroupsOf(document.arena, writing_, key.chained, key.part == 1, step_)) {
    groups.push_back(group.options);
  }
  Node* optimizer = document.arena.Dict();
  Set(document.arena, optimizer, "param_groups", document.arena.List(std::move(groups)));
  SW_TRY(add("optimizer", std::move(document), optimizer));
  Document scaled;
  SW_TRY_ASSIGN(const Node* scaler, ScalerNode(&scaled, source_, key.part == 1));
  return scaler == nullptr ? Status() : add("grad_scaler", std::move(scaled), scaler);
}

Status DistWriter::AddPieces() {
  for (const Piece& piece : pieces_) {
    dcp::Entry& entry = index_.entries[piece.entry];
    const std::uint32_t file = FileOf(piece.rank);
    dcp::Place place;
    if (piece.array) {
      SW_TRY_ASSIGN(place,
                    items_.AddTensor(file, entry.dtype, {piece.elems}, *piece.array, entry.name));
    } else {
      Document gap;
      gap.root = gap.AddInline(std::string(piece.elems * ItemSize(entry.dtype), '\0'), entry.dtype,
                               {piece.elems});
      SW_TRY_ASSIGN(place, items_.AddObject(file, gap));
    }
    place.file = FileNumber(piece.rank);
    entry.chunks.push_back({{piece.first}, {piece.elems}, place});
  }
  return {};
}

}  // namespace shardwright::checkpoints::megatron
