// SPDX-License-Identifier: Apache-2.0
#include "engine/device/cuda/wait_internal.h"

#include <algorithm>
#include <thread>

namespace shardwright::device::cuda {

namespace {

// Maximum time for aborted kernels to end.
constexpr std::chrono::milliseconds kGrace = std::chrono::seconds(10);

Status AllHealthy(const Communicators& others) {
  for (const auto& other : others) SW_TRY(other->Healthy());
  return {};
}

Status AwaitOrFail(const Context& context, const Awaited& awaited, const Communicators& others) {
  Patience patience(context.deadline);
  for (;;) {
    SW_TRY_ASSIGN(const bool ended, awaited.Ended());
    // Checked even if the work has ended: after an abort it ends too, but its bytes are undefined.
    SW_TRY(AllHealthy(others));
    if (ended) return {};
    if (!patience.Left()) {
      return Fail(Errc::kIo, context.name, ": queued work has not ended ", patience.Text());
    }
    patience.Rest();
  }
}

}  // namespace

void Patience::Rest() {
  ++rests_;
  if (rests_ < 64) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(std::min(500U, rests_)));
  }
}

std::string Patience::Text() const {
  const auto count = most_.count();
  if (count % 1000 != 0) return "within " + std::to_string(count) + " ms";
  return "within " + std::to_string(count / 1000) + " s";
}

Result<bool> Awaited::Ended() const {
  const cudaError_t code = event_ != nullptr ? cudaEventQuery(event_) : cudaStreamQuery(stream_);
  if (code == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());  // clears the error, which the runtime also keeps
    return false;
  }
  SW_TRY(Check(code, "queued work"));
  return true;
}

Status Await(Context& context, const Awaited& awaited, const Communicators& others) {
  Status status = AwaitOrFail(context, awaited, others);
  if (!status) Silence(context, awaited, others, status.error().message);
  return status;
}

void Silence(Context& context, const Awaited& awaited, const Communicators& others,
             const std::string& why) {
  for (const auto& other : others) other->Abort(why);
  const auto grace = std::min(kGrace, context.deadline);
  for (Patience patience(grace); patience.Left(); patience.Rest()) {
    // Failed work does not run any more.
    const Result<bool> ended = awaited.Ended();
    if (!ended || *ended) return;
  }
  context.stuck = true;
}

}  // namespace shardwright::device::cuda
