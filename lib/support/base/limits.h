// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardwright::limits {

// Limits for counts that come from files, checked before memory is allocated (docs/limits.md).
inline constexpr std::uint64_t kPickleBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kPickleDepth = 1000;
inline constexpr std::uint64_t kPickleMemoEntries = 100'000'000;
inline constexpr std::uint64_t kPickleNodes = 200'000'000;
inline constexpr std::uint64_t kTensorRank = 64;
inline constexpr std::uint64_t kMeshBoxes = 65536;  // of a shard under a rule for a mesh
inline constexpr std::uint64_t kNameBytes = std::uint64_t{64} << 10;
inline constexpr std::uint64_t kZipRecords = 10'000'000;
inline constexpr std::uint64_t kZipDirectoryBytes = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kJsonBytes = std::uint64_t{256} << 20;
inline constexpr std::uint64_t kSafetensorsHeaderBytes = 100'000'000;  // defined by the format
inline constexpr std::uint64_t kSafetensorsIndexBytes = 100'000'000;
inline constexpr std::uint64_t kRanks = 1'000'000;
inline constexpr std::uint64_t kMoeLayers = 4096;
inline constexpr std::uint64_t kMoeExperts = 65536;
inline constexpr std::uint64_t kMoeNodes = 16384;
inline constexpr std::uint64_t kMoeDevices = 262'144;
inline constexpr std::uint64_t kMoeSlots = std::uint64_t{1} << 22;   // of all devices, one layer
inline constexpr std::uint64_t kMoeCells = std::uint64_t{1} << 28;   // slots of all layers
inline constexpr std::uint64_t kMoeCounts = std::uint64_t{1} << 25;  // in all records of a trace
inline constexpr std::uint64_t kMoeJsonDepth = 32;
inline constexpr std::uint64_t kMoeEvents = 10'000'000;
inline constexpr std::uint64_t kMoeTokens = std::uint64_t{1} << 53;  // of a layer: exact in double

}  // namespace shardwright::limits
