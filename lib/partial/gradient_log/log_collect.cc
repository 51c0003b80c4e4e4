// SPDX-License-Identifier: Apache-2.0
#include "partial/gradient_log/log_collect.h"

#include <optional>
#include <utility>

#include "partial/gradient_log/log.h"
#include "partial/gradient_log/log_segments_internal.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/os/lock.h"

namespace shardwright::partial {
namespace {

/// Checks that a segment with successors has only records of iterations up to `through`.
/// \returns its size; nullopt if it has other records
Result<std::optional<std::uint64_t>> OldBytes(const os::File& file, log::SegmentId id,
                                              const exec::Digest& fingerprint,
                                              std::uint64_t through) {
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  const std::uint64_t bytes = identity.bytes;
  SW_TRY_ASSIGN(const auto head, log::ReadHead(file, bytes, id, fingerprint));
  if (!head) return BadInput(file.path(), ": its header is truncated, but later segments exist");
  std::uint64_t index = head->first_index;
  for (std::uint64_t at = log::kFrameBytes; at < bytes; ++index) {
    const std::string where = StrCat(file.path(), ", byte ", at);
    SW_TRY_ASSIGN(const log::RecordFront front, log::ReadFront(file, at, bytes));
    if (!front.wrong.empty() || front.head.index != index) {
      return BadInput(
          where, ": record ", index, " is damaged: ",
          (front.wrong.empty() ? StrCat("found record ", front.head.index) : front.wrong));
    }
    at += log::RecordBytes(front.head);
    if (front.head.kind == log::Kind::kMark) continue;
    if (front.head.kind != log::Kind::kGradients) {
      return Fail(Errc::kUnsupported, where, ": unknown record kind ",
                  static_cast<std::uint32_t>(front.head.kind));
    }
    SW_TRY_ASSIGN(const LogRecord record, ParseLogRecord(front.meta, where));
    if (record.iteration > through) return std::optional<std::uint64_t>();
  }
  return std::optional(bytes);
}

/// Returns true if a segment has a complete head, which states a writer's next record.
Result<bool> HasHead(const std::string& path, log::SegmentId id, const exec::Digest& fingerprint) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  SW_TRY_ASSIGN(const auto head, log::ReadHead(file, identity.bytes, id, fingerprint));
  return head.has_value();
}

}  // namespace

Result<OldSegments> FindOldSegments(const std::string& folder, const exec::Digest& fingerprint,
                                    std::uint64_t through, const StopCheck& stop) {
  SW_TRY_ASSIGN(const std::vector<log::SegmentId> ids, log::ListSegments(folder));
  OldSegments old;
  std::size_t round = 0;
  bool going = true;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i == 0 || ids[i].writer != ids[i - 1].writer) {
      round = 0;
      going = true;
    }
    const bool last = i + 1 == ids.size() || ids[i + 1].writer != ids[i].writer;
    if (!going || last) continue;
    SW_TRY(CheckStop(stop));
    const std::string path = log::SegmentPath(folder, ids[i]);
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
    SW_TRY_ASSIGN(const auto bytes, OldBytes(file, ids[i], fingerprint, through));
    going = bytes.has_value();
    if (!going) continue;
    SW_TRY_ASSIGN(going, HasHead(log::SegmentPath(folder, ids[i + 1]), ids[i + 1], fingerprint));
    if (!going) continue;
    if (old.rounds.size() == round) old.rounds.emplace_back();
    old.rounds[round++].push_back(path);
    old.bytes += *bytes;
    ++old.segments;
  }
  old.segments_kept = ids.size() - old.segments;
  return old;
}

Status RemoveSegments(const std::string& folder, const OldSegments& old, const StopCheck& stop) {
  for (const std::vector<std::string>& round : old.rounds) {
    SW_TRY(CheckStop(stop));
    SW_TRY(os::FaultPoint("log.collect"));
    for (const std::string& path : round) SW_TRY(os::RemoveFile(path));
    SW_TRY(os::SyncDir(folder));
  }
  return {};
}

Result<CollectedLog> CollectLog(const Store& store, std::uint64_t oldest, bool dry_run,
                                const StopCheck& stop) {
  CollectedLog out;
  const std::string folder = store.path() + "/logs";
  SW_TRY_ASSIGN(const bool there, os::IsDir(folder));
  if (!there) return out;
  os::Lock lock;
  if (!dry_run) {
    SW_TRY_ASSIGN(lock, store.LockForWriting("pec-save gc"));
  }
  const auto old = FindOldSegments(folder, store.head().fingerprint, oldest, stop);
  SW_TRY(CheckStop(stop));
  if (!old) {
    out.wrong = old.error().message;
  } else {
    out.segments_kept = old->segments_kept;
    out.segments_removed = old->segments;
    out.bytes_removed = old->bytes;
  }
  if (dry_run) return out;
  if (old) SW_TRY(RemoveSegments(folder, *old, stop));
  SW_TRY(lock.Release());
  return out;
}

}  // namespace shardwright::partial
