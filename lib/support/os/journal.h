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

/// Says what a journal belongs to: a hash over inputs, flags and version.
using Fingerprint = std::array<std::byte, 16>;

/// Records of one journal.
struct JournalRecords {
  std::vector<std::vector<std::byte>> records;
  std::uint64_t valid_bytes = 0;  ///< end of the last whole record
  std::uint64_t torn_bytes = 0;   ///< what follows it: a record that a kill cut short
};

inline constexpr std::uint32_t kJournalVersion = 1;
inline constexpr std::uint64_t kJournalRecordBytes = std::uint64_t{16} << 20;
inline constexpr std::uint64_t kJournalBytes = std::uint64_t{1} << 30;

/// An append-only log of what a run has done, so that a stopped run can continue. All integers are
/// little-endian:
///
///   header   "SWJOURNL", u32 version, u32 zero, 16 bytes fingerprint
///   record   u32 length, u32 CRC-32 of (length, payload), payload
///
/// The CRC covers the length so that a tail of zeros, which a power failure can leave, is no
/// record. A record says nothing about whether the data it speaks of is on the device: sync the
/// data before appending, or check the data on resume.
class Journal {
 public:
  Journal() = default;

  /// Creates the journal, or opens it, reads its records and cuts off a torn tail. It takes
  /// records up to `most` bytes in all.
  /// \error kBadInput if the file is no journal; kUnsupported for another version; kMismatch for
  ///        another fingerprint; kLimit above kJournalBytes; kBusy if it is another user's, has
  ///        another name or is not a regular file; kNotFound; kIo
  /// Local.
  static Result<Journal> Open(const Directory& folder, const std::string& name,
                              const Fingerprint& fingerprint, std::uint64_t most = kJournalBytes);

  /// Records found by Open.
  const JournalRecords& found() const { return found_; }

  /// Appends one record with one write. Thread-safe. After a failure every later call fails too.
  /// \error kLimit if the record or the journal grows too large; kIo
  Status Append(std::span<const std::byte> payload);

  /// Makes appended records durable. Thread-safe. \error kIo
  Status Sync() const;

  /// Removes all records: what they say was written may not be on the device. \error kIo
  Status Clear();

  /// Closes the file. \error kIo
  Status Close();

 private:
  struct Writer {
    std::mutex mutex;
    std::uint64_t end = 0;
    std::uint64_t most = kJournalBytes;
    bool broken = false;
  };

  File file_;
  JournalRecords found_;
  std::unique_ptr<Writer> writer_;
};

/// Reads journals, one per rank, changing nothing; the records of the files follow each other in
/// the order of the names. A file cut inside its header holds no records.
/// \error as Journal::Open
/// Local.
Result<JournalRecords> ReadJournals(const Directory& folder, std::span<const std::string> names,
                                    const Fingerprint& fingerprint);

}  // namespace shardwright::os
