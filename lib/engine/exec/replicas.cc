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

/// A replica, the owner whose elements it repeats, and its place among the blocks of all of them.
struct Twins {
  const LogicalTensor* tensor;
  const Fragment* owner;
  const Fragment* replica;
  std::uint64_t first_block;

  std::uint64_t item() const { return ItemSize(tensor->dtype); }
  std::uint64_t block_elems() const { return plan::kUnitBytes / item(); }
};

/// Shard elements [first, last) of a replica and its owner.
struct Block {
  const Twins* twins;
  std::uint64_t first;
  std::uint64_t last;
};

/// Where a fragment's elements [first, last) lie.
void AddStretches(const ShardMap& map, const Fragment& fragment, const Block& block,
                  std::vector<Stretch>* stretches) {
  const std::uint64_t item = block.twins->item();
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
    for (const LogicalTensor& tensor : map_.tensors) AddTwins(tensor);
  }

  Status Go(std::uint64_t memory_bytes) {
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
  /// A thread's memory.
  struct Buffers {
    std::vector<Stretch> stretches;
    std::vector<std::byte> owner;
    std::vector<std::byte> replica;
  };

  void AddTwins(const LogicalTensor& tensor) {
    for (const Fragment& replica : tensor.fragments) {
      if (replica.role != layout::Role::kReplica) continue;
      const auto owner = std::find_if(
          tensor.fragments.begin(), tensor.fragments.end(), [&](const Fragment& other) {
            return other.role == layout::Role::kOwner &&
                   (other.cut == replica.cut || *other.cut == *replica.cut);
          });
      const Twins twins{&tensor, &*owner, &replica, blocks_};
      twins_.push_back(twins);
      blocks_ += CeilDiv(replica.cut->shard_elems(), twins.block_elems());
    }
  }

  Block BlockAt(std::uint64_t index) const {
    const auto after =
        std::upper_bound(twins_.begin(), twins_.end(), index,
                         [](std::uint64_t i, const Twins& twins) { return i < twins.first_block; });
    const Twins& twins = *std::prev(after);
    const std::uint64_t first = (index - twins.first_block) * twins.block_elems();
    const std::uint64_t all = twins.replica->cut->shard_elems();
    return {&twins, first, std::min(all, first + twins.block_elems())};
  }

  Status Fetch(std::uint64_t first, std::uint64_t last) {
    if (!source_.sends()) return {};
    std::vector<Stretch> wanted;
    for (std::uint64_t index = first; index < last; ++index) {
      const Block block = BlockAt(index);
      AddStretches(map_, *block.twins->owner, block, &wanted);
      AddStretches(map_, *block.twins->replica, block, &wanted);
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
    AddStretches(map_, fragment, block, &buffers->stretches);
    out->resize((block.last - block.first) * block.twins->item());
    std::uint64_t at = 0;
    for (const Stretch& stretch : buffers->stretches) {
      SW_TRY(
          source_.Read(stretch.member, stretch.offset, std::span(*out).subspan(at, stretch.bytes)));
      at += stretch.bytes;
    }
    return {};
  }

  Status Compare(const Block& block, Buffers* buffers) {
    const Twins& twins = *block.twins;
    SW_TRY(Read(block, *twins.owner, buffers, &buffers->owner));
    SW_TRY(Read(block, *twins.replica, buffers, &buffers->replica));
    const std::uint64_t item = twins.item();
    Status status;
    // Run by run, so that padding, which belongs to nobody, is never compared.
    twins.owner->cut->ForShardRange(block.first, block.last, [&](const layout::Run& run) {
      const std::uint64_t at = (run.shard - block.first) * item;
      const auto a = std::span(buffers->owner).subspan(at, run.elems * item);
      const auto b = std::span(buffers->replica).subspan(at, run.elems * item);
      const auto differ = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
      if (!status || differ == static_cast<std::ptrdiff_t>(a.size())) return;
      const std::uint64_t elems = static_cast<std::uint64_t>(differ) / item;
      status = Differ(twins, run.shard + elems, run.logical + elems);
    });
    return status;
  }

  Status Differ(const Twins& twins, std::uint64_t shard_element, std::uint64_t element) const {
    return Fail(Errc::kBadInput, "tensor \"" + twins.tensor->name + "\" " + twins.tensor->state +
                                     ": replicas differ at element " + std::to_string(element) +
                                     ": " + FileOf(*twins.owner, shard_element) + " and " +
                                     FileOf(*twins.replica, shard_element));
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
  std::vector<Twins> twins_;  // by first block
  std::uint64_t blocks_ = 0;
};

}  // namespace

Status CompareReplicas(comm::Comm& comm, Exchange& source, unsigned threads,
                       std::uint64_t memory_bytes, Sink& sink) {
  return Comparing(comm, source, threads, sink).Go(memory_bytes);
}

}  // namespace shardwright::exec
