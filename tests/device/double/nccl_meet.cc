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
#include "engine/tensor/float_codes.h"

namespace shardwright::cuda_double {

namespace {

std::uint64_t Bytes(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclFloat32:
      return 4;
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

}  // namespace

std::uint64_t ReadBytes(const Part& part, int size) {
  if (part.from == nullptr) return 0;
  const auto ranks = static_cast<std::uint64_t>(part.what == What::kReduceScatter ? size : 1);
  return part.count * Bytes(part.type) * ranks;
}
std::uint64_t WrittenBytes(const Part& part, int size) {
  if (part.to == nullptr) return 0;
  const auto ranks = static_cast<std::uint64_t>(part.what == What::kAllGather ? size : 1);
  return part.count * Bytes(part.type) * ranks;
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

bool IsPair(What what) { return what == What::kSend || what == What::kRecv; }

// The `index`-th part of a rank that is a collective, or of the kind `what` with a peer.
struct Found {
  std::shared_ptr<Batch> batch;
  Part* part = nullptr;
};
Found Nth(ncclComm* comm, What what, int peer, std::uint64_t index) {
  if (comm == nullptr) return {};
  for (const auto& batch : comm->batches) {
    for (Part& part : batch->parts) {
      const bool same = IsPair(what) ? part.what == what && part.other == peer : !IsPair(part.what);
      if (same && index-- == 0) return {batch, &part};
    }
  }
  return {};
}

std::uint64_t IndexOf(ncclComm* comm, const Part& wanted) {
  std::uint64_t index = 0;
  for (const auto& batch : comm->batches) {
    for (const Part& part : batch->parts) {
      if (&part == &wanted) return index;
      const bool same = IsPair(wanted.what) ? part.what == wanted.what && part.other == wanted.other
                                            : !IsPair(part.what);
      if (same) ++index;
    }
  }
  return index;
}

bool Arrived(const Batch& batch) {
  return !batch.aborted && batch.place && Drive(batch.stream, *batch.place);
}

float Decode16(std::uint16_t bits, bool bf16) {
  return bf16 ? codes::FromBf16(bits) : codes::FromF16(bits);
}

std::uint16_t Encode16(float value, bool bf16) {
  return bf16 ? codes::ToBf16(value) : codes::ToF16(value);
}

template <class T>
void AddAs(std::vector<double>& sum, const std::byte* from) {
  for (std::size_t i = 0; i < sum.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    sum[i] += static_cast<double>(value);
  }
}

void SumParts(ncclDataType_t type, std::uint64_t count, const std::vector<const std::byte*>& from,
              std::byte* to) {
  std::vector<double> sum(count);
  for (const std::byte* const each : from) {
    if (type == ncclFloat64) AddAs<double>(sum, each);
    if (type == ncclFloat32) AddAs<float>(sum, each);
    for (std::uint64_t i = 0; Bytes(type) == 2 && i < count; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, each + i * 2, 2);
      sum[i] += static_cast<double>(Decode16(bits, type == ncclBfloat16));
    }
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    if (type == ncclFloat64) std::memcpy(to + i * 8, &sum[i], 8);
    if (type == ncclFloat32) {
      const auto value = static_cast<float>(sum[i]);
      std::memcpy(to + i * 4, &value, 4);
    }
    if (Bytes(type) == 2) {
      const std::uint16_t bits = Encode16(static_cast<float>(sum[i]), type == ncclBfloat16);
      std::memcpy(to + i * 2, &bits, 2);
    }
  }
}

// Moves the bytes of a collective of all ranks. `all` by rank. Reads all sources before it writes
// targets, as the two may be one. \returns false if a rank may not access its buffer
bool MoveAll(const std::vector<Found>& all) {
  const Part& first = *all[0].part;
  const std::uint64_t item = Bytes(first.type);
  const std::uint64_t bytes = first.count * item;
  std::vector<std::vector<std::byte>> sources;
  for (const Found& each : all) {
    const bool reads = first.what != What::kBroadcast || each.batch->comm->rank == first.other;
    const std::uint64_t read = ReadBytes(*each.part, static_cast<int>(all.size()));
    const std::byte* const from =
        reads ? Reach(each.batch->process, each.part->from, read) : nullptr;
    if (reads && from == nullptr) return false;
    sources.emplace_back(reads ? read : 0);
    if (reads) std::memcpy(sources.back().data(), from, read);
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::uint64_t written = WrittenBytes(*all[r].part, static_cast<int>(all.size()));
    std::byte* const to = Reach(all[r].batch->process, all[r].part->to, written);
    if (to == nullptr) return false;
    if (first.what == What::kAllGather) {
      for (std::size_t s = 0; s < all.size(); ++s) {
        std::memcpy(to + s * bytes, sources[s].data(), bytes);
      }
    } else if (first.what == What::kBroadcast) {
      std::memcpy(to, sources[static_cast<std::size_t>(first.other)].data(), bytes);
    } else {
      std::vector<const std::byte*> mine(sources.size());
      for (std::size_t s = 0; s < mine.size(); ++s) mine[s] = sources[s].data() + r * bytes;
      SumParts(first.type, first.count, mine, to);
    }
  }
  return true;
}

bool MeetCollective(ncclComm* comm, Part& part) {
  const Clique& clique = Cliques()[comm->clique];
  const std::uint64_t index = IndexOf(comm, part);
  std::vector<Found> all;
  for (ncclComm* const member : clique.members) {
    const Found found = Nth(member, part.what, 0, index);
    if (found.part == nullptr || (found.part != &part && !Arrived(*found.batch))) return false;
    if (found.part->what != part.what || found.part->count != part.count ||
        found.part->type != part.type || found.part->other != part.other) {
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

bool MeetPeer(ncclComm* comm, Part& part) {
  const Clique& clique = Cliques()[comm->clique];
  const What counter = part.what == What::kSend ? What::kRecv : What::kSend;
  const Found peer = Nth(clique.members[static_cast<std::size_t>(part.other)], counter, comm->rank,
                         IndexOf(comm, part));
  if (peer.part == nullptr || !Arrived(*peer.batch)) return false;
  const Part& sent = part.what == What::kSend ? part : *peer.part;
  const Part& got = part.what == What::kSend ? *peer.part : part;
  if (sent.count != got.count) {
    Violate("a rank sends " + std::to_string(sent.count) + ", the other expects " +
            std::to_string(got.count));
    BreakClique(comm->clique, nullptr);
    return false;
  }
  const int peers = peer.batch->process;
  const int from_process = part.what == What::kSend ? comm->process : peers;
  const int to_process = part.what == What::kSend ? peers : comm->process;
  const std::byte* const from = Reach(from_process, sent.from, sent.count);
  std::byte* const to = Reach(to_process, got.to, got.count);
  if (from == nullptr || to == nullptr) {
    Violate("a message with memory that is not the device's");
    return false;
  }
  std::memmove(to, from, sent.count);
  part.done = peer.part->done = true;
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
    if (part.done) continue;
    if (!(IsPair(part.what) ? MeetPeer(batch.comm, part) : MeetCollective(batch.comm, part))) {
      all = false;
    }
  }
  return all;
}

}  // namespace shardwright::cuda_double
