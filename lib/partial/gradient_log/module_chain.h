// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays the optimizer steps of modules with blobs of an older version. FindChain finds the steps
// in the log that lead a module from the version of its blobs to an iteration, or states why there
// are none. MakeSteps applies them to a range of a parameter. Restores compute the bytes when they
// are read (partial/restore/replay_bytes.h), agents in their buffers (partial/agent/agent.h).
// Source: docs/lossless.md.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "partial/gradient_log/log_reader.h"
#include "partial/optimizer_steps/square_roots.h"
#include "partial/store/manifest.h"
#include "partial/store/modules.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// A verified log and the other input of chains.
struct ReplayLog {
  GradientLog log;
  std::string folder;                                        ///< folder with tables of square roots
  std::vector<RecoveryRecord> recoveries;                    ///< all recoveries of the store
  std::map<exec::Digest, optimizer_steps::RootTable> roots;  ///< loaded when steps need them
};

/// A tensor in the blob of a component.
struct BlobTensor {
  Component component = Component::kMaster;
  std::uint64_t offset = 0;  ///< in the blob, in bytes
};

/// A parameter with its optimizer states, all in float32.
struct ReplayedParam {
  std::string name;
  std::uint64_t elems = 0;
  BlobTensor param;
  std::vector<BlobTensor> states;  ///< in the order of optimizer_steps::StatesOf
};

/// A module and the chain that leads it to an iteration.
struct ReplayedModule {
  std::uint64_t version = 0;  ///< of its blobs
  std::uint64_t bytes = 0;    ///< size of the gradients, as stored
  std::vector<ReplayedParam> params;
  std::vector<LogLink> chain;  ///< pieces index parameters as in `params`

  /// Returns true if the bytes of a component are computed.
  bool makes(Component component) const;
};

/// Finds the chain that leads a module from its version to that of a checkpoint.
/// \param checkpoint  at iteration `to`, with the tensors of `module` and the optimizer groups
/// \param held        the module's blobs
/// \param log         receives the tables of square roots that the steps need
/// \error kNotFound  gradients or a table are missing; kBadInput  they contradict
///        each other or the checkpoint; kUnsupported  the module cannot be replayed
/// Local. The chain is valid during the lifetime of the log.
Result<ReplayedModule> FindChain(const checkpoints::Checkpoint& checkpoint, const Module& module,
                                 const StoredModule& held, std::uint64_t to, ReplayLog* log);

/// Checks that training resumed from a restore with this version of a module.
/// \error kNotFound  it resumed with another version, or the record does not state any
/// Local.
Status CheckGoesOnWith(const RecoveryRecord& restore, const std::string& module,
                       std::uint64_t version);

/// A step of one parameter.
struct ReplayStep {
  const LogStep* step = nullptr;
  const optimizer_steps::RootTable* roots = nullptr;  ///< null: rounded correctly
  std::span<const LogLink::Piece> pieces;             ///< by first element
};

/// Returns the steps of a parameter, by its index in the module, without skipped ones.
/// \pre module and log outlive the result
std::vector<ReplayStep> StepsOf(const ReplayedModule& module, std::size_t param,
                                const ReplayLog& log);

/// Elements computed at once: few enough to stay in a processor's cache through all steps.
inline constexpr std::uint64_t kReplayRange = std::uint64_t{64} << 10;

/// Returns the range size for a parameter. Each range of a compressed piece is decompressed from
/// the piece's beginning, so ranges of such parameters are as large as pieces, up to `most`.
std::uint64_t RangeOf(const ReplayedModule& module, std::size_t param, std::uint64_t most);

/// Applies steps to the elements of a parameter, starting at `first`.
/// \param arrays    the parameter and its states, of equal size
/// \param gradient  scratch buffer, reused between calls
/// \error as LogReads::Read and optimizer_steps::Apply
/// Thread-safe for different arrays and buffers.
Status MakeSteps(std::span<const ReplayStep> steps, std::uint64_t first,
                 std::span<const std::span<float>> arrays, LogReads& reads,
                 std::vector<std::byte>* gradient);

}  // namespace shardwright::partial
