// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "partial/gradient_log/log.h"
#include "partial/gradient_log/log_reader.h"
#include "support/base/result.h"
#include "support/os/file.h"

struct ZSTD_CCtx_s;

namespace shardwright::partial {

struct LogWriterOptions {
  std::uint32_t writer = 0;    ///< number of the process, unique at any time
  std::uint64_t recovery = 0;  ///< the store's last recovery (LogRecord::recovery)
  exec::Digest fingerprint{};  ///< StoreHead::fingerprint
  std::uint64_t segment_bytes = std::uint64_t{1} << 30;  ///< size that starts a new segment
  int zstd_level = 0;                                    ///< 0: uncompressed
};

/// A range of a gradient to log.
struct GradientRange {
  std::string_view param;
  std::uint64_t elems = 0;  ///< of the whole parameter
  std::uint64_t first = 0;
  DType dtype = DType::kF32;
  std::uint32_t step = 0;               ///< index into the steps of the call
  std::uint64_t count = 0;              ///< elements of the range
  std::span<const std::byte> gradient;  ///< input of the optimizer; empty for a skipped step
};

/// Appends to the segments of one writer. Local; one call at a time.
class LogWriter {
 public:
  /// Begins a log, or continues after the last complete record and truncates what follows it.
  /// \param folder  created if it does not exist
  /// \error kBadInput  the writer's segments are damaged; kMismatch  another model; kIo
  static Result<LogWriter> Open(const std::string& folder, const LogWriterOptions& options);

  LogWriter(LogWriter&&) noexcept;
  LogWriter& operator=(LogWriter&&) noexcept;
  ~LogWriter();

  /// Appends the gradients that this process used of a module in an iteration. They are
  /// durable after Persist. After a failure all later calls fail; then call Open again.
  /// \param logged  receives the record with its position; may be null
  /// \error kBadInput, kUnsupported, kLimit  invalid for readers, nothing was written; kIo
  Status Append(std::uint64_t iteration, std::string_view module, std::span<const LogStep> steps,
                std::span<const GradientRange> ranges, LoggedRecord* logged = nullptr);

  /// Checks that Append would accept the arguments, apart from errors of the file.
  /// \error kBadInput, kUnsupported, kLimit  as Append
  /// Pure.
  static Status Check(std::uint64_t iteration, std::string_view module,
                      std::span<const LogStep> steps, std::span<const GradientRange> ranges);

  /// Makes all appended records durable, and writes a mark: damage before it is not a torn tail.
  /// \error kIo
  Status Persist();

  /// Sets the recovery of later records, after the trainer has resumed from another one.
  void set_recovery(std::uint64_t recovery) { options_.recovery = recovery; }

  /// Returns the number of bytes that Open truncated.
  std::uint64_t cut_bytes() const { return cut_bytes_; }

 private:
  LogWriter(std::string folder, const LogWriterOptions& options);
  Status Begin();
  Status Sync();
  Result<std::uint64_t> WriteRecord(std::uint32_t kind, std::string_view meta,
                                    std::span<const std::span<const std::byte>> payload);
  Result<std::span<const std::byte>> Compressed(std::span<const std::byte> plain,
                                                std::vector<std::byte>* room);

  struct Free {
    void operator()(ZSTD_CCtx_s* context) const;
  };

  std::string folder_;
  LogWriterOptions options_;
  os::File file_;
  std::uint64_t number_ = 0;  // of the segment
  std::uint64_t end_ = 0;
  std::uint64_t index_ = 0;  // of the next record
  exec::Digest previous_{};
  std::uint64_t cut_bytes_ = 0;
  bool broken_ = false;
  std::unique_ptr<ZSTD_CCtx_s, Free> zstd_;
};

}  // namespace shardwright::partial
