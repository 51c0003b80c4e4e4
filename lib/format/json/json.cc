#include "format/json/json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <utility>

#include "base/limits.h"

namespace shardwright::json {
namespace {

/// "line 3, column 17" of a byte.
std::string PlaceOf(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const std::size_t start =
      before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return "line " + std::to_string(lines + 1) + ", column " +
         std::to_string(before.size() - start + 1);
}

/// Counts what a parse would allocate, without allocating.
Status CheckSize(std::string_view text, const std::string& where) {
  std::uint64_t values = 1;
  std::uint64_t depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    if (c == '"') in_string = true;
    values += c == ',' || c == '[' || c == '{' ? 1 : 0;
    if ((c == '[' || c == '{') && ++depth > limits::kMoeJsonDepth) {
      return Fail(Errc::kLimit, where + ": " + PlaceOf(text, i) + ": more than " +
                                    std::to_string(limits::kMoeJsonDepth) + " levels");
    }
    if ((c == ']' || c == '}') && depth > 0) --depth;
  }
  if (values > limits::kMoeJsonValues) {
    return Fail(Errc::kLimit,
                where + ": more than " + std::to_string(limits::kMoeJsonValues) + " values");
  }
  return {};
}

/// What stands at the place of an error, for the message.
std::string WordAt(std::string_view text, std::size_t byte) {
  constexpr std::string_view kEnds = " \t\r\n,:[]{}";
  if (byte >= text.size()) return "the text ends";
  std::size_t first = byte;
  while (first > 0 && kEnds.find(text[first - 1]) == std::string_view::npos) --first;
  std::size_t last = std::max(first + 1, std::min(text.find_first_of(kEnds, first), text.size()));
  last = std::min(last, first + 24);
  return "cannot read \"" + std::string(text.substr(first, last - first)) + "\"";
}

}  // namespace

Result<Json> Parse(std::string_view text, const std::string& where) {
  SW_TRY(CheckSize(text, where));
  std::vector<std::set<std::string>> keys;
  std::string twice;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && twice.empty()) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return true;
  };
  try {
    // Watching costs more than parsing; a text without objects has no keys.
    const bool has_keys = text.find('{') != std::string_view::npos;
    Json json = Json::parse(text, has_keys ? watch : Json::parser_callback_t());
    if (!twice.empty()) return Fail(Errc::kBadInput, where + ": key \"" + twice + "\" twice");
    return json;
  } catch (const Json::parse_error& error) {
    const std::size_t byte = error.byte > 0 ? error.byte - 1 : 0;
    return Fail(Errc::kBadInput, where + ": " + PlaceOf(text, byte) + ": " + WordAt(text, byte));
  } catch (const Json::exception& error) {
    return Fail(Errc::kBadInput, where + ": " + error.what());
  }
}

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
  return Fail(Errc::kBadInput, where + ": a whole number from " + std::to_string(first) + " to " +
                                   std::to_string(last) + " expected, found " +
                                   (value.is_number() ? value.dump() : KindOf(value)));
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
