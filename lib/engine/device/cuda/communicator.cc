// SPDX-License-Identifier: Apache-2.0
#include "engine/device/cuda/communicator_internal.h"

#include "engine/device/cuda/wait_internal.h"

namespace shardwright::device::cuda {

Result<std::shared_ptr<Communicator>> Communicator::Make(const Context& context, const Nccl& nccl,
                                                         const ncclUniqueId& id, int size,
                                                         int rank) {
  auto made = std::make_shared<Communicator>(context, nccl);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const std::string what = "cannot create the communicator of " + std::to_string(size) + " ranks";
  SW_TRY(made->Queued(nccl.comm_init(&made->comm_, size, id, rank, &config), what));
  return made;
}

// Call it with the mutex locked.
Status Communicator::AsyncError(bool* pending, const std::string& what) {
  ncclResult_t state = ncclSuccess;
  SW_TRY(Check(nccl_, nccl_.comm_async_error(comm_, &state), comm_, what));
  *pending = state == ncclInProgress;
  return Check(nccl_, state, comm_, what);
}

Status Communicator::Healthy() {
  Status status;
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return tl::unexpected<Error>(*ended_);
    if (comm_ == nullptr) return {};
    bool pending = false;
    status = AsyncError(&pending, context_.name);
  }
  if (!status) Abort(status.error().message);
  return status;
}

Status Communicator::AwaitReady(const std::string& what) {
  Patience patience(context_.deadline);
  for (;;) {
    bool pending = false;
    {
      const std::lock_guard lock(mutex_);
      if (ended_) return tl::unexpected<Error>(*ended_);
      SW_TRY(AsyncError(&pending, what));
    }
    if (!pending) return {};
    if (!patience.Left()) return Fail(Errc::kIo, what, ": not ready ", patience.Text());
    patience.Rest();
  }
}

Status Communicator::Queued(ncclResult_t code, const std::string& what) {
  Status status = Check(nccl_, code, comm_, what);
  if (status && code == ncclInProgress) status = AwaitReady(what);
  if (!status) Abort(status.error().message);
  return status;
}

void Communicator::Abort(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!ended_) ended_ = Error{Errc::kIo, why};
  if (comm_ == nullptr) return;
  // comm_abort waits for NCCL's own threads, which notice
  // the abort. If it fails, nothing else can be done.
  static_cast<void>(nccl_.comm_abort(comm_));
  comm_ = nullptr;
}

void Communicator::Finish() {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
  }
  const std::string what = "cannot leave the communicator";
  if (!Queued(nccl_.comm_finalize(comm_), what)) return;
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  static_cast<void>(nccl_.comm_destroy(comm_));
  comm_ = nullptr;
  ended_ = Error{Errc::kIo, "the communicator is closed"};
}

}  // namespace shardwright::device::cuda
