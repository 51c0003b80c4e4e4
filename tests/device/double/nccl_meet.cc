// SPDX-License-Identifier: Apache-2.0
// Moves the bytes of NCCL's calls once all their ranks have reached them.

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "device/double/nccl_state.h"
#include "device/double/world.h"

namespace shardwright::cuda_double {

std::uint64_t WrittenBytes(const Part& part, int size) {
  return part.bytes * static_cast<std::uint64_t>(part.what == What::kAllGather ? size : 1);
}

void BreakClique(const std::string& name, const ncclComm* but) {
  Clique& clique = Cliques()[name];
  clique.broken = true;
  for (ncclComm* const member : clique.members) {
    if (member != nullptr && member != but && TheWorld().options.told) {
      if (member->error == ncclSuccess) member->error = ncclRemoteError;
    }
  }
}

namespace {

// The `index`-th part of a rank.
struct Found {
  std::shared_ptr<Batch> batch;
  Part* part = nullptr;
};
Found Nth(ncclComm* comm, std::uint64_t index) {
  if (comm == nullptr) return {};
  for (const auto& batch : comm->batches) {
    for (Part& part : batch->parts) {
      if (index-- == 0) return {batch, &part};
    }
  }
  return {};
}

std::uint64_t IndexOf(ncclComm* comm, const Part& wanted) {
  std::uint64_t index = 0;
  for (const auto& batch : comm->batches) {
    for (const Part& part : batch->parts) {
      if (&part == &wanted) return index;
      ++index;
    }
  }
  return index;
}

bool Arrived(const Batch& batch) {
  return !batch.aborted && batch.place && Drive(batch.stream, *batch.place);
}

// Moves the bytes of a call of all ranks. `all` by rank. Reads all sources before it writes
// targets, as the two may be one. \returns false if a rank may not access its buffer
bool MoveAll(const std::vector<Found>& all) {
  const Part& first = *all[0].part;
  std::vector<std::vector<std::byte>> sources;
  for (const Found& each : all) {
    const bool reads = first.what != What::kBroadcast || each.batch->comm->rank == first.root;
    const std::byte* const from =
        reads ? Reach(each.batch->process, each.part->from, first.bytes) : nullptr;
    if (reads && from == nullptr) return false;
    sources.emplace_back(reads ? first.bytes : 0);
    if (reads) std::memcpy(sources.back().data(), from, first.bytes);
  }
  for (const Found& each : all) {
    const std::uint64_t written = WrittenBytes(*each.part, static_cast<int>(all.size()));
    std::byte* const to = Reach(each.batch->process, each.part->to, written);
    if (to == nullptr) return false;
    if (first.what == What::kBroadcast) {
      std::memcpy(to, sources[static_cast<std::size_t>(first.root)].data(), first.bytes);
      continue;
    }
    for (std::size_t s = 0; s < all.size(); ++s) {
      std::memcpy(to + s * first.bytes, sources[s].data(), first.bytes);
    }
  }
  return true;
}

bool MeetAll(ncclComm* comm, Part& part) {
  const Clique& clique = Cliques()[comm->clique];
  const std::uint64_t index = IndexOf(comm, part);
  std::vector<Found> all;
  for (ncclComm* const member : clique.members) {
    const Found found = Nth(member, index);
    if (found.part == nullptr || (found.part != &part && !Arrived(*found.batch))) return false;
    if (found.part->what != part.what || found.part->bytes != part.bytes ||
        found.part->root != part.root) {
      Violate("ranks of a communicator make different calls");
      BreakClique(comm->clique, nullptr);
      return false;
    }
    all.push_back(found);
  }
  if (!MoveAll(all)) {
    Violate("a collective with memory that is not the device's");
    return false;
  }
  for (const Found& each : all) each.part->done = true;
  return true;
}

// Fills the target memory of an aborted communicator's work, which has undefined contents.
void Spoil(const Batch& batch) {
  for (const Part& part : batch.parts) {
    const std::uint64_t bytes = WrittenBytes(part, batch.comm->size);
    if (part.done || bytes == 0) continue;
    std::byte* const to = Reach(batch.process, part.to, bytes);
    if (to != nullptr) std::memset(to, 0xAB, bytes);
  }
}

}  // namespace

bool Meet(Batch& batch) {
  if (batch.aborted) {
    Spoil(batch);
    return true;
  }
  if (TheWorld().options.hang_nccl) return false;
  bool all = true;
  for (Part& part : batch.parts) {
    if (!part.done && !MeetAll(batch.comm, part)) all = false;
  }
  return all;
}

}  // namespace shardwright::cuda_double
