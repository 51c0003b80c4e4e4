// SPDX-License-Identifier: Apache-2.0
// Reads logs of token counts with one JSON object per line, as programs append them.

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "token_counts/trace_internal.h"

namespace shardwright::token_counts {
namespace {

/// Handles logs of restarted runs. If a training log repeats an iteration or returns to a smaller
/// one, training has resumed there: drops the earlier records from that iteration on. If a serving
/// engine restarts, it counts its steps from the beginning: renumbers them to follow the earlier
/// ones.
class Restarts {
 public:
  /// Checks the newest record of the trace. \param place place of its line
  void Added(const std::string& place, TokenTrace* trace) {
    std::vector<TokenTrace::Record>& records = trace->records;
    if (trace->serving) return Renumber(place, trace);
    const std::uint64_t iteration = records.back().iteration;
    newest_ = iteration;
    if (!seen_.insert(iteration).second) {
      TokenTrace::Record newest = std::move(records.back());
      records.pop_back();
      std::erase_if(records, [&](const auto& one) { return one.iteration >= iteration; });
      records.push_back(std::move(newest));
      std::erase_if(order_, [&](const LogEntry& one) {
        if (one.iteration < iteration) return false;
        seen_.erase(one.iteration);
        return true;
      });
      seen_.insert(iteration);
      WarnOfRestart(trace, place, iteration, "occurs again");
    }
    order_.push_back({iteration, place});
  }

  /// Drops the records of abandoned runs, after the last line.
  void Finish(TokenTrace* trace) const {
    const std::set<std::uint64_t> abandoned = AbandonedIn(order_, trace);
    std::erase_if(trace->records,
                  [&](const auto& one) { return abandoned.contains(one.iteration); });
  }

  /// Returns the iteration of the last line, for servers their own number; nullopt at first.
  std::optional<std::uint64_t> newest() const { return newest_; }

 private:
  void Renumber(const std::string& place, TokenTrace* trace) {
    std::uint64_t& iteration = trace->records.back().iteration;
    const std::uint64_t step = iteration;
    iteration += offset_;
    if (trace->records.size() > 1 && newest_ && step <= *newest_) {
      const std::uint64_t next = trace->records[trace->records.size() - 2].iteration + 1;
      offset_ += next - std::min(next, iteration);
      iteration = std::max(next, iteration);
      trace->warnings.push_back(StrCat(place, ": step ", step, " after step ", *newest_,
                                       ", as after a restart of the server: it counts as step ",
                                       iteration));
    }
    newest_ = step;
  }

  std::unordered_set<std::uint64_t> seen_;
  std::vector<LogEntry> order_;          // of the records that are not abandoned
  std::uint64_t offset_ = 0;             // added to a server's steps
  std::optional<std::uint64_t> newest_;  // of a server: its own number
};

/// Returns whether a line starts an object without ending it, as a killed writer leaves it.
bool IsCutShort(std::string_view line) {
  line = Trimmed(line);
  if (!line.starts_with('{')) return false;
  std::int64_t depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
  }
  return in_string || depth > 0;
}

/// Returns whether the object of a line has an iteration. Otherwise its position defines it.
bool SaysIteration(const Json& object) {
  return object.contains("iteration") || object.contains("step");
}

/// Finds the object that a new run has appended to a truncated line.
std::optional<Json> AppendedObject(std::string_view line) {
  constexpr int kTries = 16;
  std::size_t at = line.find('{', 1);
  for (int i = 0; i < kTries && at != std::string_view::npos; ++i, at = line.find('{', at + 1)) {
    Result<Json> object = json::Parse(line.substr(at), "line");
    if (object && object->is_object() && SaysIteration(*object)) return *std::move(object);
  }
  return std::nullopt;
}

/// Reads the lines of a log in parts.
class LogLines {
 public:
  /// \param begin  as AddLines
  LogLines(const std::string& where, std::optional<std::uint64_t> begin, TokenTrace* trace)
      : where_(where), by_byte_(begin.has_value()), next_(begin.value_or(0)), trace_(trace) {
    trace->format = "jsonl";
  }

  /// Appends a record for each line of a part.
  /// \param ends  true for the last part
  /// \pre every part except the last ends with a line break
  Status Add(std::string_view text, bool ends) {
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      const bool last = ends && line.size() == text.size();  // has no line break
      text.remove_prefix(std::min(text.size(), line.size() + 1));
      SW_TRY(AddLine(line, last));
      if (trace_->torn) break;
    }
    if (!ends) return {};
    if (torn_) return tl::unexpected<Error>(torn_->error);
    restarts_.Finish(trace_);
    return {};
  }

