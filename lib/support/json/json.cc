// SPDX-License-Identifier: Apache-2.0
#include "support/json/json.h"

#include <array>
#include <charconv>

namespace shardwright::json {

const Json* Find(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto at = object.find(name);
  return at == object.end() ? nullptr : &*at;
}

Result<std::uint64_t> WholeOf(const Json& value, std::uint64_t first, std::uint64_t last,
                              const std::string& where) {
  const bool negative =
      value.is_number_integer() && !value.is_number_unsigned() && value.get<std::int64_t>() < 0;
  if (value.is_number_integer() && !negative) {
    const auto number = value.get<std::uint64_t>();
    if (number >= first && number <= last) return number;
  }
  return Fail(Errc::kBadInput, where, ": a whole number from ", first, " to ", last,
              " expected, found ", (value.is_number() ? value.dump() : KindOf(value)));
}

std::string KindOf(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return "a text";
    case Json::value_t::boolean:
      return "a truth value";
    default:
      return "a number";
  }
}

void AppendString(std::string* out, std::string_view text) {
  *out += Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

void AppendReal(std::string* out, double value) {
  std::array<char, 40> buffer{};
  const auto [end, error] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  SW_CHECK(error == std::errc());
  out->append(buffer.data(), end);
}

}  // namespace shardwright::json
