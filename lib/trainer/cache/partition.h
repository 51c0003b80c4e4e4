// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoints/model/format.h"
#include "engine/plan/target.h"
#include "support/base/result.h"

namespace shardwright::cache {

/// Where buffers' parts begin, a multiple of bytes.
inline constexpr std::uint64_t kAlignment = 256;

/// What the same processes hold: one file of SharedOut::target.
struct Part {
  std::vector<std::uint32_t> processes;  ///< ascending, one at least
  std::vector<std::uint64_t> at;         ///< by process of `processes`: in its buffer, bytes
};

/// A target, shared out to the buffers of processes.
struct SharedOut {
  /// The tensors of the target, each element once wherever it is stored in a place of its own. File
  /// p is part p; there are no frames.
  plan::Target target;
  std::vector<Part> parts;
  std::vector<std::uint64_t> buffer_bytes;  ///< by process
};

/// Lays the tensors of a target's files out in memory: what a file holds goes to the processes of
/// the ranks that read it. Rank r of n is of process r * processes / n. What is no element of a
/// tensor of the map is left out. A tensor that several files repeat is there once, for the ranks
/// of all of them; what a flat buffer repeats of another stays a replica.
/// \error kUsage  more processes than ranks
/// Pure.
Result<SharedOut> ShareOut(const plan::Target& target, const checkpoints::FileReaders& readers,
                           std::uint32_t processes);

}  // namespace shardwright::cache
