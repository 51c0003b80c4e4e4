// SPDX-License-Identifier: Apache-2.0
// Wraps one NCCL communicator and bounds every wait.

#pragma once

#include <nccl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/device/cuda/context_internal.h"
#include "engine/device/cuda/nccl_library_internal.h"
#include "support/base/result.h"

namespace shardwright::device::cuda {

/// The ranks of a group. After a failure or abort every call returns the reason. A
/// stream with its work, and the events of that stream, keep a reference: their waits
/// check here that the other ranks still run. Any thread may call Abort and Healthy.
class Communicator {
 public:
  /// Connects to the other ranks.
  /// \param id  identifier of the group, made by its first rank
  /// \error kIo  NCCL fails, or a rank does not join within the deadline
  /// Collective within the group.
  static Result<std::shared_ptr<Communicator>> Make(const Context& context, const Nccl& nccl,
                                                    const ncclUniqueId& id, int size, int rank);

  Communicator(const Context& context, const Nccl& nccl) : context_(context), nccl_(nccl) {}
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() { Abort("destroyed"); }

  const Nccl& nccl() const { return nccl_; }
  ncclComm_t get() const { return comm_; }

  /// \error kIo  the communicator failed, here or on another rank, or was aborted
  Status Healthy();

  /// Waits until NCCL has queued the call's work on its stream.
  /// \param code  result of the NCCL call; on failure the
  ///        communicator is aborted, and the error is returned
  Status Queued(ncclResult_t code, const std::string& what);

  /// Ends all running work. Later calls return the reason of the first call.
  void Abort(const std::string& why);

  /// Shuts down together with the other ranks; aborts if that exceeds the deadline.
  void Finish();

 private:
  Status AsyncError(bool* pending, const std::string& what);
  Status AwaitReady(const std::string& what);

  const Context& context_;
  const Nccl nccl_;
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  std::optional<Error> ended_;  // reason why no call works any more
};

using Communicators = std::vector<std::shared_ptr<Communicator>>;

}  // namespace shardwright::device::cuda
