// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "partial/gradient_log/log_frame_internal.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::partial::log {

// Reads segments without their gradients.

/// Returns `folder`/<writer>-<number>.swg.
std::string SegmentPath(const std::string& folder, SegmentId id);

/// Lists all segments by writer and number. Those of a writer
/// have no gap, but the first ones may have been collected.
/// \param only  list only this writer's segments; absent: all
/// \error kBadInput  a missing segment, or an unknown name; kNotFound  the folder
/// Local.
Result<std::vector<SegmentId>> ListSegments(const std::string& folder,
                                            std::optional<std::uint32_t> only = std::nullopt);

/// Reads the head of a segment; nullopt if it is incomplete.
/// \error kBadInput  damaged, or head of another segment;
///        kMismatch  another model; kUnsupported  unknown version
/// Local.
Result<std::optional<SegmentHead>> ReadHead(const os::File& file, std::uint64_t file_bytes,
                                            SegmentId id, const exec::Digest& fingerprint);

/// Frame and text of a record. The text is not verified,
/// because the digest of a record covers all of it.
struct RecordFront {
  Frame frame{};
  RecordHead head;
  std::string meta;
  std::string wrong;  ///< empty: within the file, with a valid frame digest
};

/// \error kNotFound, kIo  reading the file
/// Local.
Result<RecordFront> ReadFront(const os::File& file, std::uint64_t at, std::uint64_t file_bytes);

}  // namespace shardwright::partial::log
