// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "partial/gradient_log/log_reader.h"
#include "partial/gradient_log/log_segments_internal.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "support/os/file.h"

// Reads the segments of a log from front to back. An incomplete record is a torn tail if it is in
// the last segment of its writer and no mark follows it. In all other cases it is damage.

namespace shardwright::partial {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
static_assert(kBlockBytes % kLogSumBytes == 0);

/// A record of a file, with the result of its verification.
struct Found {
  log::RecordHead head;
  std::string meta;
  LogPayload payload;
  exec::Digest trailer{};
  std::string wrong;  ///< reason; empty: intact
};

/// Reads the record at `at`, or describes its damage.
Result<Found> ReadRecord(const os::File& file, std::uint64_t at, std::uint64_t file_bytes) {
  SW_TRY_ASSIGN(log::RecordFront front, log::ReadFront(file, at, file_bytes));
  Found found;
  found.head = front.head;
  found.meta = std::move(front.meta);
  found.wrong = std::move(front.wrong);
  if (!found.wrong.empty()) return found;
  const log::RecordHead& head = found.head;
  exec::DigestStream digest;
  digest.Add(front.frame);
  digest.Add(std::as_bytes(std::span(found.meta)));
  std::uint64_t from = at + log::kFrameBytes + head.meta_bytes;
  const std::uint64_t payload_end = from + head.payload_bytes;
  std::vector<std::byte> block(std::min<std::uint64_t>(kBlockBytes, head.payload_bytes));
  found.payload = {from, head.payload_bytes, {}};
  while (from < payload_end) {
    const auto part =
        std::span(block).first(std::min<std::uint64_t>(block.size(), payload_end - from));
    SW_TRY(file.ReadAt(from, part));
    digest.Add(part);
    for (std::size_t at_part = 0; at_part < part.size(); at_part += kLogSumBytes) {
      const std::size_t count = std::min<std::size_t>(kLogSumBytes, part.size() - at_part);
      found.payload.sums.push_back(exec::DigestOf(part.subspan(at_part, count)));
    }
    from += part.size();
  }
  std::vector<std::byte> back(at + log::RecordBytes(head) - payload_end);
  SW_TRY(file.ReadAt(payload_end, back));
  found.trailer = digest.Finish();
  const auto trailer = std::as_bytes(std::span(found.trailer));
  const bool zeros = std::all_of(back.begin() + log::kTrailerBytes, back.end(),
                                 [](std::byte byte) { return byte == std::byte{0}; });
  if (!zeros || !std::ranges::equal(trailer, std::span(back).first(log::kTrailerBytes))) {
    found.wrong = "its checksum does not match";
  }
  return found;
}

/// Returns true if a mark follows offset `after`. Bytes before a mark count as durable, so an error
/// in them is damage. Without a mark, the system may have written later bytes first.
Result<bool> MarkFollows(const os::File& file, std::uint64_t after, std::uint64_t file_bytes) {
  if (after >= file_bytes) return false;
  std::vector<std::byte> block(std::min<std::uint64_t>(kBlockBytes, file_bytes - after));
  for (std::uint64_t at = after; at < file_bytes; at += block.size()) {
    const auto part =
        std::span(block).first(std::min<std::uint64_t>(block.size(), file_bytes - at));
    SW_TRY(file.ReadAt(at, part));
    for (std::size_t i = 0; i + log::kFrameBytes <= part.size(); i += log::kFrameBytes) {
      const auto head = log::RecordHeadOf(part.subspan(i, log::kFrameBytes));
      if (head && head->kind == log::Kind::kMark) return true;
    }
  }
  return false;
}

/// Content of a segment that does not depend on the segments before it.
struct Scanned {
  std::uint64_t bytes = 0;
  std::optional<log::SegmentHead> head;  ///< absent: incomplete
  std::vector<Found> records;            ///< intact ones
  std::string wrong;                     ///< error in the next record; empty: none
  bool mark_follows = false;             ///< a mark follows the invalid record
};

Result<Scanned> ReadSegment(const std::string& folder, log::SegmentId id,
                            const exec::Digest& fingerprint) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(log::SegmentPath(folder, id)));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  Scanned out;
  out.bytes = identity.bytes;
  SW_TRY_ASSIGN(out.head, log::ReadHead(file, out.bytes, id, fingerprint));
  if (!out.head) return out;
  for (std::uint64_t at = log::kFrameBytes; at < out.bytes;) {
    SW_TRY_ASSIGN(Found found, ReadRecord(file, at, out.bytes));
    if (!found.wrong.empty()) {
      out.wrong = std::move(found.wrong);
      SW_TRY_ASSIGN(out.mark_follows, MarkFollows(file, at + log::kFrameBytes, out.bytes));
      break;
    }
    at += log::RecordBytes(found.head);
    out.records.push_back(std::move(found));
  }
  return out;
}

}  // namespace

