// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replays the optimizer steps of modules whose blobs are of an older version. FindChain finds the
// steps in the log that lead a module from the version of its blobs to an iteration, or states why
// there are none; MakeSteps applies them to a range of a parameter. Restores compute the bytes when
// they are read (partial/restore/replay_bytes.h), agents in their buffers (partial/agent/agent.h).
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

/// A proved log, and what else chains need.
struct ReplayLog {
  GradientLog log;
  std::string folder;                                        ///< that tables of square roots lie in
  std::vector<RecoveryRecord> recoveries;                    ///< of the store
  std::map<exec::Digest, optimizer_steps::RootTable> roots;  ///< read as steps need them
};

/// A tensor in the blob of a component.
struct BlobTensor {
  Component component = Component::kMaster;
  std::uint64_t offset = 0;  ///< in the blob, bytes
};

/// A parameter with what its optimizer keeps of it, float32 all.
struct ReplayedParam {
  std::string name;
  std::uint64_t elems = 0;
  BlobTensor param;
  std::vector<BlobTensor> states;  ///< in the order of optimizer_steps::StatesOf
};

/// A module and what brings it to an iteration.
struct ReplayedModule {
  std::uint64_t version = 0;  ///< of its blobs
  std::uint64_t bytes = 0;    ///< of the gradients, as stored
  std::vector<ReplayedParam> params;
  std::vector<LogLink> chain;  ///< pieces count parameters as `params` does

  /// Whether the bytes of a component are made.
  bool makes(Component component) const;
};

/// Finds what brings a module from its version to that of a checkpoint.
/// \param checkpoint  of iteration `to`: its map has the tensors of `module`, its groups the steps
/// \param held        the module's blobs
/// \param log         gets the tables of square roots that the steps need
/// \error why nothing does: kNotFound  gradients or a table are missing; kBadInput  they contradict
///        each other or the checkpoint; kUnsupported  the module is none that can be replayed
/// Local. The chain is valid as long as the log is.
Result<ReplayedModule> FindChain(const checkpoints::Checkpoint& checkpoint, const Module& module,
                                 const HeldModule& held, std::uint64_t to, ReplayLog* log);

/// Whether a restore has gone on with a version of a module.
/// \error kNotFound  it has gone on with another one, or does not say with which
/// Local.
Status CheckGoesOnWith(const RecoveryRecord& restore, const std::string& module,
                       std::uint64_t version);

/// A step of one parameter.
struct ReplayStep {
  const LogStep* step = nullptr;
  const optimizer_steps::RootTable* roots = nullptr;  ///< null: rounded correctly
  std::span<const LogLink::Piece> pieces;             ///< by first element
};

/// The steps of a parameter, by its number in the module, without those that were left out.
/// \pre module and log outlive them
std::vector<ReplayStep> StepsOf(const ReplayedModule& module, std::size_t param,
                                const ReplayLog& log);

/// Elements that are made at once: few enough to stay in a processor's cache through all steps.
inline constexpr std::uint64_t kReplayRange = std::uint64_t{64} << 10;

/// The same for a parameter: what is compressed is decompressed from its beginning for every range,
/// so ranges of such parameters are as large as pieces, up to `most`.
std::uint64_t RangeOf(const ReplayedModule& module, std::size_t param, std::uint64_t most);

/// Makes steps on the elements of a parameter from `first` on.
/// \param arrays    the parameter and its states, of equal size
/// \param gradient  room, used again from call to call
/// \error as LogReads::Read and optimizer_steps::Apply
/// Thread-safe for other arrays and room.
Status MakeSteps(std::span<const ReplayStep> steps, std::uint64_t first,
                 std::span<const std::span<float>> arrays, LogReads& reads,
                 std::vector<std::byte>* gradient);

}  // namespace shardwright::partial
