// SPDX-License-Identifier: Apache-2.0
// One communicator of NCCL, with bounded waits.

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

/// The ranks of a group. Once it has failed or was aborted it stays so, and every call says why.
/// A stream on which it has work, and events of that stream, share it: whoever waits looks here
/// whether the others are still there. Abort and Healthy may come from any thread.
class Communicator {
 public:
  /// Meets the others.
  /// \param id  of the group, from its first rank
  /// \error kIo  it fails, or not all come within the deadline
  /// Collective within the group.
  static Result<std::shared_ptr<Communicator>> Make(const Context& context, const Nccl& nccl,
                                                    const ncclUniqueId& id, int size, int rank);

  Communicator(const Context& context, const Nccl& nccl) : context_(context), nccl_(nccl) {}
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() { Abort("destroyed"); }

  const Nccl& nccl() const { return nccl_; }
  ncclComm_t get() const { return comm_; }

  /// \error kIo  it has failed, here or on another rank; or was aborted
  Status Healthy();

  /// Waits until what was given to NCCL is on its stream.
  /// \param code  of the call. A failure
  /// aborts.
  Status Queued(ncclResult_t code, const std::string& what);

  /// Ends what is under way. The first call's reason is told by all later ones.
  void Abort(const std::string& why);

  /// Takes leave of the others, which do the same; aborts where they do not in time.
  void Finish();

 private:
  Status AsyncError(bool* pending, const std::string& what);
  Status AwaitReady(const std::string& what);

  const Context& context_;
  const Nccl nccl_;
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;
  std::optional<Error> ended_;  // why nothing goes any more
};

using Communicators = std::vector<std::shared_ptr<Communicator>>;

}  // namespace shardwright::device::cuda
