// SPDX-License-Identifier: Apache-2.0
#include "support/base/bytes.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <optional>
#include <utility>

namespace shardwright {
namespace {

__extension__ using Wide = unsigned __int128;

/// Maximum number of digits after the point. A fraction with so many digits, times
/// the largest unit, fits in 128 bits.
constexpr std::size_t kFractionDigits = 18;

constexpr bool IsDigit(char c) { return c >= '0' && c <= '9'; }

/// Returns the bytes of a unit, nullopt if the text is not a unit.
std::optional<std::uint64_t> FactorOf(std::string_view unit) {
  constexpr std::uint64_t kKi = 1024;
  constexpr std::uint64_t kK = 1000;
  constexpr std::array<std::pair<std::string_view, std::uint64_t>, 14> kUnits = {{
      {"", 1},
      {"B", 1},
      {"K", kK},
      {"KB", kK},
      {"KiB", kKi},
      {"M", kK * kK},
      {"MB", kK * kK},
      {"MiB", kKi * kKi},
      {"G", kK * kK * kK},
      {"GB", kK * kK * kK},
      {"GiB", kKi * kKi * kKi},
      {"T", kK * kK * kK * kK},
      {"TB", kK * kK * kK * kK},
      {"TiB", kKi * kKi * kKi * kKi},
  }};
  for (const auto& [name, factor] : kUnits) {
    if (unit == name) return factor;
  }
  return std::nullopt;
}

/// Removes the digits at the start of `text` and returns them.
std::string_view TakeDigits(std::string_view* text) {
  std::size_t count = 0;
  while (count < text->size() && IsDigit((*text)[count])) ++count;
  const std::string_view digits = text->substr(0, count);
  text->remove_prefix(count);
  return digits;
}

/// Names a kind of amount in messages.
struct Kind {
  std::string_view name;      ///< "a size"
  std::string_view examples;  ///< "256MiB, 12.5GB, 1048576"
};

/// Parses an amount of bytes. \param text the whole argument; \param amount its part without "/s"
Result<std::uint64_t> ParseAmount(std::string_view text, std::string_view amount,
                                  const Kind& kind) {
  const auto bad = [&](const std::string& why) {
    return Fail(Errc::kUsage, "\"", text, "\" is not ", kind.name, why,
                " (examples: ", kind.examples, ")");
  };
  const auto too_large = [&] {
    return Fail(Errc::kUsage, "\"", text, "\" does not fit in 64 bits");
  };
  std::string_view unit = amount;
  const std::string_view whole = TakeDigits(&unit);
  if (whole.empty()) return bad("");
  std::string_view fraction;
  if (unit.starts_with('.')) {
    unit.remove_prefix(1);
    fraction = TakeDigits(&unit);
    if (fraction.empty()) return bad(": digits must follow the point");
  }
  if (fraction.size() > kFractionDigits) {
    return bad(": more than " + std::to_string(kFractionDigits) + " digits after the point");
  }
  const std::optional<std::uint64_t> factor = FactorOf(unit);
  if (!factor) return bad(": unknown unit \"" + std::string(unit) + "\"");

  std::uint64_t count = 0;
  if (std::from_chars(whole.data(), whole.data() + whole.size(), count).ec != std::errc()) {
    return too_large();
  }
  std::uint64_t part = 0;
  std::uint64_t scale = 1;
  for (const char digit : fraction) {
    part = part * 10 + static_cast<std::uint64_t>(digit - '0');
    scale *= 10;
  }
  if (*factor == 1 && part != 0) return bad(": it is not a whole number of bytes");
  const Wide bytes = Wide{count} * *factor + (Wide{part} * *factor + scale / 2) / scale;
  if (bytes > Wide{~std::uint64_t{0}}) return too_large();
  return static_cast<std::uint64_t>(bytes);
}

}  // namespace

Result<std::uint64_t> ParseBytes(std::string_view text) {
  return ParseAmount(text, text, {"a size", "256MiB, 12.5GB, 1048576"});
}

Result<std::uint64_t> ParseBandwidth(std::string_view text) {
  std::string_view amount = text;
  if (amount.ends_with("/s")) amount.remove_suffix(2);
  return ParseAmount(text, amount,
                     {"a bandwidth in bytes per second", "12.5GB/s, 500MiB/s, 1048576"});
}

std::string FormatBytes(std::uint64_t bytes) {
  constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text,
                value < 10    ? "%.2f %s"
                : value < 100 ? "%.1f %s"
                              : "%.0f %s",
                value, kUnits[unit]);
  return text;
}

}  // namespace shardwright
