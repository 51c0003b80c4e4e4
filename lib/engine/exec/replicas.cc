// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/replicas.h"

#include <algorithm>
#include <vector>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "support/base/checked.h"

namespace shardwright::exec {
namespace {

using layout::Fragment;
using layout::LogicalTensor;
using layout::ShardMap;

/// A replica, its owner, and the position of its blocks among those of all replicas.
struct Copies {
  const LogicalTensor* tensor;
  const Fragment* owner;
  const Fragment* replica;
  std::uint64_t first_block;

  std::uint64_t item() const { return ItemSize(tensor->dtype); }
  std::uint64_t block_elems() const { return plan::kUnitBytes / item(); }
};

/// Shard elements [first, last) of a replica and its owner.
struct Block {
  const Copies* copies;
  std::uint64_t first;
  std::uint64_t last;
};

/// Adds the byte ranges of a fragment's elements [first, last).
void AddByteRanges(const ShardMap& map, const Fragment& fragment, const Block& block,
                   std::vector<ByteRange>* stretches) {
  const std::uint64_t item = block.copies->item();
  layout::ForHolders(
      map, fragment.at, block.first, block.last,
      [&](const layout::Region& region, std::uint64_t element, std::uint64_t elems) {
        stretches->push_back({region.member, region.offset + element * item, elems * item});
      });
}

class Comparing {
 public:
  Comparing(comm::Comm& comm, Exchange& source, unsigned threads, Sink& sink)
      : comm_(comm),
        source_(source),
        map_(source.source()),
        arena_(ArenaThreads(threads)),
        sink_(sink) {
    for (const LogicalTensor& tensor : map_.tensors) AddClones(tensor);
  }

  Status Run(std::uint64_t memory_bytes) {
    const auto ranks = static_cast<std::uint64_t>(comm_.size());
    const auto rank = static_cast<std::uint64_t>(comm_.rank());
    const std::uint64_t first = blocks_ * rank / ranks;
    const std::uint64_t count = blocks_ * (rank + 1) / ranks - first;
    return InRounds(comm_, count, source_.RoundUnits(memory_bytes),
                    [&](std::uint64_t begin, std::uint64_t end) -> Status {
                      SW_TRY(Fetch(first + begin, first + end));
                      return comm_.Agree(CompareBlocks(first + begin, first + end));
                    });
  }

 private:
  /// Buffers of one thread.
  struct Buffers {
    std::vector<ByteRange> stretches;
    std::vector<std::byte> owner;
    std::vector<std::byte> replica;
  };

  void AddClones(const LogicalTensor& tensor) {
    for (const Fragment& replica : tensor.fragments) {
      if (replica.role != layout::Role::kReplica) continue;
      const auto owner = std::find_if(
          tensor.fragments.begin(), tensor.fragments.end(), [&](const Fragment& other) {
            return other.role == layout::Role::kOwner &&
                   (other.cut == replica.cut || *other.cut == *replica.cut);
          });
      const Copies copies{&tensor, &*owner, &replica, blocks_};
      copies_.push_back(copies);
      blocks_ += CeilDiv(replica.cut->shard_elems(), copies.block_elems());
    }
  }

  Block BlockAt(std::uint64_t index) const {
    const auto after = std::upper_bound(
        copies_.begin(), copies_.end(), index,
        [](std::uint64_t i, const Copies& copies) { return i < copies.first_block; });
    const Copies& copies = *std::prev(after);
    const std::uint64_t first = (index - copies.first_block) * copies.block_elems();
    const std::uint64_t all = copies.replica->cut->shard_elems();
    return {&copies, first, std::min(all, first + copies.block_elems())};
  }

  Status Fetch(std::uint64_t first, std::uint64_t last) {
    if (!source_.sends()) return {};
    std::vector<ByteRange> wanted;
    for (std::uint64_t index = first; index < last; ++index) {
      const Block block = BlockAt(index);
      AddByteRanges(map_, *block.copies->owner, block, &wanted);
      AddByteRanges(map_, *block.copies->replica, block, &wanted);
    }
    return source_.Round(wanted);
  }

  Status CompareBlocks(std::uint64_t first, std::uint64_t last) {
    return ForEach(arena_, last - first, [&](std::uint64_t i) -> Status {
      if (sink_.stop_requested()) return Fail(Errc::kStopped, "stopped on request");
      return Compare(BlockAt(first + i), &buffers_.local());
    });
  }

  Status Read(const Block& block, const Fragment& fragment, Buffers* buffers,
              std::vector<std::byte>* out) {
    buffers->stretches.clear();
    AddByteRanges(map_, fragment, block, &buffers->stretches);
    out->resize((block.last - block.first) * block.copies->item());
    std::uint64_t at = 0;
    for (const ByteRange& stretch : buffers->stretches) {
      SW_TRY(
          source_.Read(stretch.member, stretch.offset, std::span(*out).subspan(at, stretch.bytes)));
      at += stretch.bytes;
    }
    return {};
  }

  Status Compare(const Block& block, Buffers* buffers) {
    const Copies& copies = *block.copies;
    SW_TRY(Read(block, *copies.owner, buffers, &buffers->owner));
    SW_TRY(Read(block, *copies.replica, buffers, &buffers->replica));
    const std::uint64_t item = copies.item();
    Status status;
    // Compare run by run, which skips padding: its bytes are undefined.
    copies.owner->cut->ForShardRange(block.first, block.last, [&](const layout::Run& run) {
      const std::uint64_t at = (run.shard - block.first) * item;
      const auto a = std::span(buffers->owner).subspan(at, run.elems * item);
      const auto b = std::span(buffers->replica).subspan(at, run.elems * item);
      const auto differ = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
      if (!status || differ == static_cast<std::ptrdiff_t>(a.size())) return;
      const std::uint64_t elems = static_cast<std::uint64_t>(differ) / item;
      status = Differ(copies, run.shard + elems, run.logical + elems);
    });
    return status;
  }

  Status Differ(const Copies& copies, std::uint64_t shard_element, std::uint64_t element) const {
    return Fail(Errc::kBadInput, "tensor \"" + copies.tensor->name + "\" " + copies.tensor->state +
                                     ": replicas differ at element " + std::to_string(element) +
                                     ": " + FileOf(*copies.owner, shard_element) + " and " +
                                     FileOf(*copies.replica, shard_element));
  }

  const std::string& FileOf(const Fragment& fragment, std::uint64_t element) const {
    const std::string* file = nullptr;
    layout::ForHolders(map_, fragment.at, element, element + 1,
                       [&](const layout::Region& region, std::uint64_t, std::uint64_t) {
                         file = &map_.files[map_.members[region.member].file];
                       });
    return *file;
  }

  comm::Comm& comm_;
  Exchange& source_;
  const ShardMap& map_;
  tbb::task_arena arena_;
  Sink& sink_;
  tbb::enumerable_thread_specific<Buffers> buffers_;
  std::vector<Copies> copies_;  // by first block
  std::uint64_t blocks_ = 0;
};

}  // namespace

Status CompareReplicas(comm::Comm& comm, Exchange& source, unsigned threads,
                       std::uint64_t memory_bytes, Sink& sink) {
  return Comparing(comm, source, threads, sink).Run(memory_bytes);
}

}  // namespace shardwright::exec
