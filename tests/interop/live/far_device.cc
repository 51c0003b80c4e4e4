// SPDX-License-Identifier: Apache-2.0
// A device for PyTorch that has no hardware: "far". Its memory has no access rights at the address
// that programs see, so that an access without PyTorch crashes. Asynchronous copies run when a call
// waits for them. The CPU computes all other operations, on copies. Unlike the package's library
// this is built on PyTorch's own C++ interface, and for one release of it.

#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace {

const c10::Device kFar(c10::DeviceType::PrivateUse1, 0);
constexpr unsigned char kNew = 0xCB;  // byte that fills new memory

/// A block of memory, by the address that the device uses for its bytes.
struct Block {
  char* near = nullptr;
  std::size_t bytes = 0;
};

class World {
 public:
  static World& Get() {
    static World* const kWorld = new World;  // tensors may outlive everything
    return *kWorld;
  }

  void* Allocate(std::size_t bytes) {
    const int file = ::memfd_create("far", 0);
    TORCH_CHECK(file >= 0 && ::ftruncate(file, static_cast<off_t>(bytes)) == 0, "no far memory");
    void* const seen = ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
    void* const near = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    TORCH_CHECK(seen != MAP_FAILED && near != MAP_FAILED, "no far memory");
    std::memset(near, kNew, bytes);
    const std::lock_guard lock(mutex_);
    blocks_[static_cast<char*>(seen)] = {static_cast<char*>(near), bytes};
    return seen;
  }

  void Free(void* seen) {
    Finish();
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(static_cast<char*>(seen));
    ::munmap(seen, found->second.bytes);
    ::munmap(found->second.near, found->second.bytes);
    blocks_.erase(found);
  }

  /// Returns the device's address of the byte at an address that programs see.
  void* Near(const void* seen) {
    const auto* const at = static_cast<const char*>(seen);
    const std::lock_guard lock(mutex_);
    auto block = blocks_.upper_bound(const_cast<char*>(at));
    TORCH_CHECK(block != blocks_.begin(), "an address that is not far");
    --block;
    TORCH_CHECK(at < block->first + block->second.bytes, "an address that is not far");
    return block->second.near + (at - block->first);
  }

  void Queue(std::function<void()> work) {
    const std::lock_guard lock(queue_mutex_);
    queue_.push_back(std::move(work));
  }

  void Finish() {
    std::vector<std::function<void()>> work;
    {
      const std::lock_guard lock(queue_mutex_);
      work.swap(queue_);
    }
    for (const auto& one : work) one();
  }

 private:
  std::mutex mutex_;
  std::map<char*, Block> blocks_;  // by the address that programs see
  std::mutex queue_mutex_;
  std::vector<std::function<void()>> queue_;
};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, nullptr, kFar};
    void* const seen = World::Get().Allocate(bytes);
    return {seen, seen, &Free, kFar};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(World::Get().Near(to), World::Get().Near(from), bytes);
  }
  static void Free(void* seen) {
    if (seen != nullptr) World::Get().Free(seen);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

/// One device, one stream.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kFar; }
  c10::Device getDevice() const override { return kFar; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kFar);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(kFar); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(kFar); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override { World::Get().Finish(); }
  void synchronizeStream(const c10::Stream&) const override { World::Get().Finish(); }
  void synchronizeDevice(c10::DeviceIndex) const override { World::Get().Finish(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
};

/// The same elements as a tensor on the CPU.
at::Tensor Near(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  return at::from_blob(World::Get().Near(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor CopyFrom(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (non_blocking) {
    World::Get().Queue([from, to] { Near(to).copy_(Near(from)); });
  } else {
    World::Get().Finish();
    Near(to).copy_(Near(from));
  }
  return to;
}

at::Tensor CopyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(to.sizes() == from.sizes(), "resizing is not for this device");
  return CopyFrom(from, to, false);
}

at::Tensor Empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor EmptyStrided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                        std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor AsStrided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<c10::SymInt> offset) {
  std::optional<std::int64_t> first;
  if (offset) first = offset->guard_int(__FILE__, __LINE__);
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), first);
}

at::Tensor View(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor ReshapeAlias(const at::Tensor& self, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

at::Scalar LocalScalar(const at::Tensor& self) {
  World::Get().Finish();
  return at::_local_scalar_dense(Near(self));
}

void OnTheCpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &Empty);
  library.impl("empty_strided", &EmptyStrided);
  library.impl("as_strided", &AsStrided);
  library.impl("view", &View);
  library.impl("_reshape_alias", &ReshapeAlias);
  library.impl("_copy_from", &CopyFrom);
  library.impl("_copy_from_and_resize", &CopyFromAndResize);
  library.impl("_local_scalar_dense", &LocalScalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&OnTheCpu>());
}

[[maybe_unused]] const bool kRegistered = [] {
  c10::register_privateuse1_backend("far");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
