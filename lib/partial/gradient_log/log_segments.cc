// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <set>
#include <utility>

#include "partial/gradient_log/log.h"
#include "partial/gradient_log/log_segments_internal.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::partial::log {

std::string SegmentPath(const std::string& folder, SegmentId id) {
  return folder + "/" + SegmentName(id.writer, id.number);
}

Result<std::vector<SegmentId>> ListSegments(const std::string& folder,
                                            std::optional<std::uint32_t> only) {
  SW_TRY_ASSIGN(const std::vector<os::Entry> names, os::ListDir(folder));
  std::map<std::uint32_t, std::set<std::uint64_t>> segments;
  for (const os::Entry& entry : names) {
    const auto id = SegmentOf(entry.name);
    if (id && entry.type == os::EntryType::kFile && id->number > 0) {
      segments[id->writer].insert(id->number);
    } else if (!IsRootsName(entry.name) && !entry.name.ends_with(".tmp")) {
      return BadInput(folder, "/", entry.name, ": not a file of a gradient log");
    }
  }
  std::vector<SegmentId> ids;
  for (const auto& [writer, numbers] : segments) {
    if (only && writer != *only) continue;
    const std::size_t begin = ids.size();
    for (const std::uint64_t number : numbers) {
      if (ids.size() > begin && number != ids.back().number + 1) {
        // Segments were collected while names were read: if so, all before the gap are gone.
        const SegmentId before = ids.back();
        SW_TRY_ASSIGN(const bool there, os::Exists(SegmentPath(folder, before)));
        if (there) {
          return BadInput(SegmentPath(folder, {writer, before.number + 1}), " is missing before ",
                          SegmentName(writer, number));
        }
        ids.resize(begin);
      }
      ids.push_back({writer, number});
    }
  }
  return ids;
}

Result<std::optional<SegmentHead>> ReadHead(const os::File& file, std::uint64_t file_bytes,
                                            SegmentId id, const exec::Digest& fingerprint) {
  if (file_bytes < kFrameBytes) return std::optional<SegmentHead>();
  Frame frame;
  SW_TRY(file.ReadAt(0, frame));
  std::optional<SegmentHead> head = SegmentHeadOf(frame);
  const std::string& path = file.path();
  if (!head) {
    return BadInput(path, ": not a segment of a gradient log, or its header is damaged");
  }
  if (head->version != kLogVersion) {
    return Fail(Errc::kUnsupported, path, ": version ", kLogVersion,
                " of the gradient log expected, found ", head->version);
  }
  if (head->writer != id.writer || head->number != id.number) {
    return BadInput(path, ": segment ", SegmentName(head->writer, head->number),
                    " under another name");
  }
  if (head->fingerprint != fingerprint) {
    return Fail(Errc::kMismatch, path, ": gradients of another model: fingerprint ",
                exec::Hex(fingerprint), " expected, found ", exec::Hex(head->fingerprint));
  }
  return head;
}

Result<RecordFront> ReadFront(const os::File& file, std::uint64_t at, std::uint64_t file_bytes) {
  RecordFront front;
  const std::uint64_t rest = file_bytes - at;
  if (rest < kFrameBytes) {
    front.wrong = "its header is truncated";
    return front;
  }
  SW_TRY(file.ReadAt(at, front.frame));
  const auto head = RecordHeadOf(front.frame);
  if (!head) {
    front.wrong = "the checksum of its header does not match";
    return front;
  }
  front.head = *head;
  if (head->meta_bytes > kLogMetaBytes) {
    front.wrong = StrCat("its description has more than ", kLogMetaBytes, " bytes");
    return front;
  }
  if (head->payload_bytes > rest || RecordBytes(*head) > rest) {
    front.wrong = "it is truncated";
    return front;
  }
  front.meta.resize(head->meta_bytes);
  SW_TRY(file.ReadAt(at + kFrameBytes, std::as_writable_bytes(std::span(front.meta))));
  return front;
}

}  // namespace shardwright::partial::log
