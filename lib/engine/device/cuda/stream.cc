// SPDX-License-Identifier: Apache-2.0
#include "engine/device/cuda/stream_internal.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/device/cuda/launch.h"
#include "engine/device/cuda/wait_internal.h"
#include "engine/tensor/convert.h"

namespace shardwright::device::cuda {

namespace {

// Longer runs use the copy engines, which are faster for them, above all for host memory.
constexpr std::uint64_t kLongRun = std::uint64_t{1} << 20;

void AddTo(Communicators& list, const std::shared_ptr<Communicator>& other) {
  if (std::find(list.begin(), list.end(), other) == list.end()) list.push_back(other);
}

/// Returns true if the device can access this memory directly.
Result<bool> Reaches(const void* at) {
  cudaPointerAttributes attributes = {};
  SW_TRY(Check(cudaPointerGetAttributes(&attributes, at), "cannot query the kind of memory"));
  return attributes.type != cudaMemoryTypeUnregistered;
}

/// \error kInternal  `to` or `from` is pageable memory
Status BothReached(const void* to, const void* from) {
  for (const void* const side : {to, from}) {
    SW_TRY_ASSIGN(const bool reached, Reaches(side));
    if (!reached) return Fail(Errc::kInternal, "the device cannot access this memory directly");
  }
  return {};
}

}  // namespace

CudaEvent::~CudaEvent() {
  static_cast<void>(context_.Enter());
  static_cast<void>(Check(cudaEventDestroy(event_), "an event"));
}

Result<bool> CudaEvent::Ended() const {
  SW_TRY(context_.Enter());
  SW_TRY_ASSIGN(const bool ended, Awaited(event_).Ended());
  for (const auto& other : others_) SW_TRY(other->Healthy());
  return ended;
}

Status CudaEvent::Wait() const {
  static_cast<void>(context_.Enter());  // the wait works without it
  return Await(context_, Awaited(event_), others_);
}

Result<CudaStream*> OfCuda(Stream& stream) {
  auto* const ours = dynamic_cast<CudaStream*>(&stream);
  if (ours == nullptr) return Fail(Errc::kInternal, "the stream belongs to another device");
  return ours;
}

Result<std::unique_ptr<Stream>> CudaStream::Make(Context& context) {
  SW_TRY(context.Enter());
  cudaStream_t stream = nullptr;
  // Non-blocking: does not wait for other work of this process on the default stream.
  SW_TRY(Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
               context.name + ": cannot create a stream"));
  return std::make_unique<CudaStream>(context, stream);
}

CudaStream::~CudaStream() {
  static_cast<void>(context_.Enter());
  if (queued_ && failed_) static_cast<void>(Await(context_, Awaited(stream_), others_));
  static_cast<void>(Check(cudaStreamDestroy(stream_), "a stream"));
}

Status CudaStream::Keep(Status status) {
  if (status || !failed_) return status;
  failed_ = status;
  // The caller may free the memory after this call returns, so wait for the device first.
  if (queued_) Silence(context_, Awaited(stream_), others_, status.error().message);
  return status;
}

Status CudaStream::Enter() {
  SW_TRY(failed_);
  return Keep(context_.Enter());
}

void CudaStream::Shares(const std::shared_ptr<Communicator>& other) {
  queued_ = true;
  AddTo(others_, other);
}

Status CudaStream::Queue(cudaError_t code, const char* what) {
  queued_ = true;
  return Keep(Check(code, context_.name + ": " + what));
}

// Waits for the stream before copies of pageable memory. CUDA
// would wait for it inside the copy call, and without a deadline.
Status CudaStream::CopyBytes(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  SW_TRY_ASSIGN(const bool to_reached, Reaches(to));
  SW_TRY_ASSIGN(const bool from_reached, Reaches(from));
  if (!to_reached || !from_reached) SW_TRY(Synchronize());
  return Queue(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "a copy");
}

Status CudaStream::Copy(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  SW_TRY(Enter());
  if (bytes == 0) return {};
  return Keep(CopyBytes(to, from, bytes));
}

Status CudaStream::CopyRuns(std::byte* to, const std::byte* from, std::span<const Run> runs) {
  SW_TRY(Enter());
  std::vector<kernels::MovedRun> some;
  const auto launch = [&]() -> Status {
    if (some.empty()) return {};
    const cudaError_t code =
        LaunchRuns(to, from, some.data(), static_cast<unsigned>(some.size()), stream_);
    some.clear();
    return Queue(code, "moving runs");
  };
  SW_TRY(Keep(BothReached(to, from)));
  for (const Run& run : runs) {
    if (run.bytes == 0) continue;
    if (run.bytes >= kLongRun) {
      SW_TRY(Queue(
          cudaMemcpyAsync(to + run.to, from + run.from, run.bytes, cudaMemcpyDefault, stream_),
          "a copy"));
      continue;
    }
    some.push_back({run.from, run.to, run.bytes});
    if (some.size() == kRunsOfLaunch) SW_TRY(launch());
  }
  return launch();
}

Status CudaStream::Convert(DType to_type, std::byte* to, DType from_type, const std::byte* from,
                           std::uint64_t elems) {
  SW_TRY(Enter());
  if (!CanConvert(from_type, to_type)) {
    return Fail(Errc::kInternal, "no conversion from ", Name(from_type), " to ", Name(to_type));
  }
  if (elems == 0) return {};
  if (from_type == to_type) return Copy(to, from, elems * ItemSize(from_type));
  SW_TRY(Keep(BothReached(to, from)));
  return Queue(LaunchConvert(to_type, to, from_type, from, elems, stream_), "a conversion");
}

Result<std::unique_ptr<Event>> CudaStream::Record() {
  SW_TRY(Enter());
  cudaEvent_t event = nullptr;
  SW_TRY(Keep(Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                    context_.name + ": cannot create an event")));
  auto made = std::make_unique<CudaEvent>(context_, event, others_);
  SW_TRY(Queue(cudaEventRecord(event, stream_), "an event"));
  return made;
}

Status CudaStream::WaitFor(const Event& event) {
  SW_TRY(Enter());
  const auto* const ours = dynamic_cast<const CudaEvent*>(&event);
  if (ours == nullptr) return Fail(Errc::kInternal, "the event belongs to another device");
  for (const auto& other : ours->others()) AddTo(others_, other);
  return Queue(cudaStreamWaitEvent(stream_, ours->get(), 0), "waiting for an event");
}

Status CudaStream::Synchronize() {
  SW_TRY(Enter());
  if (queued_) SW_TRY(Keep(Await(context_, Awaited(stream_), others_)));
  queued_ = false;
  others_.clear();
  return {};
}

}  // namespace shardwright::device::cuda
