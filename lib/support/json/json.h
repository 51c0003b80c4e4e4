// SPDX-License-Identifier: Apache-2.0
// lib/support/json: JSON and MessagePack from outside: out of files and sockets.
// These are the only functions of the project that parse such a text. They count memory and levels
// before they take them, need time in proportion to the text, and refuse a key that an object has
// twice. The Append functions write texts and numbers that read back as the same ones.

#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"

namespace shardwright::json {

using Json = nlohmann::json;

/// Parses one JSON text from outside.
/// \param where  starts every message: the file or the peer, and the line where there are several
/// \error kLimit  more than limits::kMoeJsonDepth levels, or a tree that takes more memory than
///        TextMemory() (support/base/memory.h) and eight times the text; found before the memory is
///        taken. kBadInput  not JSON (names line and column), a NUL byte, a number out of range, or
///        an object that has a key twice
/// Pure. Time in proportion to the text; object members are sorted by key.
Result<Json> Parse(std::string_view text, const std::string& where);

/// Levels that ParseMessagePack reads: Python values take three for each level of theirs.
inline constexpr std::uint64_t kPackedDepth = 256;

/// Parses one MessagePack value that fills `bytes`, of at most kPackedDepth levels.
/// \error as Parse; the message names the byte
/// Pure.
Result<Json> ParseMessagePack(std::span<const std::byte> bytes, const std::string& where);

/// The member `name` of an object, null if absent.
const Json* Find(const Json& object, const char* name);

/// A whole number in [first, last]. \error kBadInput
Result<std::uint64_t> WholeOf(const Json& value, std::uint64_t first, std::uint64_t last,
                              const std::string& where);

/// "a list", "a number"; for messages.
std::string KindOf(const Json& value);

/// Appends a text as a JSON string. Bytes that are not UTF-8 become U+FFFD.
void AppendString(std::string* out, std::string_view text);
/// Appends the shortest decimal that reads back as this number. \pre finite
void AppendReal(std::string* out, double value);
/// Appends "[1,2,3]".
template <class Range>
void AppendNumbers(std::string* out, const Range& numbers) {
  *out += '[';
  bool first = true;
  for (const auto number : numbers) {
    if (!first) *out += ',';
    first = false;
    *out += std::to_string(number);
  }
  *out += ']';
}

}  // namespace shardwright::json
