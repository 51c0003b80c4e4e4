// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Functions that format values for messages and answers. All of them are pure.

/// Formats `value` with `digits` digits after the point: "0.500". Not finite: "inf", "nan".
std::string Fixed(double value, int digits);

/// Formats a share in percent: Percent(0.125, 1) returns "12.5 %".
std::string Percent(double share, int digits);

/// Formats a count with its noun: "1 file", "2 files".
std::string Plural(std::uint64_t count, std::string_view noun);

/// Joins `words` with a separator: Joined({"a", "b"}, ", ") returns "a, b".
std::string Joined(std::span<const std::string> words, std::string_view between);

/// Lists the first 8 of some names: "a, b", or "a, ..., h, ... (12 in all)".
std::string FirstFew(const std::vector<std::string>& names);

/// Returns `text` without the white space at both ends.
std::string_view Trimmed(std::string_view text);

/// Returns `text` in double quotes without escaping. The code that prints a message escapes it.
std::string Quoted(std::string_view text);

/// Returns `text` as one word of a POSIX shell, in single quotes if necessary.
std::string ShellWord(std::string_view text);

/// Formats each byte as two lower-case hexadecimal digits.
std::string Hex(std::span<const std::byte> bytes);

}  // namespace shardwright
