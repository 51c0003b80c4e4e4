// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine/exec/integrity.h"
#include "support/base/result.h"

namespace shardwright::partial::log {

// Frames of segments: docs/formats/log.md. Every part begins at a multiple of 64 bytes.

inline constexpr std::uint64_t kFrameBytes = 64;
inline constexpr std::uint64_t kTrailerBytes = 16;

/// Content of a record.
enum class Kind : std::uint32_t { kGradients = 1, kMark = 2 };

/// The first 64 bytes of a segment.
struct SegmentHead {
  std::uint32_t version = 0;
  std::uint32_t writer = 0;
  std::uint64_t number = 0;
  std::uint64_t first_index = 0;  ///< of its first record
  exec::Digest fingerprint{};     ///< of the store's model
};

/// The first 64 bytes of a record.
struct RecordHead {
  std::uint64_t index = 0;  ///< counts all records of the writer
  Kind kind = Kind::kGradients;
  std::uint32_t meta_bytes = 0;
  std::uint64_t payload_bytes = 0;
  exec::Digest previous{};  ///< trailer of the previous record; zeros: none
};

using Frame = std::array<std::byte, kFrameBytes>;

Frame ToFrame(const SegmentHead& head);
Frame ToFrame(const RecordHead& head);

/// Returns nullopt if magic or digest are wrong.
std::optional<SegmentHead> SegmentHeadOf(std::span<const std::byte> frame);
std::optional<RecordHead> RecordHeadOf(std::span<const std::byte> frame);

/// Returns the size of a record with all its parts, a multiple of 64. \pre plausible sizes
std::uint64_t RecordBytes(const RecordHead& head);

/// Returns "<writer>-<number>.swg".
std::string SegmentName(std::uint32_t writer, std::uint64_t number);

/// A segment as described by its file name.
struct SegmentId {
  std::uint32_t writer = 0;
  std::uint64_t number = 0;
};
std::optional<SegmentId> SegmentOf(std::string_view name);

/// Returns true for the name of a file of PutRoots.
bool IsRootsName(std::string_view name);

}  // namespace shardwright::partial::log
