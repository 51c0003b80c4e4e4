// SPDX-License-Identifier: Apache-2.0
// lib/trainer/load: checkpoints straight into the tensors of a trainer.
// Every rank of a running trainer says what it holds of which tensor (TrainerShard); together they
// are the target map, with a file for the memory of each rank (match.h). Load plans and runs as for
// files, but puts units into that memory. Ranks talk through the trainer's own collectives
// (trainer_comm.h). What is not a tensor is told as JSON (tell.h), for the trainer to set. Nothing
// here knows PyTorch: lib/trainer/torch does.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "convert/input.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "trainer/load/trainer_shard.h"

namespace shardwright::trainer {

/// A tensor in memory that this process cannot write to by itself, such as that of a GPU.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  virtual ~DeviceTensor() = default;

  /// Copies bytes to those of the tensor from `first` on; they may go when it returns. Many threads
  /// call it at once, for stretches that do not overlap.
  /// \pre both ends are bounds of elements
  virtual Status Fill(std::uint64_t first, std::span<const std::byte> bytes) = 0;
};

/// Where a tensor is.
struct Memory {
  std::span<std::byte> bytes;  ///< its elements, row-major; of a far one nothing
  DeviceTensor* far = nullptr;
};

struct LoadOptions {
  convert::InputOptions input;
  bool strict = true;  ///< refuse what is missing or unused
  bool verify = true;  ///< compare what is read with the checksums of its files
  /// The trainer loads an optimizer too. Optimizer states of the source that it lacks then count as
  /// unused, also where its own optimizer has no states.
  bool optimizer = false;
  /// The source is memory of every rank: each reads what it needs by itself, nothing is sent, and
  /// nothing compared, as there are no checksums.
  bool in_memory = false;
  unsigned threads = 1;
  /// Bytes of buffers that this rank may use, as exec::RunOptions::memory_bytes.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  /// Memory that a device copies from without a detour, a unit (plan::kUnitBytes) for each thread:
  /// units of far tensors are gathered there. Empty: in ordinary memory. A part of memory_bytes.
  std::span<std::byte> staging;
};

/// What a load did.
struct Loaded {
  std::unique_ptr<convert::Input> input;
  std::vector<std::string> missing;  ///< of the trainer's tensors: the source does not have them
  std::vector<std::string> unused;   ///< of the source's tensors: the trainer does not have them
  std::uint64_t bytes_filled = 0;    ///< of the trainer's tensors, all ranks
  std::uint64_t bytes_read = 0;      ///< of the source's payloads, all ranks
  std::uint64_t members_verified = 0;
};

/// Fills the tensors of all ranks from a source that was opened. With several ranks each
/// source file is read by one of them, which sends the others what they need. After an error the
/// tensors hold anything.
/// \param input   the source; its roots in `options` are for messages
/// \param mine    what this rank holds
/// \param memory  of each: its elements as `mine` cuts them; written to, never kept
/// \pre mine.size() == memory.size(), and what is not far has the bytes that its cut and type tell
/// \error kMismatch  a tensor of another shape, or strict, and something is missing or unused:
///        named; kBadInput  tensors that all ranks together do not hold whole; kLimit  memory_bytes
///        is too small; as plan::Plan::Make and exec::UnitLoop
/// Collective.
Result<Loaded> LoadFrom(comm::Comm& comm, std::unique_ptr<convert::Input> input,
                        const LoadOptions& options, const std::vector<TrainerShard>& mine,
                        std::span<const Memory> memory, Sink& sink);

/// The same from a source of any layout and format.
/// \error as LoadFrom and convert::OpenInput
/// Collective.
Result<Loaded> Load(comm::Comm& comm, const LoadOptions& options,
                    const std::vector<TrainerShard>& mine, std::span<const Memory> memory,
                    Sink& sink);

}  // namespace shardwright::trainer
