// SPDX-License-Identifier: Apache-2.0
#include "token_counts/trim_log.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>

#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::token_counts {
namespace {

constexpr std::uint64_t kBlock = std::uint64_t{1} << 20;  // bytes

/// End of a log after trimming.
struct End {
  std::uint64_t bytes = 0;
  bool lacks_line_end = false;  ///< the last remaining line has no line break
};

std::optional<std::uint64_t> RecordOf(std::string_view line) {
  const Result<json::Json> object = json::Parse(line, "line");
  const json::Json* iteration = object ? json::Find(*object, "iteration") : nullptr;
  if (iteration == nullptr || !iteration->is_number_unsigned()) return std::nullopt;
  return iteration->get<std::uint64_t>();
}

/// Reads a log line by line to find the end after trimming.
class Finder {
 public:
  Finder(const os::File& file, std::uint64_t last) : file_(file), last_(last) {}

  Result<End> Find() {
    SW_TRY_ASSIGN(const os::Identity identity, file_.Stat());
    std::string text;  // from the beginning of a line
    for (std::uint64_t at = 0; at < identity.bytes;) {
      const std::uint64_t bytes = std::min(kBlock, identity.bytes - at);
      const std::size_t before = text.size();
      text.resize(before + bytes);
      SW_TRY(file_.ReadAt(at, std::as_writable_bytes(std::span(text)).subspan(before)));
      at += bytes;
      std::size_t begin = 0;
      for (std::size_t end = text.find('\n', before); end != std::string::npos;
           end = text.find('\n', begin)) {
        SW_TRY(Add(std::string_view(text).substr(begin, end - begin)));
        begin = end + 1;
      }
      text.erase(0, begin);
      if (text.size() > limits::kJsonBytes) {
        return Fail(Errc::kLimit, file_.path(), ": line ", line_ + 1, ": more than ",
                    limits::kJsonBytes, " bytes");
      }
    }
    // The last line only lacks its line break, or is truncated.
    const std::optional<std::uint64_t> iteration = RecordOf(text);
    if (iteration && *iteration <= last_) end_ = {at_ + text.size(), true};
    return end_;
  }

 private:
  Status Add(std::string_view line) {
    ++line_;
    at_ += line.size() + 1;
    if (Trimmed(line).empty()) return {};
    const std::optional<std::uint64_t> iteration = RecordOf(line);
    if (!iteration) {
      constexpr std::size_t kShown = 60;
      return Fail(Errc::kBadInput, file_.path(), ": line ", line_,
                  ": not a JSON object with an iteration: ", line.substr(0, kShown));
    }
    if (*iteration <= last_) end_ = {at_, false};
    return {};
  }

  const os::File& file_;
  const std::uint64_t last_;
  std::uint64_t line_ = 0;
  std::uint64_t at_ = 0;  // offset of the first byte after that line
  End end_;
};

}  // namespace

Status CheckLog(const std::string& path) {
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (!there) return {};
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  SW_TRY(Finder(file, 0).Find());
  return {};
}

Status TrimLog(const std::string& path, std::uint64_t last) {
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (!there) return {};
  SW_TRY_ASSIGN(const os::File file, os::File::OpenWrite(path));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  SW_TRY_ASSIGN(const End end, Finder(file, last).Find());
  if (end.bytes == identity.bytes && !end.lacks_line_end) return {};
  SW_TRY(file.Allocate(end.bytes));
  if (end.lacks_line_end) {
    SW_TRY(file.WriteAt(end.bytes, std::as_bytes(std::span(std::string_view("\n")))));
  }
  return file.Sync();
}

}  // namespace shardwright::token_counts
