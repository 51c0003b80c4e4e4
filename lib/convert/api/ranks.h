// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "convert/api/api.h"
#include "support/base/result.h"

namespace shardwright {

namespace comm {
class Comm;
}  // namespace comm

/// The processes that carry out a call together. All of them make the same calls in the same order,
/// each from one thread, and get the same outcome.
class SW_API Ranks {
 public:
  /// This process alone.
  /// Local.
  Ranks();
  Ranks(Ranks&& other) noexcept;
  Ranks& operator=(Ranks&& other) noexcept;
  ~Ranks();

  /// Those that a launcher (mpirun, srun) began, over MPI; without a launcher this process alone.
  /// MPI ends with the object, so it is made once in a process and outlives all calls.
  /// \error kInternal  MPI was started before, or has ended; kIo  it does not start; kNotFound
  ///        there is no MPI of the launcher's family; kUsage  MPI sees one rank where the launcher
  ///        has started more
  /// Collective under a launcher.
  static Result<Ranks> OfLauncher();

  /// From 0 on. Local.
  int rank() const;
  /// At least 1. Local.
  int size() const;

  /// For the library itself.
  comm::Comm& comm() { return *comm_; }

 private:
  explicit Ranks(std::unique_ptr<comm::Comm> comm);

  std::unique_ptr<comm::Comm> comm_;
};

}  // namespace shardwright
