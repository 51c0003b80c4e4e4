// SPDX-License-Identifier: Apache-2.0
// lib/support/comm: the ranks of a run.
// One interface with two implementations: MPI, and a single process. All ranks make the same
// collective calls in the same order. A rank that fails must not leave the others waiting, so every
// section of work ends with Agree, after which all ranks hold the same outcome. No program links
// MPI: the one that the launcher speaks is opened when there is a launcher.

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

/// How AllReduce combines.
enum class ReduceOp : std::uint8_t { kMax, kSum, kOr };

/// The ranks of a run and what they say to each other. Every call except rank() and size() is
/// **collective**: all ranks make the same calls in the same order, from one thread per rank.
/// Messages of any length are passed; a rank that cannot get the memory to receive makes the call
/// fail on all ranks (kLimit). Failures of the transport are kIo, our own misuse is kInternal.
class Comm {
 public:
  Comm() = default;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;
  virtual ~Comm() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// Returns when every rank has called it.
  virtual Status Barrier() = 0;

  /// Replaces `bytes` on every rank by the root's. \pre 0 <= root < size(), as in all calls
  virtual Status Bcast(Bytes& bytes, int root = 0) = 0;

  /// Hands each rank's bytes to the root. \returns on the root one entry per rank, else nothing
  virtual Result<std::vector<Bytes>> Gather(std::span<const std::byte> mine, int root = 0) = 0;

  /// Hands each rank's bytes to every rank. \returns one entry per rank
  virtual Result<std::vector<Bytes>> AllGather(std::span<const std::byte> mine) = 0;

  /// Sends pieces[r] to rank r. Nothing is copied on the sending side.
  /// \pre pieces.size() == size()
  /// \param receive_cap  the most bytes this rank takes in; above it all ranks fail with kLimit
  /// \returns what each rank sent to this one
  virtual Result<std::vector<Bytes>> AllToAll(
      std::span<const std::span<const std::byte>> pieces,
      std::uint64_t receive_cap = std::numeric_limits<std::uint64_t>::max()) = 0;

  /// Combines one number of each rank; sums are modulo 2^64.
  virtual Result<std::uint64_t> AllReduce(std::uint64_t mine, ReduceOp op) = 0;

  Result<std::uint64_t> AllReduceMax(std::uint64_t mine) { return AllReduce(mine, ReduceOp::kMax); }
  Result<std::uint64_t> AllReduceSum(std::uint64_t mine) { return AllReduce(mine, ReduceOp::kSum); }
  Result<std::uint64_t> AllReduceOr(std::uint64_t mine) { return AllReduce(mine, ReduceOp::kOr); }

  /// Same, for pieces that own their bytes.
  Result<std::vector<Bytes>> AllToAll(const std::vector<Bytes>& pieces);

  /// Leaves all ranks with the same answer: success only if every rank brought it. An error
  /// outranks a stop (kStopped); then the lowest rank's code and text win, its number is in
  /// Error::rank, and the other failing ranks are listed, identical messages once. An error that
  /// ranks have agreed on before passes unchanged. With one rank: `mine`.
  /// Collective.
  Status Agree(Status mine);

  /// The same of work that returns something: what this rank has made, if every rank brought it.
  /// Collective.
  template <class T>
  Result<T> Agree(Result<T> mine) {
    SW_TRY(Agree(mine ? Status() : Status(tl::unexpected<Error>(mine.error()))));
    return mine;
  }

  /// Rank 0 acts; all ranks get its outcome. An exception out of `act` is kInternal everywhere.
  /// Collective.
  Status OnRoot(const std::function<Status()>& act);

  /// Same, with an answer for all ranks. Collective.
  Result<std::string> OnRootText(const std::function<Result<std::string>()>& act);
};

struct CommOptions {
  /// Largest single message of the transport. Longer ones are sent in parts.
  std::uint64_t chunk_bytes = std::uint64_t{1} << 30;
};

/// A Comm of one rank. Local.
std::unique_ptr<Comm> MakeSerialComm();

/// True if a launcher (mpirun, srun, a PMI or PMIx starter) began this process as one of several
/// ranks, unless SHARDWRIGHT_MPI is "none". Reads the environment only.
/// Local.
bool UnderLauncher();

/// How many tasks of one srun run this command without knowing of each other, as srun without MPI
/// starts them; 1: none but this process is known of. Reads the environment only.
/// Local.
std::uint64_t TasksApart();

/// The Comm of this process: MPI under a launcher, else serial. MPI is not touched without a
/// launcher, as starting it costs more than a short command takes. MPI is finalized with the Comm,
/// so it is made once per process and outlives all its users.
/// SHARDWRIGHT_MPI in the environment chooses the MPI: openmpi, mpich, the path of a library, or
/// none: this process is alone.
/// \error kInternal if MPI was started before; kIo if it does not start; kNotFound if there is no
///        MPI of the launcher's family; kUsage unless 1 <= chunk_bytes <= 2^30, if SHARDWRIGHT_MPI
///        is none of these, or if MPI sees one rank where the launcher has started more
/// Collective under a launcher.
Result<std::unique_ptr<Comm>> MakeComm(const CommOptions& options = {});

}  // namespace shardwright::comm
