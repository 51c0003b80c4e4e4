// SPDX-License-Identifier: Apache-2.0
// lib/support/comm: connects the ranks of a run.
// One interface with two implementations: MPI, and a single process. All ranks make the same
// collective calls in the same order. If one rank fails, the others must not wait for it forever,
// so every section of work ends with Agree, after which all ranks have the same outcome. No
// program links MPI. A launched process opens the launcher's MPI library at run time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright::comm {

using Bytes = std::vector<std::byte>;

/// Operation of AllReduce.
enum class ReduceOp : std::uint8_t { kMax, kSum, kOr };

/// Messages between the ranks of a run. Every call except rank() and size() is **collective**:
/// all ranks make the same calls in the same order, from one thread per rank. Messages may have
/// any length. If a rank has no memory to receive one, the call fails on all ranks (kLimit).
/// Transport failures return kIo, wrong calls return kInternal.
class Comm {
 public:
  Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  virtual ~Comm() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Waits until every rank has called it.
  virtual Status Barrier() = 0;

  /// Replaces `bytes` on every rank by the root's. \pre 0 <= root < size(), as in all calls
  virtual Status Bcast(Bytes& bytes, int root = 0) = 0;

  /// Sends each rank's bytes to the root. \returns one entry per rank on the root, none elsewhere
  virtual Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root = 0) = 0;

  /// Sends each rank's bytes to every rank. \returns one entry per rank
  virtual Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) = 0;

  /// Sends pieces[r] to rank r. The sender does not copy its data.
  /// \pre pieces.size() == size()
  /// \param receive_cap  the most bytes this rank accepts; if exceeded, all ranks fail with kLimit
  /// \returns the bytes from each rank, by sender
  virtual Result<std::vector<Bytes>> AllToAll(
      std::span<const std::span<const std::byte>> pieces,
      std::uint64_t receive_cap = std::numeric_limits<std::uint64_t>::max()) = 0;

  /// Combines one number of each rank. kSum adds modulo 2^64.
  virtual Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp op) = 0;

  Result<std::uint64_t> AllReduceMax(std::uint64_t mine) { return AllReduce(mine, ReduceOp::kMax); }
  Result<std::uint64_t> AllReduceSum(std::uint64_t mine) { return AllReduce(mine, ReduceOp::kSum); }
  Result<std::uint64_t> AllReduceOr(std::uint64_t mine) { return AllReduce(mine, ReduceOp::kOr); }

  /// Sends pieces[r] to rank r, for pieces that own their bytes.
  Result<std::vector<Bytes>> AllToAll(const std::vector<Bytes>& pieces);

  /// Combines the outcomes of all ranks: succeeds only if every rank passes success. Any other
  /// error takes precedence over kStopped. The lowest failing rank sets code, text and Error::rank,
  /// and the message lists the other failing ranks, equal messages once. An error that ranks
  /// have agreed on before passes unchanged. With one rank: returns `mine`.
  /// Collective.
  Status Agree(Status mine);

  /// Agrees on the outcome as above, and returns this rank's own value if every rank succeeded.
  /// Collective.
  template <class T>
  Result<T> Agree(Result<T> mine) {
    SW_TRY(Agree(mine ? Status() : Status(tl::unexpected<Error>(mine.error()))));
    return mine;
  }

  /// Runs `act` on rank 0 and returns its outcome on all ranks. An exception becomes kInternal.
  /// Collective.
  Status OnRoot(const std::function<Status()>& act);

  /// Runs `act` on rank 0 and returns its text on all ranks. Collective.
  Result<std::string> OnRootText(const std::function<Result<std::string>()>& act);
};

struct CommOptions {
  /// Largest single message of the transport in bytes. Longer messages are sent in parts.
  std::uint64_t chunk_bytes = std::uint64_t{1} << 30;
};

/// Makes a Comm with one rank. Local.
std::unique_ptr<Comm> MakeSerialComm();

/// Returns whether a launcher (mpirun, srun, a PMI or PMIx starter) began this process as one
/// of several ranks and SHARDWRIGHT_MPI is not "none". Reads the environment only.
/// Local.
bool UnderLauncher();

/// Returns the number of unconnected processes that one srun has started for this command, as
/// srun without MPI does. 1 if there is only this one. Reads the environment only.
/// Local.
std::uint64_t TasksApart();

/// Makes the Comm of this process: MPI under a launcher, otherwise serial. Without a
/// launcher it does not start MPI, as that takes longer than a short command. The Comm
/// finalizes MPI, so it is made once per process and must outlive all its users. The
/// environment variable SHARDWRIGHT_MPI selects the MPI: openmpi, mpich, the path of a
/// library, or none for a process that runs alone.
/// \error kInternal if MPI was started before; kIo if it does not start; kNotFound if there is no
///        MPI of the launcher's family; kUsage unless 1 <= chunk_bytes <= 2^30, if SHARDWRIGHT_MPI
///        has another value, or if MPI finds one rank where the launcher has started more
/// Collective under a launcher.
Result<std::unique_ptr<Comm>> MakeComm(const CommOptions& options = {});

}  // namespace shardwright::comm
