// SPDX-License-Identifier: Apache-2.0
#include "support/os/locks/owner.h"

#include <unistd.h>

#include <charconv>
#include <system_error>

#include "support/base/system.h"

namespace shardwright::os {
namespace {

/// Removes the number at the start of a text and returns it.
std::optional<std::uint64_t> TakeNumber(std::string_view* text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  if (error != std::errc()) return std::nullopt;
  text->remove_prefix(static_cast<std::size_t>(end - text->data()));
  return number;
}

/// Removes a word at the start of a text. Returns false if the text starts differently.
bool TakeWord(std::string_view* text, std::string_view word) {
  if (!text->starts_with(word)) return false;
  text->remove_prefix(word.size());
  return true;
}

}  // namespace

std::optional<LockOwner> ParseOwner(std::string_view text) {
  LockOwner owner;
  if (!TakeWord(&text, kLockFirstWord)) return std::nullopt;
  const std::optional<std::uint64_t> process = TakeNumber(&text);
  const std::size_t line = text.find('\n');
  if (!process || !TakeWord(&text, " on ") || line == std::string_view::npos) return std::nullopt;
  owner.process = *process;
  owner.host = std::string(text.substr(0, text.find(" (")));
  text.remove_prefix(text.find('\n') + 1);
  if (text.empty()) return owner;
  const std::size_t space = text.find(" start ");
  if (!TakeWord(&text, "boot ") || space == std::string_view::npos) return std::nullopt;
  owner.boot = std::string(text.substr(0, text.find(' ')));
  text.remove_prefix(text.find(" start "));
  TakeWord(&text, " start ");
  const std::optional<std::uint64_t> started = TakeNumber(&text);
  if (!started || text != "\n") return std::nullopt;
  owner.started = *started;
  return owner;
}

std::string DescribeOwner(const std::string& note) {
  const auto process = static_cast<std::uint64_t>(::getpid());
  return std::string(kLockFirstWord) + std::to_string(process) + " on " + HostName() + " (" + note +
         ")\nboot " + BootId() + " start " + std::to_string(ProcessStart(process)) + "\n";
}

}  // namespace shardwright::os
