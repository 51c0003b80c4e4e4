// SPDX-License-Identifier: Apache-2.0
// Implements streams and events on CUDA.

#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "engine/device/cuda/communicator_internal.h"
#include "engine/device/cuda/context_internal.h"
#include "engine/device/device.h"
#include "support/base/result.h"

namespace shardwright::device::cuda {

class CudaEvent final : public Event {
 public:
  CudaEvent(Context& context, cudaEvent_t event, Communicators others)
      : context_(context), event_(event), others_(std::move(others)) {}
  ~CudaEvent() override;

  Status Wait() const override;

 private:
  Context& context_;
  cudaEvent_t event_;
  Communicators others_;  // communicators with work queued before the event
};

/// A CUDA stream. A failed stream stays failed, because work queued after the failure may not have
/// run. When a call returns the failure, no queued work of the stream accesses memory any more.
class CudaStream final : public Stream {
 public:
  static Result<std::unique_ptr<Stream>> Make(Context& context);

  CudaStream(Context& context, cudaStream_t stream) : context_(context), stream_(stream) {}
  ~CudaStream() override;

  Status Copy(std::byte* to, const std::byte* from, std::uint64_t bytes) override;
  Result<std::unique_ptr<Event>> Record() override;
  Status Synchronize() override;

  cudaStream_t get() const { return stream_; }

  /// Makes the stream's device the current one of this thread, before a communicator
  /// queues work. Returns the stream's failure if nothing can be queued any more.
  Status Enter();
  /// Records that a communicator has work on this stream.
  void Shares(const std::shared_ptr<Communicator>& other);
  /// Records the first failure. \returns `status`
  Status Keep(Status status);

 private:
  Status Queue(cudaError_t code, const char* what);
  Status CopyBytes(std::byte* to, const std::byte* from, std::uint64_t bytes);

  Context& context_;
  cudaStream_t stream_;
  Communicators others_;  // communicators that may have work on this stream
  bool queued_ = false;   // queued work may still run
  Status failed_;
};

/// Casts `stream`, which the CUDA backend must have created. \error kInternal
Result<CudaStream*> OfCuda(Stream& stream);

}  // namespace shardwright::device::cuda
