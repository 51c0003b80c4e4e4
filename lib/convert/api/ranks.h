// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "convert/api/api.h"
#include "support/base/result.h"

namespace shardwright {

namespace comm {
class Comm;
}  // namespace comm

/// The processes that execute a call together. All of them make the same
/// calls in the same order, each from one thread, and get the same result.
class SW_API Ranks {
 public:
  /// Creates a group that consists of this process alone.
  /// Local.
  Ranks();
  Ranks(Ranks&& other) noexcept;
  Ranks& operator=(Ranks&& other) noexcept;
  ~Ranks();

  /// Connects the processes that a launcher (mpirun, srun) started, over MPI; without a
  /// launcher, this process alone. The destructor finalizes MPI: use one object that outlives
  /// all calls.
  /// \error kInternal  MPI was initialized or finalized before; kIo  MPI does not start;
  ///        kNotFound no MPI of the launcher's family; kUsage  MPI reports one rank of several
  /// Collective under a launcher.
  static Result<Ranks> OfLauncher();

  /// Returns the rank of this process, from 0. Local.
  int rank() const;
  /// Returns the number of processes, at least 1. Local.
  int size() const;

  /// Internal: returns the communicator for the functions of the library.
  comm::Comm& comm() { return *comm_; }

 private:
  explicit Ranks(std::unique_ptr<comm::Comm> comm);

  std::unique_ptr<comm::Comm> comm_;
};

}  // namespace shardwright
