// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/exec/file_pool.h"
#include "partial/gradient_log/log.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// What follows the last whole record of a writer: a kill or a power failure cut it short.
struct TornTail {
  std::string path;
  std::uint64_t bytes = 0;
};

/// Where a writer stands, for one that goes on.
struct LogEnd {
  std::uint64_t number = 0;      ///< of the last segment; 0: there is none
  std::uint64_t end = 0;         ///< of its last whole record; 0: its head is torn, too
  std::uint64_t torn_bytes = 0;  ///< what follows that
  std::uint64_t next_index = 0;
  exec::Digest previous{};  ///< trailer of the last record
};

/// The gradients of a record, as its segment stores them, and digests of what Open has proved: of
/// every kLogSumBytes, the last one of the rest.
struct LogPayload {
  std::uint64_t offset = 0;  ///< in the segment
  std::uint64_t bytes = 0;
  std::vector<exec::Digest> sums;
};
inline constexpr std::uint64_t kLogSumBytes = std::uint64_t{64} << 10;

/// A record where it lies.
struct LoggedRecord {
  LogRecord record;  ///< LogPiece::offset set
  LogPayload payload;
  std::string path;  ///< of its segment
};

/// A parameter of a module.
struct LoggedParam {
  std::string name;
  std::uint64_t elems = 0;
};

/// One iteration of a chain: every element of every parameter once.
struct LogLink {
  struct Piece {
    std::size_t param = 0;  ///< in what ChainOf was asked for
    const LogStep* step = nullptr;
    const LogPiece* piece = nullptr;
    const LogPayload* payload = nullptr;  ///< that it is a part of
    std::uint32_t segment = 0;            ///< that it lies in, of those of the log
    const std::string* path = nullptr;    ///< of its segment
  };
  std::uint64_t iteration = 0;
  std::vector<Piece> pieces;  ///< by parameter and first element; none of skipped steps

  /// Those of a parameter; empty if it skipped the step.
  std::span<const Piece> of(std::size_t param) const;
};

/// The gradients of a store, proved. Reading takes no lock: segments that writers append to show as
/// far as they were whole.
class GradientLog {
 public:
  /// Reads all segments and compares all checksums.
  /// \param threads  that read segments
  /// \error kBadInput  damage, by segment, record and what is wrong: a segment or records that are
  ///        missing, come twice or out of order, are cut short or changed; kMismatch  another
  ///        model's log; kUnsupported  another version; kNotFound
  /// Local.
  static Result<GradientLog> Open(const std::string& folder, const exec::Digest& fingerprint,
                                  unsigned threads = 1);

  /// The same for the segments of one writer.
  static Result<LogEnd> EndOf(const std::string& folder, const exec::Digest& fingerprint,
                              std::uint32_t writer);

  /// A log of records that are known: what this process has written itself. Nothing is read.
  /// \param records  in the order in which each writer has written them
  static GradientLog Of(const std::vector<std::shared_ptr<const LoggedRecord>>& records);

  const std::vector<TornTail>& torn() const { return torn_; }

  /// What brings a module from one version to another: a link for each iteration after `from`, up
  /// to and with `to`. Records that a recovery has given up are not looked at.
  /// \param params  all of the module, with different names
  /// \error kNotFound  an iteration, or elements of a parameter in it, that no record has; names
  ///        them; kBadInput  records that contradict each other or `params`, or counts of steps
  ///        that do not follow each other
  /// Local. The chain is valid as long as the log is.
  Result<std::vector<LogLink>> ChainOf(std::string_view module, std::span<const LoggedParam> params,
                                       std::uint64_t from, std::uint64_t to,
                                       std::span<const RecoveryRecord> recoveries) const;

  const std::vector<std::string>& segments() const { return paths_; }

  /// The log of the modules that it has, by name: all iterations, ascending.
  std::map<std::string, std::vector<std::uint64_t>> Modules() const;

 private:
  struct Entry {
    std::shared_ptr<const LoggedRecord> logged;
    std::size_t path = 0;
  };
  struct Scan;
  GradientLog() = default;
  /// Nothing where the list of segments has become old.
  static Result<std::optional<GradientLog>> OpenListed(const std::string& folder,
                                                       const exec::Digest& fingerprint,
                                                       std::optional<std::uint32_t> only,
                                                       unsigned threads);
  static Result<GradientLog> OpenSome(const std::string& folder, const exec::Digest& fingerprint,
                                      std::optional<std::uint32_t> only, unsigned threads);

  // Pointers into these are in chains.
  std::vector<std::string> paths_;
  std::vector<Entry> entries_;
  std::map<std::string, std::vector<std::size_t>, std::less<>> by_module_;
  std::vector<TornTail> torn_;
  LogEnd end_;  // of the last writer that was read
};

/// Reads ranges of gradients of a log, and compares what it reads with what Open has proved.
/// Thread-safe; a thread needs little memory, whatever the size of a piece.
class LogReads {
 public:
  /// \pre `log` outlives it
  explicit LogReads(const GradientLog& log);

  /// Fills `out` with the gradient of a piece from its element `first` on. What is compressed is
  /// decompressed from the piece's beginning.
  /// \error kBadInput  it has changed since Open; kNotFound
  Status Read(const LogLink::Piece& piece, std::uint64_t first, std::span<std::byte> out);

  /// Bytes that were read, as stored, and segments that were opened.
  std::uint64_t bytes_read() const { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const { return pool_.opened_count(); }

 private:
  exec::FilePool pool_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace shardwright::partial
