// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Small texts out of values, for messages and answers. All of it is pure.

/// `value` with so many digits after the point: "0.500". Not finite: "inf", "nan".
std::string Fixed(double value, int digits);

/// A share in percent: Percent(0.125, 1) is "12.5 %".
std::string Percent(double share, int digits);

/// "1 file", "2 files".
std::string Plural(std::uint64_t count, std::string_view noun);

/// `words` with `between` between each two: Joined({"a", "b"}, ", ") is "a, b".
std::string Joined(std::span<const std::string> words, std::string_view between);

/// The first 8 of some names: "a, b", or "a, ..., h, ... (12 in all)".
std::string FirstFew(const std::vector<std::string>& names);

/// `text` without the white space at both ends.
std::string_view Trimmed(std::string_view text);

/// `text` in double quotes, as it is: whoever prints a message escapes it.
std::string Quoted(std::string_view text);

/// Returns `text` as one word of a POSIX shell, in single quotes if necessary.
std::string ShellWord(std::string_view text);

/// Two lower-case hexadecimal digits for each byte.
std::string Hex(std::span<const std::byte> bytes);

}  // namespace shardwright
