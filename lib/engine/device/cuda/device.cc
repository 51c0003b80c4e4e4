// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "engine/device/cuda/collective_internal.h"
#include "engine/device/cuda/context_internal.h"
#include "engine/device/cuda/open.h"
#include "engine/device/cuda/stream_internal.h"
#include "engine/device/device.h"
#include "support/comm/nodes.h"

namespace shardwright::device::cuda {

namespace {

constexpr std::uint64_t kAlign = 256;
// Smaller allocations share a block, and mapping one of them would also map the
// others in it: "Interprocess Communication" in the CUDA programming guide.
constexpr std::uint64_t kSharedAlign = std::uint64_t{2} << 20;

// Contents of a handle's token.
struct Token {
  std::array<char, 8> form = {'S', 'W', 'C', 'U', 'D', 'A', '0', '1'};
  std::array<char, 16> device = {};  // UUID of the device
  std::uint64_t bytes = 0;
  cudaIpcMemHandle_t memory = {};
};

class CudaBuffer final : public Buffer {
 public:
  CudaBuffer(Context& context, Place place, std::uint64_t bytes, void* data, bool mapped)
      : context_(context), place_(place), bytes_(bytes), data_(data), mapped_(mapped) {}
  ~CudaBuffer() override {
    if (place_ == Place::kPageable) std::free(data_);
    if (place_ == Place::kPageable || context_.stuck) return;
    static_cast<void>(context_.Enter());
    const cudaError_t code = mapped_                    ? cudaIpcCloseMemHandle(data_)
                             : place_ == Place::kPinned ? cudaFreeHost(data_)
                                                        : cudaFree(data_);
    static_cast<void>(Check(code, "cannot free memory"));
  }

  Place place() const override { return place_; }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  std::uint64_t size() const override { return bytes_; }

 private:
  Context& context_;
  Place place_;
  std::uint64_t bytes_;
  void* data_;
  bool mapped_;
};

std::uint64_t RoundUp(std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; }

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, std::chrono::milliseconds deadline, const cudaDeviceProp& properties) {
    context_.ordinal = ordinal;
    context_.deadline = deadline;
    context_.name = "cuda:" + std::to_string(ordinal) + " " + properties.name;
    std::memcpy(uuid_.data(), properties.uuid.bytes, uuid_.size());
  }

  Kind kind() const override { return Kind::kCuda; }
  std::string name() const override { return context_.name; }

  Result<std::uint64_t> FreeBytes() const override {
    SW_TRY(context_.Enter());
    std::size_t free = 0;
    std::size_t total = 0;
    SW_TRY(Check(cudaMemGetInfo(&free, &total), context_.name + ": cannot query the free memory"));
    return free;
  }

  Result<std::unique_ptr<Buffer>> Allocate(Place place, std::uint64_t bytes) override {
    if (bytes == 0) return Fail(Errc::kInternal, "allocation of 0 bytes requested");
    if (bytes > UINT64_MAX - kSharedAlign) return NoMemory(place, bytes);
    SW_TRY(context_.Enter());
    void* data = nullptr;
    cudaError_t code = cudaSuccess;
    switch (place) {
      case Place::kPageable:
        data = std::aligned_alloc(kAlign, RoundUp(bytes, kAlign));
        if (data == nullptr) code = cudaErrorMemoryAllocation;
        break;
      case Place::kPinned:
        code = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
        break;
      case Place::kShared:
        code = cudaMalloc(&data, RoundUp(bytes, kSharedAlign));
        break;
      case Place::kDevice:
        code = cudaMalloc(&data, bytes);
        break;
    }
    Status status =
        Check(code, context_.name + ": cannot allocate " + std::to_string(bytes) + " bytes");
    if (code == cudaErrorMemoryAllocation) return NoMemory(place, bytes);
    SW_TRY(std::move(status));
    return std::make_unique<CudaBuffer>(context_, place, bytes, data, false);
  }

  Result<Handle> Export(const Buffer& buffer) override {
    if (buffer.place() != Place::kShared)
      return Fail(Errc::kInternal, "only shared memory can be exported");
    SW_TRY(context_.Enter());
    Token token;
    token.device = uuid_;
    token.bytes = buffer.size();
    SW_TRY(Check(cudaIpcGetMemHandle(&token.memory, buffer.data()),
                 context_.name + ": cannot export memory to other processes"));
    Handle handle;
    handle.kind = Kind::kCuda;
    handle.bytes = buffer.size();
    handle.token.assign(reinterpret_cast<const char*>(&token), sizeof token);
    return handle;
  }

