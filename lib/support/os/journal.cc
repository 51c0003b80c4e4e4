// SPDX-License-Identifier: Apache-2.0
#include "support/os/journal.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "support/base/crc32.h"
#include "support/base/text.h"
#include "support/os/directory.h"

namespace shardwright::os {

namespace {

constexpr std::string_view kMagic = "SWJOURNL";
constexpr std::size_t kHeaderBytes = 32;
constexpr std::size_t kFrameBytes = 8;

void Store32(std::span<std::byte> to, std::uint32_t value) {
  for (std::size_t i = 0; i < 4; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

std::uint32_t Load32(std::span<const std::byte> from) {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < 4; ++i) value |= std::to_integer<std::uint32_t>(from[i]) << (8 * i);
  return value;
}

std::uint32_t Crc(std::span<const std::byte> length, std::span<const std::byte> payload) {
  return Crc32Share(Crc32(length), payload.size()) ^ Crc32(payload);
}

std::array<std::byte, kHeaderBytes> Header(const Fingerprint& fingerprint) {
  std::array<std::byte, kHeaderBytes> header{};
  std::memcpy(header.data(), kMagic.data(), kMagic.size());
  Store32(std::span(header).subspan(8, 4), kJournalVersion);
  std::copy(fingerprint.begin(), fingerprint.end(), header.begin() + 16);
  return header;
}

Status CheckHeader(const std::string& path, std::span<const std::byte> header,
                   const Fingerprint& fingerprint) {
  const std::uint32_t version = Load32(header.subspan(8, 4));
  if (version != kJournalVersion) {
    return Fail(Errc::kUnsupported, path, ": journal version ", kJournalVersion,
                " expected, found ", version);
  }
  const std::span<const std::byte> found = header.subspan(16, 16);
  if (!std::equal(found.begin(), found.end(), fingerprint.begin())) {
    return Fail(Errc::kMismatch, path,
                ": belongs to a run with other inputs, flags or version: fingerprint ",
                Hex(fingerprint), " expected, found ", Hex(found));
  }
  return {};
}

JournalRecords Split(std::span<const std::byte> bytes) {
  JournalRecords out;
  std::size_t at = kHeaderBytes;
  while (bytes.size() - at >= kFrameBytes) {
    const std::span<const std::byte> length_field = bytes.subspan(at, 4);
    const std::size_t length = Load32(length_field);
    if (length > kJournalRecordBytes || length > bytes.size() - at - kFrameBytes) break;
    const std::span<const std::byte> payload = bytes.subspan(at + kFrameBytes, length);
    if (Crc(length_field, payload) != Load32(bytes.subspan(at + 4, 4))) break;
    out.records.emplace_back(payload.begin(), payload.end());
    at += kFrameBytes + length;
  }
  out.valid_bytes = at;
  out.torn_bytes = bytes.size() - at;
  return out;
}

/// Fails unless the file belongs to this user, is regular and has a single hard link.
Status CheckOwn(const Directory& folder, const std::string& name, const NameStatus& status) {
  if (folder.IsOwnFile(status)) return {};
  std::string why = folder.WhyForeign(status);
  if (why.empty()) why = "is not a regular file with one name";
  return Fail(Errc::kBusy, folder.PathOf(name), ": not resumed: ", why);
}

// Returns the records of one journal; valid_bytes is 0 if the file has no complete header.
Result<JournalRecords> Read(const File& file, const Fingerprint& fingerprint, std::uint64_t most) {
  const std::string& path = file.path();
  SW_TRY_ASSIGN(const Identity identity, file.Stat());
  if (identity.bytes > most) {
    return Fail(Errc::kLimit, path, ": ", most, " bytes at most, found ", identity.bytes);
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(identity.bytes));
  SW_TRY(file.ReadAt(0, bytes));
  const bool has_magic =
      bytes.size() >= kMagic.size() && std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0;
  // A kill can leave a part of the header, and a power failure other bytes in place of a header
  // that was not synced. Records follow a synced header only, so a longer file is not a journal.
  if (bytes.size() < kHeaderBytes || (bytes.size() == kHeaderBytes && !has_magic)) {
    return JournalRecords{{}, 0, bytes.size()};
  }
  if (!has_magic) return Fail(Errc::kBadInput, path, ": not a journal");
  SW_TRY(CheckHeader(path, bytes, fingerprint));
  return Split(bytes);
}

}  // namespace

Result<Journal> Journal::Open(const Directory& folder, const std::string& name,
                              const Fingerprint& fingerprint, std::uint64_t most) {
  Journal journal;
  SW_TRY_ASSIGN(const std::optional<NameStatus> present, folder.Look(name));
  if (present) {
    SW_TRY(CheckOwn(folder, name, *present));
    SW_TRY_ASSIGN(journal.file_, folder.OpenWrite(name));
    SW_TRY_ASSIGN(journal.found_, Read(journal.file_, fingerprint, most));
  } else {
    SW_TRY_ASSIGN(journal.file_, folder.Create(name));
  }
  journal.writer_ = std::make_unique<Writer>();
  if (journal.found_.torn_bytes > 0) SW_TRY(journal.file_.Allocate(journal.found_.valid_bytes));
  if (journal.found_.valid_bytes == 0) {
    SW_TRY(journal.file_.WriteAt(0, Header(fingerprint)));
    SW_TRY(journal.file_.Sync());
    journal.found_.valid_bytes = kHeaderBytes;
  }
  journal.writer_->end = journal.found_.valid_bytes;
  journal.writer_->most = most;
  return journal;
}

Status Journal::Append(std::span<const std::byte> payload) {
  SW_CHECK(writer_ != nullptr);
  if (payload.size() > kJournalRecordBytes) {
    return Fail(Errc::kLimit, file_.path(), ": record of ", payload.size(), " bytes, ",
                kJournalRecordBytes, " at most");
  }
  std::vector<std::byte> record(kFrameBytes + payload.size());
  const std::span<std::byte> frame(record);
  Store32(frame.subspan(0, 4), static_cast<std::uint32_t>(payload.size()));
  Store32(frame.subspan(4, 4), Crc(frame.subspan(0, 4), payload));
  std::copy(payload.begin(), payload.end(), record.begin() + kFrameBytes);

  std::unique_lock lock(writer_->mutex);
  if (writer_->broken) {
    return Fail(Errc::kIo, file_.path(), ": an earlier write to the journal failed");
  }
  if (record.size() > writer_->most - writer_->end) {
    return Fail(Errc::kLimit, file_.path(), ": journal larger than ", writer_->most, " bytes");
  }
  writer_->waiting.insert(writer_->waiting.end(), record.begin(), record.end());
  writer_->end += record.size();
  return writer_->writing ? Status() : WriteWaiting(std::move(lock));
}

/// Writes the records that wait, until there are none.
Status Journal::WriteWaiting(std::unique_lock<std::mutex> lock) {
  writer_->writing = true;
  Status written;
  while (written && !writer_->waiting.empty()) {
    const std::vector<std::byte> records = std::exchange(writer_->waiting, {});
    const std::uint64_t at = writer_->end - records.size();
    lock.unlock();
    written = file_.WriteAt(at, records);
    lock.lock();
  }
  // A record after a truncated one could not be read, so later calls fail after an error.
  writer_->broken = writer_->broken || !written;
  writer_->writing = false;
  return written;
}

Status Journal::Sync() const {
  Status synced = file_.Sync();
  if (!synced) {
    const std::lock_guard lock(writer_->mutex);
    writer_->broken = true;
    writer_->sync_failed = true;
  }
  return synced;
}

Status Journal::Clear() {
  const std::lock_guard lock(writer_->mutex);
  SW_CHECK(!writer_->writing);
  SW_TRY(file_.Allocate(kHeaderBytes));
  writer_->end = kHeaderBytes;
  // A sync after a failed one proves nothing. Records that a power failure brings back do no harm,
  // because a run that resumes reads their units again.
  return writer_->sync_failed ? Status() : file_.Sync();
}

Status Journal::Close() { return file_.Close(); }

Result<JournalRecords> ReadJournals(const Directory& folder, std::span<const std::string> names,
                                    const Fingerprint& fingerprint) {
  JournalRecords all;
  for (const std::string& name : names) {
    SW_TRY_ASSIGN(const std::optional<NameStatus> status, folder.Look(name));
    if (status) SW_TRY(CheckOwn(folder, name, *status));
    SW_TRY_ASSIGN(const File file, folder.OpenRead(name));
    SW_TRY_ASSIGN(JournalRecords one, Read(file, fingerprint, kJournalBytes));
    all.records.insert(all.records.end(), std::make_move_iterator(one.records.begin()),
                       std::make_move_iterator(one.records.end()));
    all.valid_bytes += one.valid_bytes;
    all.torn_bytes += one.torn_bytes;
  }
  return all;
}

}  // namespace shardwright::os
