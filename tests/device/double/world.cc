// SPDX-License-Identifier: Apache-2.0
#include "device/double/world.h"

#include <algorithm>
#include <cstring>

namespace shardwright::cuda_double {

namespace {

thread_local int this_process = 0;

void RunOne(const std::shared_ptr<Stream>& stream) {
  Process& process = TheWorld().processes[stream->process];
  Work work = std::move(stream->queue.front());
  stream->queue.pop_front();
  ++stream->ended;
  if (!work.run) return;
  ++process.works;
  bool good = work.run();
  if (process.fail_work == process.works) {
    good = false;
    process.failed = "queued work";
  }
  if (!good && process.broken == cudaSuccess) {
    process.broken = cudaErrorIllegalAddress;
    BreakNccl(stream->process);
  }
}

}  // namespace

World& TheWorld() {
  static auto* const kWorld = new World;  // outlives every thread
  return *kWorld;
}

int ThisProcess() { return this_process; }

Process& Mine() { return TheWorld().processes[this_process]; }

void Violate(const std::string& what) {
  TheWorld().violations.push_back("process " + std::to_string(this_process) + ": " + what);
}

bool Fails(const char* function, const void* question) {
  Process& process = Mine();
  if (question == nullptr) {
    process.questions.clear();
    ++process.calls;
  } else if (process.questions.emplace(function, question).second) {
    ++process.calls;
  } else {
    return false;
  }
  if (process.fail_call != process.calls) return false;
  process.failed = function;
  return true;
}

cudaError_t Begin(const char* function, bool breaks, const void* question) {
  Process& process = Mine();
  const bool fails = Fails(function, question);
  if (process.broken != cudaSuccess) return process.broken;
  if (!fails) return cudaSuccess;
  const bool for_good = breaks || process.fail_cuda == cudaErrorECCUncorrectable;
  if (for_good) {
    process.broken = cudaErrorECCUncorrectable;
    BreakNccl(this_process);
  }
  return for_good ? cudaErrorECCUncorrectable : process.fail_cuda;
}

cudaError_t End(cudaError_t code) {
  if (code != cudaSuccess) Mine().last = code;
  return code;
}

Allocation* Find(int process, const void* at, std::uint64_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  auto& memory = TheWorld().memory;
  auto found = memory.upper_bound(address);
  if (found == memory.begin()) return nullptr;
  Allocation& allocation = std::prev(found)->second;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(allocation.address);
  if (allocation.process != process || address - begin > allocation.bytes ||
      bytes > allocation.bytes - (address - begin)) {
    return nullptr;
  }
  return &allocation;
}

std::byte* Reach(int process, const void* at, std::uint64_t bytes) {
  const Allocation* const allocation = Find(process, at, bytes);
  if (allocation == nullptr) return nullptr;
  return allocation->alias + (static_cast<const std::byte*>(at) - allocation->address);
}

void Push(Stream& stream, Work work) {
  stream.asked = 0;
  stream.queue.push_back(std::move(work));
}

bool Drive(const std::shared_ptr<Stream>& stream, std::uint64_t count) {
  World& world = TheWorld();
  if (stream->driving) return stream->ended >= count;  // waits for itself, through others
  stream->driving = true;
  while (stream->ended < count) {
    if (world.processes[stream->process].broken != cudaSuccess) {
      stream->ended += stream->queue.size();  // a broken device does nothing more
      stream->queue.clear();
      break;
    }
    if (world.options.hang_streams) break;
    Work& work = stream->queue.front();
    if (work.batch != nullptr && !Meet(*work.batch)) break;
    RunOne(stream);
  }
  stream->driving = false;
  return stream->ended >= count;
}

std::shared_ptr<Stream> FindStream(cudaStream_t stream) {
  const auto found = TheWorld().streams.find(stream);
  if (found != TheWorld().streams.end()) return found->second;
  Violate("a stream that is not there");
  return nullptr;
}

void Reset(const Options& options) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  world.options = options;
  world.memory.clear();  // its mappings stay, and catch later accesses
  // Work may own its own stream, through others and communicators.
  for (const auto& [handle, stream] : world.streams) stream->queue.clear();
  for (const auto& stream : world.orphans) stream->queue.clear();
  world.streams.clear();
  world.orphans.clear();
  world.events.clear();
  world.processes.clear();
  world.violations.clear();
  ResetNccl();
}

void SetProcess(int process) { this_process = process; }

void FailCall(int process, std::uint64_t call, cudaError_t cuda, ncclResult_t nccl) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  Process& its = world.processes[process];
  its.fail_call = call;
  its.fail_cuda = cuda;
  its.fail_nccl = nccl;
}

void FailWork(int process, std::uint64_t work) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  world.processes[process].fail_work = work;
}

Told About(int process) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  const Process& its = world.processes[process];
  return {its.calls, its.works, its.failed};
}

Live Count() {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  Live live;
  for (const auto& [address, allocation] : world.memory) {
    ++(allocation.mapped ? live.mappings : live.memory);
  }
  live.streams = world.streams.size();
  live.events = world.events.size();
  live.communicators = LiveCommunicators();
  return live;
}

std::vector<std::string> Violations() {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  return world.violations;
}

}  // namespace shardwright::cuda_double
