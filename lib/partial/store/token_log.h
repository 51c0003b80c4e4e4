// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "support/base/result.h"
#include "token_counts/trace.h"

namespace shardwright::partial {

/// The tokens per expert of a run, which a save counts: a file that the trainer appends to while it
/// is read. What was read once is kept. One thread at a time.
class TokenLog {
 public:
  /// \param path  of a file or folder as token_counts::ReadLoads takes it
  /// \error kNotFound  there is none, or it cannot be read
  /// Local.
  static Result<std::shared_ptr<TokenLog>> Open(std::string path);

  const std::string& path() const { return path_; }

  /// Returns the tokens of all iterations above one. If the last line is torn, waits a moment for
  /// the rest, then ignores the line with a warning.
  /// \error as token_counts::ReadLoads
  /// Local.
  Result<std::shared_ptr<const token_counts::TokenTrace>> After(std::uint64_t iteration);

 private:
  explicit TokenLog(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::shared_ptr<const token_counts::TokenTrace> read_;
};

}  // namespace shardwright::partial