 private:
  /// A truncated line that is not the last one.
  struct TornLine {
    std::string place;
    Error error;
  };

  Status AddLine(std::string_view line, bool last) {
    const std::uint64_t at = next_;
    next_ += line.size() + 1;
    ++number_;
    const std::string place = where_ + (by_byte_ ? ": line at byte " + std::to_string(at)
                                                 : ":" + std::to_string(number_));
    // A power loss may leave zero bytes.
    const bool zeros = line.find('\0') != std::string_view::npos;
    if (last) line = line.substr(0, line.find_last_not_of('\0') + 1);
    if (Trimmed(line).empty()) {
      if (zeros) WarnOfTornLine(trace_, place);
      return {};
    }
    Result<Json> object = json::Parse(line, place);
    if (!object && (zeros || IsCutShort(line)) && !torn_) {
      if (last) {
        WarnOfTornLine(trace_, place);
        return {};
      }
      torn_ = TornLine{place, object.error()};
      std::optional<Json> appended = AppendedObject(line);
      if (!appended) return {};
      object = *std::move(appended);
    }
    if (!object) return tl::unexpected<Error>(torn_ ? torn_->error : object.error());
    if (!object->is_object()) {
      return Fail(Errc::kBadInput, place, ": an object expected, found ", json::KindOf(*object));
    }
    if (torn_) SW_TRY(SkipTornLine(*object));
    const std::uint64_t records = trace_->first_sums + trace_->records.size();
    SW_TRY(AddObject(*object, place, trace_));
    const bool added = trace_->first_sums + trace_->records.size() == records + 1;
    if (added && SaysIteration(*object)) restarts_.Added(place, trace_);
    return {};
  }

  /// Ignores a truncated line, if a new run follows it. Anywhere else it is damage.
  /// \param next  the object after it
  Status SkipTornLine(const Json& next) {
    const std::optional<std::uint64_t> before = restarts_.newest();
    const auto iteration = FirstIteration(next, *trace_, torn_->place);
    if (!before || !SaysIteration(next) || !iteration || *iteration > *before) {
      return tl::unexpected<Error>(torn_->error);
    }
    trace_->warnings.push_back(torn_->place +
                               ": the line is truncated, as before a restart, and is ignored");
    torn_.reset();
    return {};
  }

  const std::string& where_;
  bool by_byte_;
  std::uint64_t next_;  // offset in bytes
  TokenTrace* trace_;
  std::uint64_t number_ = 0;
  std::optional<TornLine> torn_;  // the next object shows whether it may be ignored
  Restarts restarts_;
};

}  // namespace

bool IsLog(std::string_view text) {
  const std::string_view body = Trimmed(text);
  return body.starts_with('{') && Trimmed(body.substr(0, body.find('\n'))).ends_with('}');
}

Status AddLines(std::string_view text, const std::string& where, std::optional<std::uint64_t> begin,
                TokenTrace* trace) {
  return LogLines(where, begin, trace).Add(text, true);
}

Result<TokenTrace> ReadLongLog(const os::File& file, std::uint64_t bytes) {
  constexpr std::uint64_t kBlock = std::uint64_t{16} << 20;
  const std::string& where = file.path();
  TokenTrace trace;
  LogLines lines(where, std::nullopt, &trace);
  std::string text;  // not added yet
  bool first = true;
  for (std::uint64_t at = 0; at < bytes;) {
    const std::size_t kept = text.size();
    const std::uint64_t block = std::min(kBlock, bytes - at);
    if (kept + block > limits::kJsonBytes) {
      return Fail(Errc::kLimit, where, ": a line of more than ",
                  FormatBytes(limits::kJsonBytes - kBlock),
                  ": longer files must have one JSON object per line");
    }
    text.resize(kept + block);
    SW_TRY(file.ReadAt(at, std::as_writable_bytes(std::span(text).subspan(kept))));
    if (at == 0 && text.starts_with(kByteOrderMark)) text.erase(0, kByteOrderMark.size());
    at += block;
    const bool ends = at == bytes;
    const std::size_t whole = ends ? text.size() : text.rfind('\n') + 1;
    if (whole == 0) continue;
    if (first && !IsLog(text)) {
      return Fail(Errc::kLimit, where, ": ", FormatBytes(bytes), " of text, at most ",
                  FormatBytes(limits::kJsonBytes),
                  ": longer files must have one JSON object per line");
    }
    first = false;
    SW_TRY(lines.Add(std::string_view(text).substr(0, whole), ends));
    text.erase(0, whole);
  }
  SW_TRY(Finish(&trace, where));
  trace.bytes_read = bytes;
  trace.files_read = 1;
  return trace;
}

}  // namespace shardwright::token_counts
