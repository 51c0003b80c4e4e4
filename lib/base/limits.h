#pragma once

#include <cstdint>

namespace shardwright::limits {

// Caps on counts that come from files: checked before anything is allocated (docs/limits.md).
inline constexpr std::uint64_t kPickleBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kPickleDepth = 1000;
inline constexpr std::uint64_t kPickleMemoEntries = 100'000'000;
inline constexpr std::uint64_t kPickleNodes = 200'000'000;
inline constexpr std::uint64_t kTensorRank = 64;
inline constexpr std::uint64_t kNameBytes = std::uint64_t{64} << 10;
inline constexpr std::uint64_t kZipRecords = 10'000'000;
inline constexpr std::uint64_t kZipDirectoryBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kJsonBytes = std::uint64_t{256} << 20;
inline constexpr std::uint64_t kRanks = 1'000'000;

}  // namespace shardwright::limits
