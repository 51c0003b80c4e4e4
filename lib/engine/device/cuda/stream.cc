// SPDX-License-Identifier: Apache-2.0
#include "engine/device/cuda/stream_internal.h"

#include <algorithm>
#include <utility>

#include "engine/device/cuda/wait_internal.h"

namespace shardwright::device::cuda {

namespace {

/// Returns true if the device can access this memory directly.
Result<bool> Reaches(const void* at) {
  cudaPointerAttributes attributes = {};
  SW_TRY(Check(cudaPointerGetAttributes(&attributes, at), "cannot query the kind of memory"));
  return attributes.type != cudaMemoryTypeUnregistered;
}

}  // namespace

CudaEvent::~CudaEvent() {
  static_cast<void>(context_.Enter());
  static_cast<void>(Check(cudaEventDestroy(event_), "an event"));
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
  if (std::find(others_.begin(), others_.end(), other) == others_.end()) others_.push_back(other);
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

Result<std::unique_ptr<Event>> CudaStream::Record() {
  SW_TRY(Enter());
  cudaEvent_t event = nullptr;
  SW_TRY(Keep(Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                    context_.name + ": cannot create an event")));
  auto made = std::make_unique<CudaEvent>(context_, event, others_);
  SW_TRY(Queue(cudaEventRecord(event, stream_), "an event"));
  return made;
}

Status CudaStream::Synchronize() {
  SW_TRY(Enter());
  if (queued_) SW_TRY(Keep(Await(context_, Awaited(stream_), others_)));
  queued_ = false;
  others_.clear();
  return {};
}

}  // namespace shardwright::device::cuda
