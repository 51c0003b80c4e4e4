// SPDX-License-Identifier: Apache-2.0
#include "support/os/net/answer.h"

#include <algorithm>
#include <cerrno>
#include <optional>

#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::os {
namespace {

/// Replaces control characters, so that the message fits in one line.
std::string OneLine(std::string text) {
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text.substr(0, kLineBytes - 64);
}

/// Converts an exit code to an error code. An unknown number becomes an internal error.
Errc CodeOf(std::uint64_t number) {
  if (number == static_cast<std::uint64_t>(Errc::kStopped)) return Errc::kStopped;
  const bool known = number >= 1 && number <= static_cast<std::uint64_t>(Errc::kInfeasible);
  return known ? static_cast<Errc>(number) : Errc::kInternal;
}

}  // namespace

std::vector<std::string_view> WordsOf(std::string_view line) {
  std::vector<std::string_view> words;
  while (!line.empty()) {
    const std::size_t space = std::min(line.find(' '), line.size());
    words.push_back(line.substr(0, space));
    line.remove_prefix(std::min(space + 1, line.size()));
  }
  return words;
}

Result<std::uint64_t> ParseNumber(std::string_view word, std::uint64_t most,
                                  const std::string& what) {
  const auto number = NumberIn<std::uint64_t>(word);
  if (!number) {
    return Fail(Errc::kBadInput, what, ": number expected, found ", Quoted(word));
  }
  if (*number > most) {
    return Fail(Errc::kBadInput, what, ": ", *number, " is above ", most);
  }
  return *number;
}

Status SendAnswer(Connection& connection, const Status& status, std::string_view rest) {
  if (status) {
    return connection.Send("ok" + (rest.empty() ? std::string() : " " + std::string(rest)) + "\n");
  }
  return connection.Send("error " + std::to_string(static_cast<int>(status.error().code)) + " " +
                         OneLine(status.error().message) + "\n");
}

Result<std::string> ReceiveAnswer(Connection& connection, std::string_view who) {
  SW_TRY_ASSIGN(const std::optional<std::string> line, connection.ReceiveLine(kLineBytes));
  if (!line) {
    return FailErrno(Errc::kIo, ECONNRESET, connection.name(), ": closed without an answer");
  }
  if (*line == "ok") return std::string();
  if (line->starts_with("ok ")) return line->substr(3);
  if (line->starts_with("error ")) {
    const std::size_t space = line->find(' ', 6);
    const auto code = ParseNumber(std::string_view(*line).substr(6, space - 6), 255, "code");
    if (code && space != std::string::npos) {
      return Fail(CodeOf(*code), connection.name() + ": " + line->substr(space + 1));
    }
  }
  return Fail(Errc::kBadInput, connection.name(), ": unexpected answer from ", who);
}

}  // namespace shardwright::os
