// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardwright {

/// Checks that a conversion runs in addition to those that it always runs.
enum class Verify : std::uint8_t {
  kNone,       ///< compares no checksums
  kChecksums,  ///< compares every source member that is read with its checksum
  kReplicas,   ///< kChecksums, and replicas must match their owner bit for bit
  kReadback,   ///< kChecksums, and reads the output again before it is committed
};

/// Handling of the work that a stopped run for the same output has left.
enum class Resume : std::uint8_t {
  kIfSame,        ///< continues if inputs, flags and version are the same, otherwise fails
  kIfSameOrDone,  ///< kIfSame, and succeeds if the stopped run had completed the output
  kNever,         ///< removes the work and starts again
};

/// Maximum number of threads per rank.
inline constexpr unsigned kThreadsMax = 4096;
/// Minimum of buffer memory per rank in bytes. A smaller number is probably a missing unit.
inline constexpr std::uint64_t kMemoryMinBytes = std::uint64_t{1} << 20;

}  // namespace shardwright
