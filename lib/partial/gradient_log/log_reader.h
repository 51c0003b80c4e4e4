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

/// Bytes after the last complete record of a writer, left by a kill or a power failure.
struct TornTail {
  std::string path;
  std::uint64_t bytes = 0;
};

/// End of a writer's log, from which a new LogWriter continues.
struct LogEnd {
  std::uint64_t number = 0;      ///< of the last segment; 0: there is none
  std::uint64_t end = 0;         ///< of its last complete record; 0: its head is incomplete
  std::uint64_t torn_bytes = 0;  ///< bytes after that
  std::uint64_t next_index = 0;
  exec::Digest previous{};  ///< trailer of the last record
};

/// Gradients of a record as stored in its segment, with digests of the bytes
/// that Open verified: one for every kLogSumBytes, and one for the rest. None if in_memory.
struct LogPayload {
  std::uint64_t offset = 0;  ///< in the segment
  std::uint64_t bytes = 0;
  std::vector<exec::Digest> sums;
  bool in_memory = false;              ///< a record from another process: no segment has it
  std::vector<std::byte> stored = {};  ///< the gradients, if in_memory
};
inline constexpr std::uint64_t kLogSumBytes = std::uint64_t{64} << 10;

/// A record and its position.
struct LoggedRecord {
  LogRecord record;  ///< LogPiece::offset set
  LogPayload payload;
  std::string path;  ///< path of its segment
};

/// A parameter of a module.
struct LoggedParam {
  std::string name;
  std::uint64_t elems = 0;
};

/// One iteration of a chain: every element of every parameter exactly once.
struct LogLink {
  struct Piece {
    std::size_t param = 0;  ///< index into the `params` of ChainOf
    const LogStep* step = nullptr;
    const LogPiece* piece = nullptr;
    const LogPayload* payload = nullptr;  ///< payload that contains it
    std::uint32_t segment = 0;            ///< index of its segment in the log
    const std::string* path = nullptr;    ///< path of its segment
  };
  std::uint64_t iteration = 0;
  std::vector<Piece> pieces;  ///< by parameter and first element; none for skipped steps

  /// Returns the pieces of a parameter; empty if it skipped the step.
  std::span<const Piece> of(std::size_t param) const;
};

/// The verified gradient log of a store. Takes no lock: of
/// segments that are being written, it shows the complete records.
class GradientLog {
 public:
  /// Reads all segments and verifies all checksums.
  /// \param threads  number of threads that read segments
  /// \error kBadInput  damage, with segment, record and reason: segments or records
  ///        that are missing, repeated, out of order, incomplete or changed;
  ///        kMismatch  log of another model; kUnsupported  unknown version; kNotFound
  /// Local.
  static Result<GradientLog> Open(const std::string& folder, const exec::Digest& fingerprint,
                                  unsigned threads = 1);

  /// Reads and verifies the segments of one writer and returns their end.
  static Result<LogEnd> EndOf(const std::string& folder, const exec::Digest& fingerprint,
                              std::uint32_t writer);

  /// Makes a log of known records, those that this process has written. Reads no file.
  /// \param records  those of each writer in the order of writing
  static GradientLog Of(const std::vector<std::shared_ptr<const LoggedRecord>>& records);

  const std::vector<TornTail>& torn() const { return torn_; }

  /// Finds the chain that leads a module from one version to another: a link for each iteration
  /// after `from`, up to and including `to`. Ignores records that a recovery has rolled back.
  /// \param params  all parameters of the module, with distinct names
  /// \error kNotFound  no record has an iteration, or elements of a
  ///        parameter in it (names them); kBadInput  records contradict
  ///        each other or `params`, or step counts are not consecutive
  /// Local. The chain is valid during the lifetime of the log.
  Result<std::vector<LogLink>> ChainOf(std::string_view module, std::span<const LoggedParam> params,
                                       std::uint64_t from, std::uint64_t to,
                                       std::span<const RecoveryRecord> recoveries) const;

  const std::vector<std::string>& segments() const { return paths_; }

  /// Returns all iterations of each module in the log, ascending, by name.
  std::map<std::string, std::vector<std::uint64_t>> Modules() const;

 private:
  struct Entry {
    std::shared_ptr<const LoggedRecord> logged;
    std::size_t path = 0;
  };
  struct Scan;
  GradientLog() = default;
  /// Returns nullopt if the list of segments has changed meanwhile.
  static Result<std::optional<GradientLog>> OpenListed(const std::string& folder,
                                                       const exec::Digest& fingerprint,
                                                       std::optional<std::uint32_t> only,
                                                       unsigned threads);
  static Result<GradientLog> OpenSome(const std::string& folder, const exec::Digest& fingerprint,
                                      std::optional<std::uint32_t> only, unsigned threads);

  // Chains have pointers into these.
  std::vector<std::string> paths_;
  std::vector<Entry> entries_;
  std::map<std::string, std::vector<std::size_t>, std::less<>> by_module_;
  std::vector<TornTail> torn_;
  LogEnd end_;  // of the last writer read
};

/// Reads ranges of gradients from a log and verifies them against the digests
/// of Open. Thread-safe. A thread needs little memory for pieces of any size.
class LogReads {
 public:
  /// \pre `log` outlives it
  explicit LogReads(const GradientLog& log);

  /// Fills `out` with the gradient of a piece, starting at its element
  /// `first`. Decompresses compressed pieces from their beginning.
  /// \error kBadInput  changed since Open; kNotFound
  Status Read(const LogLink::Piece& piece, std::uint64_t first, std::span<std::byte> out);

  /// Number of bytes read, as stored, and of segments opened.
  std::uint64_t bytes_read() const { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const { return pool_.opened_count(); }

 private:
  exec::FilePool pool_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace shardwright::partial
