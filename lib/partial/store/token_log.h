// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "partial/select/lost_tokens.h"
#include "partial/store/manifest.h"
#include "partial/store/store.h"
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

/// Updates the counters of both levels to `iteration` from a trace: adds tokens of iterations
/// after state->counted_to. If tokens were not counted before, counts the whole trace.
/// \pre the trace has all iterations above state->counted_to, or above 0 if that is absent
/// \param ends  iterations at which the record splits its totals: versions
///        that a restore may return to, in addition to those of checkpoints
/// \returns the record to store with the checkpoint; its parent is not set
/// \error kMismatch  layers or experts of trace and model differ, both
///        named; kBadInput the trace lacks iterations, which are named
/// Pure.
Result<TokenRecord> CountUpTo(const token_counts::TokenTrace& trace, const std::string& where,
                              std::uint64_t iteration, const LayerExperts& experts,
                              SelectionState* state, const std::set<std::uint64_t>& ends = {});

/// Reads the tokens of a chain of checkpoints, from the one with `sequence` backward
/// as far as records exist. Returns nullopt if that checkpoint has no record.
/// \param oldest  as TokenHistory::MayMergeTo
/// \error as Store::ReadTokens
/// Local.
Result<std::optional<TokenHistory>> ReadHistory(const Store& store, std::uint64_t sequence,
                                                std::uint64_t oldest);

}  // namespace shardwright::partial
