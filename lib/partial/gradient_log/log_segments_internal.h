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

// What is read of segments without their gradients.

/// `folder`/<writer>-<number>.swg
std::string SegmentPath(const std::string& folder, SegmentId id);

/// All segments by writer and number, those of a writer without a gap; the first ones may have been
/// collected.
/// \param only  this writer's; absent: of all
/// \error kBadInput  one is missing, or a name that is not of a log; kNotFound  the folder
/// Local.
Result<std::vector<SegmentId>> ListSegments(const std::string& folder,
                                            std::optional<std::uint32_t> only = std::nullopt);

/// The head of a segment; nothing where it is cut short.
/// \error kBadInput  it is damaged, or of another segment; kMismatch  of another model;
///        kUnsupported  of another version
/// Local.
Result<std::optional<SegmentHead>> ReadHead(const os::File& file, std::uint64_t file_bytes,
                                            SegmentId id, const exec::Digest& fingerprint);

/// Frame and text of a record. The text is compared with nothing: the digest of a record is that of
/// all of it.
struct RecordFront {
  Frame frame{};
  RecordHead head;
  std::string meta;
  std::string wrong;  ///< empty: it lies within the file, and the frame has its digest
};

/// \error kNotFound, kIo  the file
/// Local.
Result<RecordFront> ReadFront(const os::File& file, std::uint64_t at, std::uint64_t file_bytes);

}  // namespace shardwright::partial::log
