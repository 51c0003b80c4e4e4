// SPDX-License-Identifier: Apache-2.0
// The calls of NCCL between the threads of one process.

#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/double/nccl_state.h"
#include "device/double/world.h"

namespace shardwright::cuda_double {

std::map<std::string, Clique>& Cliques() {
  static auto* const kCliques = new std::map<std::string, Clique>;
  return *kCliques;
}

std::set<ncclComm*>& Comms() {
  static auto* const kComms = new std::set<ncclComm*>;
  return *kComms;
}

namespace {

// All communicators ever created, also destroyed ones.
std::vector<std::unique_ptr<ncclComm>>& Owned() {
  static auto* const kOwned = new std::vector<std::unique_ptr<ncclComm>>;
  return *kOwned;
}

struct Group {
  int depth = 0;
  ncclResult_t code = ncclSuccess;
  std::vector<std::shared_ptr<Batch>> batches;  // one for each communicator and stream
};
thread_local Group group;

void Flush(ncclComm* comm) {
  for (const auto& batch : comm->waiting) {
    Work work;
    work.batch = batch;
    for (const Part& part : batch->parts) {
      work.touches.push_back({part.from, part.bytes});
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

ncclResult_t Give(const char* function, ncclComm* comm, cudaStream_t stream, ncclDataType_t type,
                  Part part) {
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
  if (type != ncclInt8) Violate(std::string(function) + ": the double moves bytes only");
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
  return Give(__func__, comm, stream, type, {What::kAllGather, from, to, count, 0});
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return Give(__func__, comm, stream, type, {What::kBroadcast, from, to, count, root});
}

}  // extern "C"
