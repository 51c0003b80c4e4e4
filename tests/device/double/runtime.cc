// SPDX-License-Identifier: Apache-2.0
// Devices, streams, events and copies of the CUDA runtime.

#include <algorithm>
#include <cstring>
#include <vector>

#include "device/double/world.h"

using namespace shardwright::cuda_double;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  *count = world.options.devices;
  return world.options.devices == 0 ? End(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  if (device < 0 || device >= world.options.devices) return End(cudaErrorInvalidDevice);
  Mine().device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  *properties = {};
  std::strcpy(properties->name, "double");
  std::memcpy(properties->uuid.bytes, "double 000000000", 16);
  properties->uuid.bytes[15] = static_cast<char>('0' + device);
  properties->totalGlobalMem = world.options.device_bytes;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  const std::lock_guard lock(TheWorld().mutex);
  Process& process = Mine();
  const cudaError_t last = process.broken != cudaSuccess ? process.broken : process.last;
  process.last = cudaSuccess;
  return last;
}

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorECCUncorrectable:
      return "cudaErrorECCUncorrectable";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    default:
      return "cudaError of a double";
  }
}

const char* cudaGetErrorString(cudaError_t) { return "as a double tells it"; }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  if (flags != cudaStreamNonBlocking) Violate("a stream behind the default stream");
  auto made = std::make_shared<Stream>();
  made->process = ThisProcess();
  made->device = Mine().device;
  world.streams[made.get()] = made;
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  const cudaError_t code = Begin(__func__);
  const auto found = FindStream(stream);
  if (found == nullptr) return End(cudaErrorInvalidResourceHandle);
  found->destroyed = true;
  if (!found->queue.empty()) world.orphans.push_back(found);  // queued work still runs
  world.streams.erase(stream);
  return End(code);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__, true, stream)) return End(code);
  const auto found = FindStream(stream);
  if (found == nullptr) return End(cudaErrorInvalidResourceHandle);
  if (found->queue.empty()) return cudaSuccess;
  if (++found->asked <= kPatience || !Drive(found, found->queued())) return End(cudaErrorNotReady);
  return End(Mine().broken);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  auto made = std::make_unique<Event>();
  made->process = ThisProcess();
  *event = reinterpret_cast<cudaEvent_t>(made.get());
  world.events[made.get()] = std::move(made);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  const cudaError_t code = Begin(__func__);
  if (world.events.erase(event) == 0) Violate("an event that is not there");
  return End(code);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  const auto on = FindStream(stream);
  const auto found = world.events.find(event);
  if (on == nullptr || found == world.events.end()) return End(cudaErrorInvalidResourceHandle);
  Push(*on, {});
  found->second->stream = on;
  found->second->count = on->queued();
  found->second->asked = 0;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__, true, event)) return End(code);
  const auto found = world.events.find(event);
  if (found == world.events.end()) return End(cudaErrorInvalidResourceHandle);
  Event& its = *found->second;
  if (its.stream == nullptr || its.stream->ended >= its.count) return cudaSuccess;
  if (++its.asked <= kPatience || !Drive(its.stream, its.count)) return End(cudaErrorNotReady);
  return End(Mine().broken);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  const auto on = FindStream(stream);
  if (on == nullptr) return End(cudaErrorInvalidResourceHandle);
  const int process = ThisProcess();
  const auto known = [&](const void* at) { return Find(process, at, 1) != nullptr; };
  const bool to_known = known(to);
  const bool from_known = known(from);
  if ((to_known && Find(process, to, bytes) == nullptr) ||
      (from_known && Find(process, from, bytes) == nullptr)) {
    return End(cudaErrorInvalidValue);
  }
  Work work;
  if (to_known) work.touches.push_back({to, bytes});
  if (from_known) work.touches.push_back({from, bytes});
  if (to_known && from_known) {
    work.run = [=] {
      std::byte* const target = Reach(process, to, bytes);
      const std::byte* const source = Reach(process, from, bytes);
      if (target == nullptr || source == nullptr) return false;
      std::memmove(target, source, bytes);
      return true;
    };
    Push(*on, std::move(work));
    return cudaSuccess;
  }
  // One end of the copy is ordinary memory. The real runtime waits here for queued work.
  if (!on->queue.empty()) Violate("a copy of ordinary memory waits for work without a bound");
  if (!Drive(on, on->queued())) return End(cudaErrorNotReady);
  if (to_known) {
    const auto* const first = static_cast<const std::byte*>(from);
    work.run = [=, staged = std::vector<std::byte>(first, first + bytes)] {
      std::byte* const target = Reach(process, to, bytes);
      if (target == nullptr) return false;
      std::memcpy(target, staged.data(), bytes);
      return true;
    };
    Push(*on, std::move(work));
    return cudaSuccess;
  }
  std::memmove(to, from_known ? Reach(process, from, bytes) : from, bytes);
  return End(Mine().broken);
}

}  // extern "C"