  Result<std::unique_ptr<Buffer>> Import(Handle handle) override {
    Token token;
    const auto form = token.form;
    if (handle.kind != Kind::kCuda || handle.token.size() != sizeof token) {
      if (handle.descriptor >= 0) close(handle.descriptor);
      return BadInput("shared memory: CUDA handle expected, found a handle of another kind");
    }
    std::memcpy(&token, handle.token.data(), sizeof token);
    if (token.form != form)
      return BadInput("shared memory: the handle was made by another release of Shardwright");
    if (token.bytes != handle.bytes || token.bytes == 0) {
      return BadInput("shared memory: ", handle.bytes, " bytes expected, found ", token.bytes);
    }
    if (token.device != uuid_) {
      return BadInput("shared memory: the handle belongs to another device, not to ",
                      context_.name);
    }
    SW_TRY(context_.Enter());
    void* data = nullptr;
    SW_TRY(Check(cudaIpcOpenMemHandle(&data, token.memory, cudaIpcMemLazyEnablePeerAccess),
                 context_.name +
                     ": cannot map memory of another process, which may have ended or be "
                     "this process"));
    return std::make_unique<CudaBuffer>(context_, Place::kShared, token.bytes, data, true);
  }

  Result<std::unique_ptr<Stream>> MakeStream() override { return CudaStream::Make(context_); }

  Result<std::unique_ptr<Collective>> MakeCollective(comm::Comm& comm,
                                                     std::span<const int> group) override {
    return MakeCudaCollective(context_, uuid_, comm, group);
  }

 private:
  tl::unexpected<Error> NoMemory(Place place, std::uint64_t bytes) const {
    std::string text = StrCat(context_.name, ": ", bytes, " bytes of ");
    text += place == Place::kPageable ? "" : place == Place::kPinned ? "pinned " : "device ";
    text += "memory requested";
    if (place == Place::kShared || place == Place::kDevice) {
      const Result<std::uint64_t> free = FreeBytes();
      if (free) text += StrCat(", ", *free, " bytes are free");
    }
    return Fail(Errc::kLimit, text);
  }

  mutable Context context_;
  std::array<char, 16> uuid_ = {};
};

/// Returns the number of ranks of this node before this one. Ranks are
/// on one node if they have the same boot id and host name. Collective.
Result<int> LocalRank(comm::Comm& comm) {
  SW_TRY_ASSIGN(const std::vector<comm::Node> nodes, comm::NodesOfRanks(comm));
  const auto own = nodes.begin() + comm.rank();
  return static_cast<int>(std::count(nodes.begin(), own, *own));
}

Result<std::unique_ptr<Device>> OpenHere(int local_rank, const DeviceOptions& options) {
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess) {
    Status status = Check(code, "CUDA");
    Error error = status.error();
    const bool missing = code == cudaErrorNoDevice || code == cudaErrorInsufficientDriver ||
                         code == cudaErrorSystemDriverMismatch;
    if (missing) error.code = Errc::kNotFound;
    return tl::unexpected<Error>(std::move(error));
  }
  if (count == 0) return Fail(Errc::kNotFound, "CUDA: no device found");
  const int ordinal = options.ordinal.value_or(local_rank % count);
  if (ordinal < 0 || ordinal >= count) {
    return Fail(Errc::kUsage, "CUDA: device ", ordinal, " requested, found ", count, " devices");
  }
  cudaDeviceProp properties = {};
  const std::string what = "cuda:" + std::to_string(ordinal);
  SW_TRY(Check(cudaGetDeviceProperties(&properties, ordinal), what));
  auto device = std::make_unique<CudaDevice>(ordinal, options.deadline, properties);
  // Initializes the device with its first call, so that a broken device is reported here.
  SW_TRY(device->FreeBytes());
  return device;
}

}  // namespace

Status Check(cudaError_t code, const std::string& what) {
  if (code == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());
  return Fail(Errc::kIo, what, ": ", cudaGetErrorName(code), ": ", cudaGetErrorString(code));
}

Status Context::Enter() const { return Check(cudaSetDevice(ordinal), name); }

Result<std::unique_ptr<Device>> Open(comm::Comm& comm, const DeviceOptions& options) {
  SW_TRY_ASSIGN(const int local_rank, LocalRank(comm));
  return comm.Agree(OpenHere(local_rank, options));
}

}  // namespace shardwright::device::cuda
