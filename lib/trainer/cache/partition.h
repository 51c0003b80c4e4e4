// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoints/model/format.h"
#include "engine/plan/target.h"
#include "support/base/result.h"

namespace shardwright::cache {

/// Alignment in bytes of the parts of a buffer.
inline constexpr std::uint64_t kAlignment = 256;

/// Tensors that the same processes store: one file of SharedOut::target.
struct Part {
  std::vector<std::uint32_t> processes;  ///< ascending, at least one
  std::vector<std::uint64_t> at;         ///< offset in bytes in each process's buffer
};

/// A target, distributed over the buffers of processes.
struct SharedOut {
  /// The tensors of the target, with each separately stored
  /// element once. File p is part p, and there are no frames.
  plan::Target target;
  std::vector<Part> parts;
  std::vector<std::uint64_t> buffer_bytes;  ///< by process
};

/// Distributes the tensors of a target's files over processes: the data of a file goes to the
/// processes of the ranks that read it. Rank r of n belongs to process r * processes / n. Data that
/// is not part of a tensor of the map is omitted. A tensor that several files repeat is stored
/// once, for the ranks of all of them. Elements that a flat buffer repeats remain a replica.
/// \error kUsage  more processes than ranks
/// Pure.
Result<SharedOut> ShareOut(const plan::Target& target, const checkpoints::FileReaders& readers,
                           std::uint32_t processes);

}  // namespace shardwright::cache
