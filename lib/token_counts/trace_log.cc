// SPDX-License-Identifier: Apache-2.0
// Reads the end of a log to which a trainer appends in every iteration.

#include <algorithm>
#include <utility>

#include "support/base/limits.h"
#include "support/os/file.h"
#include "token_counts/trace_internal.h"

namespace shardwright::token_counts {
namespace {

constexpr std::uint64_t kFirstBlock = std::uint64_t{256} << 10;  // bytes

/// Returns the iteration of a line in our own format, nullopt for other lines.
std::optional<std::uint64_t> IterationOf(std::string_view line) {
  const Result<Json> object = json::Parse(line, "line");
  if (!object || !object->is_object() || !object->contains("tokens")) return std::nullopt;
  const Json* iteration = json::Find(*object, "iteration");
  if (iteration == nullptr || !iteration->is_number_unsigned()) return std::nullopt;
  return iteration->get<std::uint64_t>();
}

/// Finds the first complete line in a text that starts anywhere in a file. Returns its
/// offset and length, nullopt if there is none.
std::optional<std::pair<std::size_t, std::size_t>> FirstLine(std::string_view text) {
  const std::size_t begin = text.find('\n') + 1;
  if (begin == 0) return std::nullopt;
  const std::size_t end = text.find('\n', begin);
  if (end == std::string_view::npos) return std::nullopt;
  return std::pair(begin, end - begin);
}

/// Returns whether records are in ascending order and have every iteration from `after` on.
/// If not, the missing iterations could be earlier in the file.
bool HasEach(const std::vector<TokenTrace::Record>& records, std::uint64_t after) {
  for (std::size_t i = 1; i < records.size(); ++i) {
    const std::uint64_t one = records[i - 1].iteration;
    const std::uint64_t next = records[i].iteration;
    if (next <= one || (next > after && next != std::max(one, after) + 1)) return false;
  }
  return true;
}

}  // namespace

Result<std::optional<TokenTrace>> ReadLogEnd(const std::string& path, std::uint64_t after) {
  const std::optional<TokenTrace> whole;  // nothing
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  std::string text;
  std::uint64_t begin = identity.bytes;
  while (true) {
    // Doubles the block each time, so that every byte is copied and parsed only a few times.
    const std::uint64_t block = std::max<std::uint64_t>(kFirstBlock, text.size());
    if (begin <= block || text.size() + block > limits::kJsonBytes) return whole;
    begin -= block;
    std::string more(block, '\0');
    SW_TRY(file.ReadAt(begin, std::as_writable_bytes(std::span(more))));
    text.insert(0, more);
    const auto line = FirstLine(text);
    if (!line) continue;
    const auto iteration = IterationOf(std::string_view(text).substr(line->first, line->second));
    if (!iteration) return whole;
    if (*iteration > after) continue;
    begin += line->first;
    text.erase(0, line->first);
    break;
  }
  TokenTrace trace;
  SW_TRY(AddLines(text, path, begin, &trace));
  if (trace.format != "jsonl" || !HasEach(trace.records, after)) return whole;
  SW_TRY(Finish(&trace, path));
  trace.bytes_read = text.size();
  trace.files_read = 1;
  return std::optional(std::move(trace));
}

}  // namespace shardwright::token_counts
