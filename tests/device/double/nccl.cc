// SPDX-License-Identifier: Apache-2.0
// NCCL between the threads of one process. Each call is a part. The parts of one group, or one
// call, form a batch, which is one piece of work of a stream. A part moves its bytes when the parts
// of the other ranks reach the front of their streams.

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/double/world.h"
#include "engine/tensor/float_codes.h"

// The real one is opaque.
struct ncclComm {
  std::string clique;
  int rank = 0;
  int size = 0;
  int process = 0;
  int device = 0;
  unsigned polls = 0;  // answers that are still "in progress"
  bool finalizing = false;
  ncclResult_t error = ncclSuccess;
  std::uint64_t given = 0;                                                // batches
  std::vector<std::shared_ptr<shardwright::cuda_double::Batch>> waiting;  // not on a stream yet
  std::vector<std::shared_ptr<shardwright::cuda_double::Batch>> batches;  // all of them
};

namespace shardwright::cuda_double {

enum class What { kAllGather, kBroadcast, kReduceScatter, kSend, kRecv };

struct Part {
  What what = What::kSend;
  const void* from = nullptr;
  void* to = nullptr;
  std::uint64_t count = 0;
  ncclDataType_t type = ncclInt8;
  int other = 0;  // root or peer
  bool done = false;
};

namespace {

struct Clique {
  int size = 0;
  std::vector<ncclComm*> members;  // by rank, nullptr for a rank that has not joined
  int finalizing = 0;
  bool formed = false;  // all members have joined at least once
  bool broken = false;  // a member left before it finished
};

std::map<std::string, Clique>& Cliques() {
  static auto* const kCliques = new std::map<std::string, Clique>;
  return *kCliques;
}

// All communicators ever created, also destroyed ones.
std::vector<std::unique_ptr<ncclComm>>& Owned() {
  static auto* const kOwned = new std::vector<std::unique_ptr<ncclComm>>;
  return *kOwned;
}

std::set<ncclComm*>& Comms() {
  static auto* const kComms = new std::set<ncclComm*>;
  return *kComms;
}

}  // namespace

struct Batch {
  ncclComm* comm = nullptr;
  int process = 0;
  std::shared_ptr<Stream> stream;
  std::optional<std::uint64_t> place;  // in its stream, once it is there
  std::vector<Part> parts;
  bool aborted = false;
};

namespace {

struct Group {
  int depth = 0;
  ncclResult_t code = ncclSuccess;
  std::vector<std::shared_ptr<Batch>> batches;  // one for each communicator and stream
};
thread_local Group group;

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

// Returns the number of bytes that a part reads on a communicator of `size` ranks.
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

void BreakClique(const std::string& name, const ncclComm* but) {
  Clique& clique = Cliques()[name];
  clique.broken = true;
  for (ncclComm* const member : clique.members) {
    if (member != nullptr && member != but && TheWorld().options.told) {
      if (member->error == ncclSuccess) member->error = ncclRemoteError;
    }
  }
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

void Flush(ncclComm* comm) {
  for (const auto& batch : comm->waiting) {
    Work work;
    work.batch = batch;
    for (const Part& part : batch->parts) {
      work.touches.push_back({part.from, ReadBytes(part, comm->size)});
      work.touches.push_back({part.to, WrittenBytes(part, comm->size)});
    }
    batch->place = batch->stream->queued();
    Push(*batch->stream, std::move(work));
  }
  comm->waiting.clear();
}

ncclResult_t BeginNccl(const char* function, const void* question = nullptr) {
  if (!Fails(function, question)) {
    return Mine().broken == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
  }
  return Mine().fail_nccl;
}

// Records a failed call. It leaves the communicator unusable.
ncclResult_t Failed(ncclComm* comm, ncclResult_t code) {
  comm->error = code;
  BreakClique(comm->clique, comm);
  return code;
}

ncclResult_t Give(const char* function, ncclComm* comm, cudaStream_t stream, Part part) {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(function);
  if (Comms().count(comm) == 0) {
    Violate(std::string(function) + ": a communicator that is not there");
    return ncclInvalidArgument;
  }
  if (begun != ncclSuccess) return Failed(comm, begun);
  if (comm->error != ncclSuccess) return comm->error;
  if (!Cliques()[comm->clique].formed || comm->polls > 0) {
    Violate(std::string(function) + ": the communicator is not ready");
    return ncclInvalidArgument;
  }
  const auto on = FindStream(stream);
  if (on == nullptr) return ncclInvalidArgument;
  if (Mine().device != comm->device) Violate(std::string(function) + ": on another device");
  const bool alone = group.depth == 0;
  std::shared_ptr<Batch> batch;
  for (const auto& each : group.batches) {
    if (each->comm == comm && each->stream == on) batch = each;
  }
  if (batch == nullptr) {
    batch = std::make_shared<Batch>();
    batch->comm = comm;
    batch->process = comm->process;
    batch->stream = on;
    group.batches.push_back(batch);
  }
  batch->parts.push_back(part);
  if (!alone) return ncclSuccess;
  group.batches.clear();
  comm->batches.push_back(batch);
  comm->waiting.push_back(batch);
  // Every other call stays "in progress" for a while.
  if (++comm->given % 2 == 0) {
    Flush(comm);
    return ncclSuccess;
  }
  comm->polls = kPatience;
  return ncclInProgress;
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

void ResetNccl() {
  Cliques().clear();
  Comms().clear();
  Owned().clear();
}

std::uint64_t LiveCommunicators() { return Comms().size(); }

void BreakNccl(int process) {
  for (ncclComm* const comm : Comms()) {
    if (comm->process == process) Failed(comm, ncclUnhandledCudaError);
  }
}

namespace {

// Removes a communicator from the global state.
void Remove(ncclComm* comm) {
  Comms().erase(comm);
  for (ncclComm*& member : Cliques()[comm->clique].members) {
    if (member == comm) member = nullptr;
  }
}

}  // namespace

}  // namespace shardwright::cuda_double

using namespace shardwright::cuda_double;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const ncclResult_t code = BeginNccl(__func__)) return code;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t code) {
  return code == ncclRemoteError ? "a rank is gone" : "as a double tells it";
}

const char* ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const ncclResult_t code = BeginNccl(__func__)) return code;
  std::memset(id, 0, sizeof *id);
  std::strcpy(id->internal, ("clique " + std::to_string(++TheWorld().ids)).c_str());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(__func__);
  Clique& clique = Cliques()[id.internal];
  clique.size = size;
  clique.members.resize(static_cast<std::size_t>(size));
  if (begun != ncclSuccess) {
    BreakClique(id.internal, nullptr);
    return begun;
  }
  if (config == nullptr || config->blocking != 0) Violate("a communicator with unbounded waits");
  for (const ncclComm* const member : clique.members) {
    if (member != nullptr && member->device == Mine().device) return ncclInvalidUsage;
  }
  if (clique.members[static_cast<std::size_t>(rank)] != nullptr) return ncclInvalidArgument;
  ncclComm* const made = Owned().emplace_back(std::make_unique<ncclComm>()).get();
  made->clique = id.internal;
  made->rank = rank;
  made->size = size;
  made->process = ThisProcess();
  made->device = Mine().device;
  made->polls = kPatience;
  if (clique.broken && TheWorld().options.told) made->error = ncclRemoteError;
  clique.members[static_cast<std::size_t>(rank)] = made;
  Comms().insert(made);
  clique.formed = std::count(clique.members.begin(), clique.members.end(), nullptr) == 0;
  *comm = made;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(__func__, comm);
  if (Comms().count(comm) == 0) {
    Violate("a communicator that is not there was asked");
    return ncclInvalidArgument;
  }
  if (begun != ncclSuccess) return Failed(comm, begun);
  *state = comm->error;
  if (comm->error != ncclSuccess) return ncclSuccess;
  *state = ncclInProgress;
  Clique& clique = Cliques()[comm->clique];
  if (comm->finalizing) {
    Flush(comm);
    bool all = clique.finalizing == clique.size && !TheWorld().options.hang_nccl;
    for (const auto& batch : comm->batches) {
      if (all && !Drive(batch->stream, *batch->place + 1)) all = false;
    }
    if (all) *state = ncclSuccess;
    return ncclSuccess;
  }
  if (!clique.formed) return ncclSuccess;
  if (comm->polls > 0 && --comm->polls > 0) return ncclSuccess;
  Flush(comm);
  *state = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(__func__);
  if (Comms().count(comm) == 0) return ncclInvalidArgument;
  if (begun != ncclSuccess) return Failed(comm, begun);
  comm->finalizing = true;
  ++Cliques()[comm->clique].finalizing;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(__func__);
  if (Comms().count(comm) == 0) {
    Violate("a communicator that is not there was destroyed");
    return ncclInvalidArgument;
  }
  if (!comm->finalizing) Violate("a communicator was destroyed before it was finalized");
  Comms().erase(comm);  // stays a member: the others may still poll
  return begun;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(__func__);
  if (Comms().count(comm) == 0) {
    Violate("a communicator that is not there was aborted");
    return ncclInvalidArgument;
  }
  for (const auto& batch : comm->batches) batch->aborted = true;
  comm->waiting.clear();
  BreakClique(comm->clique, comm);
  Remove(comm);
  return begun;
}

