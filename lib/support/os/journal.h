// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "support/base/result.h"
#include "support/os/directory.h"
#include "support/os/file.h"

namespace shardwright::os {

/// Identifies the run that a journal belongs to: a hash of inputs, flags and version.
using Fingerprint = std::array<std::byte, 16>;

/// Records of one or several journals.
struct JournalRecords {
  std::vector<std::vector<std::byte>> records;
  std::uint64_t valid_bytes = 0;  ///< end of the last complete record
  std::uint64_t torn_bytes = 0;   ///< size of a truncated last record, which a kill leaves
};

inline constexpr std::uint32_t kJournalVersion = 1;
inline constexpr std::uint64_t kJournalRecordBytes = std::uint64_t{16} << 20;
inline constexpr std::uint64_t kJournalBytes = std::uint64_t{1} << 30;

/// An append-only log of finished work, so that a stopped run can continue. All
/// integers are little-endian:
///
///   header   "SWJOURNL", u32 version, u32 zero, 16 bytes fingerprint
///   record   u32 length, u32 CRC-32 of (length, payload), payload
///
/// The CRC covers the length, so that a tail of zeros, which a power failure can leave, is
/// not a valid record. A record does not guarantee that its data is on the device: sync the
/// data before appending, or check the data when the run resumes.
class Journal {
 public:
  Journal() = default;

  /// Creates the journal, or opens it, reads its records and truncates an incomplete last
  /// record. The journal can grow to `most` bytes.
  /// \error kBadInput if the file is not a journal; kUnsupported for another version; kMismatch
  ///        for another fingerprint; kLimit above kJournalBytes; kBusy if it is another user's,
  ///        has a second hard link or is not a regular file; kNotFound; kIo
  /// Local.
  static Result<Journal> Open(const Directory& folder, const std::string& name,
                              const Fingerprint& fingerprint, std::uint64_t most = kJournalBytes);

  /// Returns the records that Open has read.
  const JournalRecords& found() const { return found_; }

  /// Appends one record. If another thread is writing records, that thread also writes this one,
  /// and the call returns at once: a kill then loses the record. Thread-safe. After a failure every
  /// later call fails too.
  /// \error kLimit if the record or the journal becomes too large; kIo, also for records of other
  ///        threads
  Status Append(std::span<const std::byte> payload);

  /// Makes appended records durable. Thread-safe. \error kIo
  Status Sync() const;

  /// Removes all records, if the data they refer to may not be on the device. After a failed Sync,
  /// does not sync again.
  /// \error kIo
  Status Clear();

  /// Closes the file. \error kIo
  Status Close();

 private:
  struct Writer {
    std::mutex mutex;
    std::uint64_t end = 0;  // with the records that wait
    std::uint64_t most = kJournalBytes;
    bool broken = false;             // a write or a sync has failed
    bool sync_failed = false;        // a second sync would prove nothing
    bool writing = false;            // by a thread without the lock
    std::vector<std::byte> waiting;  // records for the next write
  };

  Status WriteWaiting(std::unique_lock<std::mutex> lock);

  File file_;
  JournalRecords found_;
  std::unique_ptr<Writer> writer_;
};

/// Reads journals, one per rank, without changing them. The result has the records of all files
/// in the order of the names. A file without a complete header has no records.
/// \error as Journal::Open
/// Local.
Result<JournalRecords> ReadJournals(const Directory& folder, std::span<const std::string> names,
                                    const Fingerprint& fingerprint);

}  // namespace shardwright::os
