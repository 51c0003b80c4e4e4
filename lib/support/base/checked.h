// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "support/base/result.h"

namespace shardwright {

/// Parses a whole text as one number, in the notation of std::from_chars: no white space, no plus
/// sign, no minus sign for unsigned types. Returns nothing for other texts and for numbers that
/// `Number` cannot hold.
/// Pure.
template <class Number>
std::optional<Number> NumberIn(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// Adds two counts that came from a file.
/// \error kBadInput if the sum does not fit in 64 bits
/// Local.
inline Result<std::uint64_t> CheckedAdd(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    return Fail(Errc::kBadInput, a, " + ", b, " overflows 64 bits");
  }
  return sum;
}

/// Multiplies two counts that came from a file.
/// \error kBadInput if the product does not fit in 64 bits
/// Local.
inline Result<std::uint64_t> CheckedMul(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    return Fail(Errc::kBadInput, a, " * ", b, " overflows 64 bits");
  }
  return product;
}

/// Divides `a` by `b` and rounds up. \pre b > 0
constexpr std::uint64_t CeilDiv(std::uint64_t a, std::uint64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Rounds `a` up to a multiple of `b`. \pre b > 0 and the result fits in 64 bits
constexpr std::uint64_t RoundUp(std::uint64_t a, std::uint64_t b) { return CeilDiv(a, b) * b; }

}  // namespace shardwright