ncclResult_t ncclGroupStart() {
  const std::lock_guard lock(TheWorld().mutex);
  if (const ncclResult_t code = BeginNccl(__func__)) return code;
  if (group.depth++ == 0) {
    group.code = ncclSuccess;
    group.batches.clear();
  }
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  const std::lock_guard lock(TheWorld().mutex);
  const ncclResult_t begun = BeginNccl(__func__);
  if (group.depth == 0) {
    Violate("the end of a group that was not begun");
    return ncclInvalidUsage;
  }
  if (--group.depth > 0) return begun;
  const auto batches = std::move(group.batches);
  group.batches.clear();
  ncclResult_t code = begun;
  for (const auto& batch : batches) {
    if (begun != ncclSuccess) {
      Failed(batch->comm, begun);
      continue;
    }
    batch->comm->batches.push_back(batch);
    batch->comm->waiting.push_back(batch);
    batch->comm->polls = kPatience;
    code = ncclInProgress;
  }
  return code;
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Give(__func__, comm, stream, {What::kAllGather, from, to, count, type, 0});
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return Give(__func__, comm, stream, {What::kBroadcast, from, to, count, type, root});
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  if (op != ncclSum) return ncclInvalidArgument;
  return Give(__func__, comm, stream, {What::kReduceScatter, from, to, count, type, 0});
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return Give(__func__, comm, stream, {What::kSend, from, nullptr, count, type, peer});
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Give(__func__, comm, stream, {What::kRecv, nullptr, to, count, type, peer});
}

}  // extern "C"
