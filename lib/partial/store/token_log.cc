// SPDX-License-Identifier: Apache-2.0
#include "partial/store/token_log.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::partial {
namespace {

/// Maximum number of reads of a log that is written to at the same time.
constexpr int kReads = 5;
constexpr std::chrono::milliseconds kWait(100);

/// Converts a record of the trace. All layers of a trace have the same number of experts.
Result<Counts> TableOf(const token_counts::TokenTrace& trace,
                       const token_counts::TokenTrace::Record& record, const LayerExperts& experts,
                       const std::string& where) {
  Counts table(trace.layer_id.size());
  for (std::size_t m = 0; m < table.size(); ++m) {
    const auto first = record.tokens.begin() + static_cast<std::ptrdiff_t>(m * trace.experts);
    table[m].assign(first, first + trace.experts);
  }
  SW_TRY(ValidateShape(table, experts, where));
  return table;
}

/// Checks that every iteration of (after, last] exists.
Status CheckGaps(const token_counts::TokenTrace& trace, const std::string& where,
                 std::uint64_t after, std::uint64_t last) {
  std::uint64_t next = after + 1;
  for (const token_counts::TokenTrace::Record& record : trace.records) {
    if (record.iteration < next) continue;
    if (next > last || record.iteration != next) break;
    ++next;
  }
  if (next > last) return {};
  std::uint64_t found = last + 1;
  for (const token_counts::TokenTrace::Record& record : trace.records) {
    if (record.iteration >= next) {
      found = std::min(found, record.iteration);
      break;
    }
  }
  return Fail(Errc::kBadInput, where, ": tokens of iterations ", next, " to ", found - 1,
              " are missing, those of ", after + 1, " to ", last, " are needed");
}

Status Add(const Counts& from, Counts* to) {
  for (std::size_t m = 0; m < to->size(); ++m) {
    for (std::size_t e = 0; e < (*to)[m].size(); ++e) {
      if (__builtin_add_overflow((*to)[m][e], from[m][e], &(*to)[m][e])) {
        return Fail(Errc::kBadInput, "tokens of expert ", e, " of MoE layer ", m,
                    " overflow 64 bits");
      }
    }
  }
  return {};
}

std::uint64_t Oldest(const Counts& version) {
  std::uint64_t oldest = ~std::uint64_t{0};
  for (const auto& layer : version) {
    for (const std::uint64_t one : layer) oldest = std::min(oldest, one);
  }
  return oldest;
}

/// Sets counters as if tokens had been counted from the start of the trace.
Result<TokenRecord> CountAnew(const token_counts::TokenTrace& trace, const std::string& where,
                              std::uint64_t iteration, const LayerExperts& experts,
                              SelectionState* state) {
  const std::uint64_t first = trace.records.empty() ? 1 : trace.records.front().iteration;
  // Before the first checkpoint no version is old, so the trace may begin anywhere.
  const bool fresh = state->persist.checkpoints == 0;
  const std::uint64_t oldest =
      std::min(Oldest(state->persist.version), Oldest(state->snapshot.version));
  SW_TRY(
      CheckGaps(trace, where, fresh ? std::max<std::uint64_t>(first, 1) - 1 : oldest, iteration));
  TokenRecord out;
  for (LevelState* level : {&state->snapshot, &state->persist}) {
    level->tokens = MakeCounts(experts);
    level->covered = MakeCounts(experts);
  }
  for (const token_counts::TokenTrace::Record& record : trace.records) {
    if (record.iteration > iteration) break;
    SW_TRY_ASSIGN(Counts table, TableOf(trace, record, experts, where));
    for (LevelState* level : {&state->snapshot, &state->persist}) {
      SW_TRY(Add(table, &level->tokens));
      for (std::size_t m = 0; m < experts.size(); ++m) {
        for (std::size_t e = 0; e < experts[m]; ++e) {
          if (record.iteration <= level->version[m][e]) level->covered[m][e] += table[m][e];
        }
      }
    }
    out.sums.push_back({record.iteration, std::move(table)});
  }
  return out;
}

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

Result<TokenRecord> CountUpTo(const token_counts::TokenTrace& trace, const std::string& where,
                              std::uint64_t iteration, const LayerExperts& experts,
                              SelectionState* state, const std::set<std::uint64_t>& ends) {
  SW_CHECK(trace.after <= state->counted_to.value_or(0));
  TokenRecord out;
  if (!state->counted_to) {
    SW_TRY_ASSIGN(out, CountAnew(trace, where, iteration, experts, state));
  } else if (iteration > *state->counted_to) {
    SW_TRY(CheckGaps(trace, where, *state->counted_to, iteration));
    std::set<std::uint64_t> all(ends.begin(), ends.lower_bound(iteration));
    all.insert(iteration);
    TokenSum sum{*all.upper_bound(*state->counted_to), MakeCounts(experts)};
    for (const token_counts::TokenTrace::Record& record : trace.records) {
      if (record.iteration <= *state->counted_to || record.iteration > iteration) continue;
      SW_TRY_ASSIGN(const Counts table, TableOf(trace, record, experts, where));
      SW_TRY(CountTokens(&state->snapshot, table));
      SW_TRY(CountTokens(&state->persist, table));
      if (record.iteration > sum.iteration) {
        TokenSum next{*all.lower_bound(record.iteration), MakeCounts(experts)};
        out.sums.push_back(std::exchange(sum, std::move(next)));
      }
      SW_TRY(Add(table, &sum.tokens));
    }
    out.sums.push_back(std::move(sum));
  }
  state->counted_to = iteration;
  return out;
}

Result<std::optional<TokenHistory>> ReadHistory(const Store& store, std::uint64_t sequence,
                                                std::uint64_t oldest) {
  std::vector<TokenRecord> records;
  std::set<std::uint64_t> seen;
  for (std::uint64_t at = sequence; at != 0 && seen.insert(at).second;) {
    SW_TRY_ASSIGN(const bool there, store.HasTokens(at));
    if (!there) break;
    SW_TRY_ASSIGN(TokenRecord record, store.ReadTokens(at));
    at = record.parent;
    records.push_back(std::move(record));
  }
  if (records.empty()) return std::optional<TokenHistory>();
  SW_TRY_ASSIGN(TokenHistory history, TokenHistory::Make(store.head().experts));
  history.MayMergeTo(oldest);
  for (auto record = records.rbegin(); record != records.rend(); ++record) {
    for (const TokenSum& sum : record->sums) SW_TRY(history.Add(sum.iteration, sum.tokens));
  }
  return std::optional<TokenHistory>(std::move(history));
}

}  // namespace shardwright::partial