/// A pass over the segments of one writer.
struct GradientLog::Scan {
  const std::string& folder;
  const exec::Digest& fingerprint;
  GradientLog* log;  ///< receives the records
  LogEnd end;
  bool first = false;  ///< the next record follows segments that were collected

  Status Segment(log::SegmentId id, bool last, Scanned scanned);
  Status CheckOrder(const Found& found, const std::string& where);
  Status Take(Found* found, const std::string& where);
};

Status GradientLog::Scan::CheckOrder(const Found& found, const std::string& where) {
  const std::uint64_t index = found.head.index;
  if (index > end.next_index) {
    return BadInput(where, ": records ", end.next_index, " to ", index - 1,
                    " are missing before record ", index);
  }
  if (index < end.next_index) {
    return BadInput(where, ": record ", end.next_index, " expected, found ", index,
                    ", which comes twice or out of order");
  }
  if (!first && found.head.previous != end.previous) {
    return BadInput(where, ": record ", index,
                    " does not continue the record before it: they belong to different logs");
  }
  return {};
}

Status GradientLog::Scan::Take(Found* found, const std::string& where) {
  if (found->head.kind == log::Kind::kMark) return {};
  if (found->head.kind != log::Kind::kGradients) {
    return Fail(Errc::kUnsupported, where, ": unknown record kind ",
                static_cast<std::uint32_t>(found->head.kind));
  }
  SW_TRY_ASSIGN(LogRecord record, ParseLogRecord(found->meta, where));
  std::uint64_t offset = found->payload.offset;
  const std::uint64_t payload_end = offset + found->payload.bytes;
  bool fits = true;
  for (LogPiece& piece : record.pieces) {
    fits = fits && piece.bytes <= payload_end - offset;
    if (!fits) break;
    piece.offset = offset;
    offset += piece.bytes;
  }
  if (!fits || offset != payload_end) {
    return BadInput(where, ": ", found->payload.bytes,
                    " bytes of gradients, but its pieces have another total");
  }
  log->by_module_[record.module].push_back(log->entries_.size());
  log->entries_.push_back({std::make_shared<const LoggedRecord>(LoggedRecord{
                               std::move(record), std::move(found->payload), log->paths_.back()}),
                           log->paths_.size() - 1});
  return {};
}

Status GradientLog::Scan::Segment(log::SegmentId id, bool last, Scanned scanned) {
  const std::string path = log::SegmentPath(folder, id);
  log->paths_.push_back(path);
  end.number = id.number;
  end.end = 0;
  if (!scanned.head) {
    if (!last) return BadInput(path, ": its header is truncated, but later segments exist");
    end.torn_bytes = scanned.bytes;
    log->torn_.push_back({path, scanned.bytes});
    return {};
  }
  const std::uint64_t first_index = scanned.head->first_index;
  if (first) end.next_index = first_index;
  if (first_index != end.next_index) {
    return BadInput(path, ": record ", end.next_index,
                    " expected at the start of the segment, found ", first_index);
  }
  std::uint64_t at = log::kFrameBytes;
  const auto where = [&] { return StrCat(path, ", byte ", at); };
  for (Found& found : scanned.records) {
    SW_TRY(CheckOrder(found, where()));
    SW_TRY(Take(&found, where()));
    at += log::RecordBytes(found.head);
    ++end.next_index;
    end.previous = found.trailer;
    first = false;
  }
  if (!scanned.wrong.empty()) {
    if (!last || scanned.mark_follows) {
      return BadInput(where(), ": record ", end.next_index, " is damaged: ", scanned.wrong);
    }
    end.torn_bytes = scanned.bytes - at;
    log->torn_.push_back({path, end.torn_bytes});
  }
  end.end = at;
  return {};
}

