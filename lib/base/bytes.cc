#include "base/bytes.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <utility>

#include "base/checked.h"

namespace shardwright {

Result<std::uint64_t> ParseBytes(std::string_view text) {
  std::uint64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  const std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  const auto bad = [&] {
    return Fail(Errc::kUsage,
                "\"" + std::string(text) + "\" is not a size (examples: 256MiB, 4G, 1048576)");
  };
  if (error != std::errc()) return bad();
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
    if (unit != name) continue;
    if (auto bytes = CheckedMul(count, factor)) return *bytes;
    return Fail(Errc::kUsage, "\"" + std::string(text) + "\" does not fit in 64 bits");
  }
  return bad();
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
