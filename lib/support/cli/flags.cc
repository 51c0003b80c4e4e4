// SPDX-License-Identifier: Apache-2.0
#include "support/cli/flags.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include "support/base/bytes.h"
#include "support/base/checked.h"

namespace shardwright::cli {
namespace {

template <class E, std::size_t kCount>
Result<E> ParseWord(std::string_view text,
                    const std::array<std::pair<std::string_view, E>, kCount>& all) {
  std::string words;
  for (const auto& [word, value] : all) {
    if (word == text) return value;
    if (!words.empty()) words += ", ";
    words += word;
  }
  return Fail(Errc::kUsage, "\"", text, "\" is not one of ", words);
}

}  // namespace

Result<std::uint64_t> ParseCount(std::string_view text, std::uint64_t first, std::uint64_t last) {
  const auto count = NumberIn<std::uint64_t>(text);
  if (count && *count >= first && *count <= last) return *count;
  return Fail(Errc::kUsage, "\"", text, "\" is not a whole number from ", first, " to ", last);
}

Result<unsigned> ParseMode(std::string_view text) {
  unsigned mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  const auto fits = [&](unsigned shift) {
    const unsigned rights = (mode >> shift) & 7U;
    return rights == 0 || rights == 4 || rights == 6;
  };
  const bool whole = error == std::errc() && end == text.data() + text.size() && text.size() <= 4;
  if (whole && mode >> 6 == 6 && fits(3) && fits(0)) return mode;
  return Fail(Errc::kUsage, "\"", text,
              "\" is not a mode such as 0600, 0640, 0644 or 0660: 6 for the "
              "owner, then 0, 4 or 6 for the group and for others");
}

unsigned UmaskOf(unsigned mode) {
  const unsigned enter = (mode & 0444U) >> 2;
  return 0777U & ~(mode | enter);
}

std::string RealText(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

Result<double> ParseReal(std::string_view text, double first, double last) {
  const auto value = NumberIn<double>(text);
  if (value && std::isfinite(*value) && *value >= first && *value <= last) return *value;
  return Fail(Errc::kUsage, "\"", text, "\" is not a number from ", RealText(first), " to ",
              RealText(last));
}

Result<std::uint64_t> ParseMemory(std::string_view text) {
  SW_TRY_ASSIGN(const std::uint64_t bytes, ParseBytes(text));
  if (bytes >= kMemoryMinBytes) return bytes;
  return Fail(Errc::kUsage, "\"", text, "\" is ", FormatBytes(bytes), ", at least ",
              FormatBytes(kMemoryMinBytes), " is needed");
}

Result<ProgressMode> ParseProgressMode(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, ProgressMode>, 5> kWords = {{
      {"auto", ProgressMode::kAuto},
      {"tty", ProgressMode::kTty},
      {"plain", ProgressMode::kPlain},
      {"json", ProgressMode::kJson},
      {"off", ProgressMode::kOff},
  }};
  return ParseWord(text, kWords);
}

Result<ColorMode> ParseColorMode(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, ColorMode>, 3> kWords = {{
      {"auto", ColorMode::kAuto},
      {"always", ColorMode::kAlways},
      {"never", ColorMode::kNever},
  }};
  return ParseWord(text, kWords);
}

Result<Verify> ParseVerify(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, Verify>, 4> kWords = {{
      {"none", Verify::kNone},
      {"checksums", Verify::kChecksums},
      {"replicas", Verify::kReplicas},
      {"readback", Verify::kReadback},
  }};
  return ParseWord(text, kWords);
}

}  // namespace shardwright::cli
