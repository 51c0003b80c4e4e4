// lib/format/json: JSON out of files that nobody vouches for.
// Parse counts values and levels before memory is taken for them, and refuses a key that comes
// twice. The Append functions write texts and numbers that read back as the same ones.

#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace shardwright::json {

using Json = nlohmann::json;

/// Parses one JSON text out of an untrusted file.
/// \param where  starts every message: the file, or the file and the line
/// \error kLimit  more values or levels than limits allow, told before anything is allocated;
///        kBadInput  not JSON (line and column named), or an object that has a key twice
Result<Json> Parse(std::string_view text, const std::string& where);

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
