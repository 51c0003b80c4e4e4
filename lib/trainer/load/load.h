// SPDX-License-Identifier: Apache-2.0
// lib/trainer/load: checkpoints straight into the tensors of a trainer.
// Every rank of a running trainer describes its tensors and shards (TrainerShard). Together
// they form the target map, with one file for the memory of each rank (match.h). Load plans
// and runs as for files, but writes units into that memory. Ranks communicate through the
// trainer's own collectives (trainer_comm.h). Data that is not a tensor is returned as JSON
// (load_result_json.h). Nothing here depends on PyTorch; lib/trainer/torch does.

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

/// A tensor in memory that this process cannot access directly, such as GPU memory.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;
  virtual ~DeviceTensor() = default;

  /// Copies bytes to byte `first` of the tensor and the following ones. `bytes` may
  /// be freed on return. Threads call it concurrently for disjoint byte ranges.
  /// \pre both ends of the range are element boundaries
  virtual Status Fill(std::uint64_t first, std::span<const std::byte> bytes) = 0;
};

/// Memory of a tensor.
struct Memory {
  std::span<std::byte> bytes;  ///< its elements, row-major; empty on a device
  DeviceTensor* far = nullptr;
};

struct LoadOptions {
  convert::InputOptions input;
  bool strict = true;  ///< fail if tensors are missing or unused
  bool verify = true;  ///< compare source data with the checksums of its files
  /// The trainer loads an optimizer too. Optimizer states of the source that
  /// it lacks then count as unused, even if its own optimizer has no states.
  bool optimizer = false;
  /// The source is memory that every rank maps. Each rank reads the data it
  /// needs, sends nothing, and verifies nothing, because there are no checksums.
  bool in_memory = false;
  unsigned threads = 1;
  /// Limit for the buffers of this rank, as exec::RunOptions::memory_bytes.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  /// Pinned memory from which a device copies directly: plan::kUnitBytes for each thread. Counts
  /// towards memory_bytes. Empty: units of device tensors are gathered in ordinary memory.
  std::span<std::byte> staging;
};

/// Result of a load.
struct Loaded {
  std::unique_ptr<convert::Input> input;
  std::vector<std::string> missing;  ///< tensors of the trainer that the source lacks
  std::vector<std::string> unused;   ///< tensors of the source that the trainer lacks
  std::uint64_t bytes_filled = 0;    ///< total of the trainer's tensors on all ranks
  std::uint64_t bytes_read = 0;      ///< total of the source's payloads on all ranks
  std::uint64_t members_verified = 0;
};

/// Fills the tensors of all ranks from an opened source. With several ranks, each source file
/// is read by one rank, which sends the others their parts. After an error, the contents of the
/// tensors are undefined.
/// \param input   the source; its source paths in `options` are for messages
/// \param mine    the shards of this rank
/// \param memory  of each shard: its elements as its cut orders them; used only during the call
/// \pre mine.size() == memory.size(), and host memory has the size of its shard in bytes
/// \error kMismatch  a tensor has another shape; `strict`, and tensors are missing or unused,
///        which the message names; kBadInput  the ranks together do not have a complete tensor;
///        kLimit memory_bytes is too small; as plan::Plan::Make and exec::UnitLoop
/// Collective.
Result<Loaded> LoadFrom(comm::Comm& comm, std::unique_ptr<convert::Input> input,
                        const LoadOptions& options, const std::vector<TrainerShard>& mine,
                        std::span<const Memory> memory, Sink& sink);

/// Opens a source of any layout and format, and fills the tensors of all ranks as LoadFrom does.
/// \error as LoadFrom and convert::OpenInput
/// Collective.
Result<Loaded> Load(comm::Comm& comm, const LoadOptions& options,
                    const std::vector<TrainerShard>& mine, std::span<const Memory> memory,
                    Sink& sink);

}  // namespace shardwright::trainer