Result<LogEnd> GradientLog::EndOf(const std::string& folder, const exec::Digest& fingerprint,
                                  std::uint32_t writer) {
  SW_TRY_ASSIGN(const GradientLog log, OpenSome(folder, fingerprint, writer, 1));
  return log.end_;
}

Result<GradientLog> GradientLog::Open(const std::string& folder, const exec::Digest& fingerprint,
                                      unsigned threads) {
  return OpenSome(folder, fingerprint, std::nullopt, threads);
}

GradientLog GradientLog::Of(const std::vector<std::shared_ptr<const LoggedRecord>>& records) {
  GradientLog log;
  std::map<std::string_view, std::size_t> paths;
  for (const auto& one : records) {
    const auto [path, news] = paths.emplace(one->path, log.paths_.size());
    if (news) log.paths_.push_back(one->path);
    log.by_module_[one->record.module].push_back(log.entries_.size());
    log.entries_.push_back({one, path->second});
  }
  return log;
}

Result<GradientLog> GradientLog::OpenSome(const std::string& folder,
                                          const exec::Digest& fingerprint,
                                          std::optional<std::uint32_t> only, unsigned threads) {
  for (;;) {
    SW_TRY_ASSIGN(std::optional<GradientLog> log, OpenListed(folder, fingerprint, only, threads));
    if (log) return *std::move(log);
  }
}

Result<std::optional<GradientLog>> GradientLog::OpenListed(const std::string& folder,
                                                           const exec::Digest& fingerprint,
                                                           std::optional<std::uint32_t> only,
                                                           unsigned threads) {
  SW_TRY_ASSIGN(const std::vector<log::SegmentId> ids, log::ListSegments(folder, only));
  std::vector<std::optional<Result<Scanned>>> scanned(ids.size());
  tbb::task_arena arena(exec::ArenaThreads(threads));
  SW_TRY(exec::ForEach(arena, ids.size(), [&](std::uint64_t i) -> Status {
    scanned[i].emplace(ReadSegment(folder, ids[i], fingerprint));
    return {};
  }));
  // Segments that were collected after listing are not needed, nor are earlier ones.
  const auto is_last = [&](std::size_t i) {
    return i + 1 == ids.size() || ids[i + 1].writer != ids[i].writer;
  };
  std::vector<char> collected(ids.size(), 0);
  for (std::size_t i = ids.size(); i-- > 0;) {
    if (!is_last(i) && collected[i + 1] != 0) {
      collected[i] = 1;
    } else if (!*scanned[i]) {
      SW_TRY_ASSIGN(const bool there, os::Exists(log::SegmentPath(folder, ids[i])));
      // The last one is only collected if newer ones exist, which the list lacks.
      if (!there && is_last(i)) return std::optional<GradientLog>();
      collected[i] = there ? 0 : 1;
    }
  }
  GradientLog log;
  std::optional<Scan> scan;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (collected[i] != 0) continue;
    SW_TRY(*scanned[i]);
    if (i == 0 || ids[i].writer != ids[i - 1].writer || collected[i - 1] != 0) {
      scan.emplace(Scan{folder, fingerprint, &log, {}, ids[i].number > 1});
    }
    SW_TRY(scan->Segment(ids[i], is_last(i), **std::exchange(scanned[i], std::nullopt)));
    log.end_ = scan->end;
  }
  return std::optional<GradientLog>(std::move(log));
}

}  // namespace shardwright::partial
