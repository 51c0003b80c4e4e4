// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardwright {

/// How much is checked beyond what is always proved.
enum class Verify : std::uint8_t {
  kNone,      ///< no checksum of the source is compared
  kSums,      ///< every source member that is read is compared with its checksum
  kReplicas,  ///< and replicas must repeat their owner bit for bit
  kReadback,  ///< kSums, and the output is read again before it is committed
};

/// Most threads of a rank.
inline constexpr unsigned kThreadsMax = 4096;
/// Fewest bytes of buffers that a rank may be allowed: less is a forgotten unit.
inline constexpr std::uint64_t kMemoryMinBytes = std::uint64_t{1} << 20;

}  // namespace shardwright
