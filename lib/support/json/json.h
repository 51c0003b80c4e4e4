// SPDX-License-Identifier: Apache-2.0
// lib/support/json: parses JSON and MessagePack from files and sockets.
// Only these functions of the project parse such texts. They limit memory and nesting before
// they allocate, run in linear time, and reject objects with duplicate keys. The Append
// functions write strings and numbers that parse back to the same values.

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
/// \param where  prefix of every message: the file or the peer, and the line if it has several
/// \error kLimit  more than limits::kMoeJsonDepth levels, or a tree that takes more memory
///        than TextMemory() (support/base/memory.h) and eight times the text, found before
///        the memory is allocated; kBadInput  not JSON (names line and column), a NUL byte,
///        a number out of range, or an object with a duplicate key
/// Pure. Linear time. Object members are sorted by key.
Result<Json> Parse(std::string_view text, const std::string& where);

/// Maximum depth for ParseMessagePack. Each level of a Python value takes three levels.
inline constexpr std::uint64_t kPackedDepth = 256;

/// Parses one MessagePack value that fills `bytes`, at most kPackedDepth levels deep.
/// \error as Parse; the message names the byte offset
/// Pure.
Result<Json> ParseMessagePack(std::span<const std::byte> bytes, const std::string& where);

/// Returns the member `name` of an object, null if it is absent.
const Json* Find(const Json& object, const char* name);

/// Reads a whole number in [first, last]. \error kBadInput
Result<std::uint64_t> WholeOf(const Json& value, std::uint64_t first, std::uint64_t last,
                              const std::string& where);

/// Returns the kind of a value for messages: "a list", "a number".
std::string KindOf(const Json& value);

/// Appends a text as a JSON string. Bytes that are not UTF-8 become U+FFFD.
void AppendString(std::string* out, std::string_view text);
/// Appends the shortest decimal that parses back to the same number. \pre finite
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
