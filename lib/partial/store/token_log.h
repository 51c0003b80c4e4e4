// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "support/base/result.h"
#include "token_counts/trace.h"

namespace shardwright::partial {

/// Tokens per expert of a run, which saves count, in a file that the trainer appends
/// to during reading. Caches the part that was read. For one thread at a time.
class TokenLog {
 public:
  /// \param path  a file or folder as accepted by token_counts::ReadLoads
  /// \error kNotFound  it does not exist or cannot be read
  /// Local.
  static Result<std::shared_ptr<TokenLog>> Open(std::string path);

  const std::string& path() const { return path_; }

  /// Returns the tokens of all iterations above `iteration`. If the last line is
  /// incomplete, waits a moment for the rest, then ignores the line with a warning.
  /// \error as token_counts::ReadLoads
  /// Local.
  Result<std::shared_ptr<const token_counts::TokenTrace>> After(std::uint64_t iteration);

 private:
  explicit TokenLog(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::shared_ptr<const token_counts::TokenTrace> read_;
};

}  // namespace shardwright::partial
