// SPDX-License-Identifier: Apache-2.0
// Memory of the CUDA runtime, and handles of it for other processes.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "device/double/world.h"

using namespace shardwright::cuda_double;

namespace {

// Contents of a cudaIpcMemHandle_t.
struct Exported {
  std::uint64_t form = 0x53574344424C4531;
  std::int32_t pid = 0;
  std::int32_t process = 0;
  std::int32_t file = 0;
  std::int32_t device = 0;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(Exported) <= sizeof(cudaIpcMemHandle_t));

std::string FileName(std::uint64_t id) { return "cuda-double-" + std::to_string(id); }

std::uint64_t Used(int device) {
  std::uint64_t used = 0;
  for (const auto& [address, allocation] : TheWorld().memory) {
    if (allocation.kind == Memory::kDevice && allocation.device == device && !allocation.mapped) {
      used += allocation.bytes;
    }
  }
  return used;
}

// Maps a file twice: once without access rights, and once for the doubles.
bool Map(Allocation& made) {
  void* const seen = mmap(nullptr, made.bytes, PROT_NONE, MAP_SHARED, made.file, 0);
  void* const alias = mmap(nullptr, made.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made.file, 0);
  if (seen == MAP_FAILED || alias == MAP_FAILED) return false;
  made.address = static_cast<std::byte*>(seen);
  made.alias = static_cast<std::byte*>(alias);
  return true;
}

void* Keep(Allocation made) {
  made.process = ThisProcess();
  TheWorld().memory[reinterpret_cast<std::uintptr_t>(made.address)] = made;
  return made.address;
}

bool Overlaps(const Touch& touch, const Allocation& allocation) {
  const auto* const at = static_cast<const std::byte*>(touch.at);
  return at < allocation.address + allocation.bytes && allocation.address < at + touch.bytes;
}

// Frees memory; its addresses are not used again.
void Drop(void* address, bool mapped, Memory kind, const char* what) {
  World& world = TheWorld();
  const auto found = world.memory.find(reinterpret_cast<std::uintptr_t>(address));
  if (found == world.memory.end() || found->second.process != ThisProcess() ||
      found->second.mapped != mapped || found->second.kind != kind) {
    return Violate(std::string(what) + ": no such memory");
  }
  const Allocation allocation = found->second;
  world.memory.erase(found);
  auto streams = world.orphans;
  for (const auto& [handle, stream] : world.streams) streams.push_back(stream);
  for (const auto& stream : streams) {
    if (stream->process != allocation.process ||
        world.processes[stream->process].broken != cudaSuccess) {
      continue;
    }
    for (const Work& work : stream->queue) {
      for (const Touch& touch : work.touches) {
        if (Overlaps(touch, allocation)) Violate(std::string(what) + ": under queued work");
      }
    }
  }
  if (!mapped) std::memset(allocation.alias, 0xDD, allocation.bytes);
  if (kind == Memory::kPinned) {
    mprotect(allocation.address, allocation.bytes, PROT_NONE);
    return;
  }
  munmap(allocation.alias, allocation.bytes);
  if (mmap(allocation.address, allocation.bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
    std::abort();
  }
  if (allocation.file >= 0) close(allocation.file);
}

}  // namespace

extern "C" {

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  *total = world.options.device_bytes;
  *free = world.options.device_bytes - Used(Mine().device);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  Allocation made;
  made.kind = Memory::kDevice;
  made.bytes = bytes;
  made.device = Mine().device;
  made.id = ++world.ids;
  if (bytes > world.options.device_bytes - Used(made.device)) {
    return End(cudaErrorMemoryAllocation);
  }
  made.file = memfd_create(FileName(made.id).c_str(), MFD_CLOEXEC);
  if (made.file < 0 || ftruncate(made.file, static_cast<off_t>(bytes)) != 0 || !Map(made)) {
    return End(cudaErrorMemoryAllocation);
  }
  std::memset(made.alias, 0xCB, bytes);
  *memory = Keep(made);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  const std::lock_guard lock(TheWorld().mutex);
  const cudaError_t code = Begin(__func__);
  if (memory != nullptr) Drop(memory, false, Memory::kDevice, __func__);
  return End(code);
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned int) {
  World& world = TheWorld();
  const std::lock_guard lock(world.mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  void* const pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return End(cudaErrorMemoryAllocation);
  Allocation made;
  made.kind = Memory::kPinned;
  made.address = made.alias = static_cast<std::byte*>(pages);
  made.bytes = bytes;
  std::memset(pages, 0xCB, bytes);
  *memory = Keep(made);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  const std::lock_guard lock(TheWorld().mutex);
  const cudaError_t code = Begin(__func__);
  if (memory != nullptr) Drop(memory, false, Memory::kPinned, __func__);
  return End(code);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* at) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  *attributes = {};
  const Allocation* const found = Find(ThisProcess(), at, 1);
  if (found != nullptr) {
    attributes->type = found->kind == Memory::kDevice ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = found->device;
  }
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  const Allocation* const found = Find(ThisProcess(), memory, 1);
  if (found == nullptr || found->kind != Memory::kDevice || found->mapped) {
    return End(cudaErrorInvalidValue);
  }
  if (found->bytes % (std::uint64_t{2} << 20) != 0) {
    Violate("a handle of memory that shares its block with others");
  }
  Exported exported;
  exported.pid = getpid();
  exported.process = found->process;
  exported.file = found->file;
  exported.device = found->device;
  exported.id = found->id;
  exported.bytes = found->bytes;
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &exported, sizeof exported);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned int flags) {
  const std::lock_guard lock(TheWorld().mutex);
  if (const cudaError_t code = Begin(__func__)) return End(code);
  Exported exported;
  const std::uint64_t form = exported.form;
  std::memcpy(static_cast<void*>(&exported), &handle, sizeof exported);
  if (exported.form != form || flags != cudaIpcMemLazyEnablePeerAccess) {
    return End(cudaErrorInvalidValue);
  }
  if (exported.pid == getpid() && exported.process == ThisProcess()) {
    return End(cudaErrorDeviceUninitialized);  // cannot be opened in the process that owns it
  }
  const std::string path =
      "/proc/" + std::to_string(exported.pid) + "/fd/" + std::to_string(exported.file);
  char link[256] = {};
  if (readlink(path.c_str(), link, sizeof link - 1) <= 0 ||
      std::string(link).find(FileName(exported.id) + " ") == std::string::npos) {
    return End(cudaErrorInvalidResourceHandle);  // it was freed
  }
  Allocation made;
  made.kind = Memory::kDevice;
  made.bytes = exported.bytes;
  made.device = exported.device;
  made.id = exported.id;
  made.mapped = true;
  made.file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (made.file < 0 || !Map(made)) return End(cudaErrorMapBufferObjectFailed);
  *memory = Keep(made);
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* memory) {
  const std::lock_guard lock(TheWorld().mutex);
  const cudaError_t code = Begin(__func__);
  Drop(memory, true, Memory::kDevice, __func__);
  return End(code);
}

}  // extern "C"
