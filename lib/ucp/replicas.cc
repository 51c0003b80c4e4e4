#include "ucp/replicas.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "exec/first_error.h"
#include "plan/plan.h"

namespace shardwright::ucp {
namespace {

using layout::Fragment;
using layout::LogicalTensor;
using layout::ShardMap;

/// Reads shard elements [first, last) of a fragment.
Status ReadShard(const ShardMap& map, const LogicalTensor& tensor, const Fragment& fragment,
                 std::uint64_t first, std::uint64_t last, exec::ByteSource& bytes,
                 std::vector<std::byte>* out) {
  const std::uint64_t item = ItemSize(tensor.dtype);
  out->resize((last - first) * item);
  std::uint64_t at = 0;
  Status status;
  layout::ForHolders(map, fragment.at, first, last,
                     [&](const layout::Region& region, std::uint64_t element, std::uint64_t elems) {
                       if (!status) return;
                       status = bytes.Read(region.member, region.offset + element * item,
                                           std::span(*out).subspan(at, elems * item));
                       at += elems * item;
                     });
  return status;
}

const std::string& FileOf(const ShardMap& map, const Fragment& fragment, std::uint64_t element) {
  const std::string* file = nullptr;
  layout::ForHolders(map, fragment.at, element, element + 1,
                     [&](const layout::Region& region, std::uint64_t, std::uint64_t) {
                       file = &map.files[map.members[region.member].file];
                     });
  return *file;
}

Status CompareOne(const ShardMap& map, const LogicalTensor& tensor, const Fragment& owner,
                  const Fragment& replica, exec::ByteSource& bytes) {
  const std::uint64_t item = ItemSize(tensor.dtype);
  const std::uint64_t block = plan::kUnitBytes / item;
  std::vector<std::byte> a;
  std::vector<std::byte> b;
  Status status;
  // Run by run, so that padding, which belongs to nobody, is never compared.
  owner.cut->ForShardRange(0, owner.cut->shard_elems(), [&](const layout::Run& run) {
    for (std::uint64_t done = 0; status && done < run.elems; done += block) {
      const std::uint64_t first = run.shard + done;
      const std::uint64_t last = std::min(run.shard + run.elems, first + block);
      status = ReadShard(map, tensor, owner, first, last, bytes, &a);
      if (status) status = ReadShard(map, tensor, replica, first, last, bytes, &b);
      if (!status || a == b) continue;
      const auto differ = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
      const std::uint64_t element = run.logical + done + static_cast<std::uint64_t>(differ) / item;
      status = Fail(Errc::kBadInput, "tensor \"" + tensor.name + "\" " + tensor.state +
                                         ": replicas differ at element " + std::to_string(element) +
                                         ": " + FileOf(map, owner, first) + " and " +
                                         FileOf(map, replica, first));
    }
  });
  return status;
}

}  // namespace

Status CompareReplicas(comm::Comm& comm, const ShardMap& map, exec::ByteSource& bytes,
                       unsigned threads, Sink& sink) {
  exec::FirstError error;
  const auto ranks = static_cast<std::size_t>(comm.size());
  tbb::task_arena arena(static_cast<int>(threads));
  arena.execute([&] {
    tbb::parallel_for(std::size_t{0}, map.tensors.size(), [&](std::size_t t) {
      if (t % ranks != static_cast<std::size_t>(comm.rank()) || error.failed()) return;
      if (sink.stop_requested()) return error.Set(t, {Errc::kStopped, "stopped on request", 0, -1});
      const LogicalTensor& tensor = map.tensors[t];
      for (const Fragment& replica : tensor.fragments) {
        if (replica.role != layout::Role::kReplica) continue;
        const auto owner = std::find_if(
            tensor.fragments.begin(), tensor.fragments.end(), [&](const Fragment& other) {
              return other.role == layout::Role::kOwner &&
                     (other.cut == replica.cut || *other.cut == *replica.cut);
            });
        if (Status status = CompareOne(map, tensor, *owner, replica, bytes); !status) {
          return error.Set(t, std::move(status).error());
        }
      }
    });
  });
  return comm.Agree(error.Take());
}

}  // namespace shardwright::ucp
