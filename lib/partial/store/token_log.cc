// SPDX-License-Identifier: Apache-2.0
#include "partial/store/token_log.h"

#include <chrono>
#include <thread>
#include <utility>

#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::partial {
namespace {

/// Maximum number of reads of a log that is written to at the same time.
constexpr int kReads = 5;
constexpr std::chrono::milliseconds kWait(100);

}  // namespace

Result<std::shared_ptr<TokenLog>> TokenLog::Open(std::string path) {
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  if (!folder) SW_TRY(os::File::OpenRead(path));
  return std::shared_ptr<TokenLog>(new TokenLog(std::move(path)));
}

Result<std::shared_ptr<const token_counts::TokenTrace>> TokenLog::After(std::uint64_t iteration) {
  if (read_ && read_->after <= iteration) return read_;
  for (int i = 1;; ++i) {
    Result<token_counts::TokenTrace> trace = token_counts::ReadLoads(path_, iteration);
    // The line may be complete a moment later.
    const bool waits = i < kReads && (trace ? trace->torn : trace.error().code == Errc::kBadInput);
    if (trace && !waits) {
      read_ = std::make_shared<const token_counts::TokenTrace>(*std::move(trace));
      return read_;
    }
    if (!waits) return tl::unexpected<Error>(trace.error());
    std::this_thread::sleep_for(kWait);
  }
}

}  // namespace shardwright::partial
