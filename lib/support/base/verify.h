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

/// Maximum number of threads per rank.
inline constexpr unsigned kThreadsMax = 4096;
/// Minimum of buffer memory per rank in bytes. A smaller number is probably a missing unit.
inline constexpr std::uint64_t kMemoryMinBytes = std::uint64_t{1} << 20;

}  // namespace shardwright
