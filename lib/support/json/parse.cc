// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <optional>
#include <utility>

#include "support/base/limits.h"
#include "support/base/memory.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::json {
namespace {

constexpr std::uint64_t kTreeNodeBytes = 4 * sizeof(void*);  // overhead of std::map per member
constexpr std::uint64_t kMemberBytes =
    BlockBytes(kTreeNodeBytes + sizeof(Json::object_t::value_type));
constexpr std::uint64_t kObjectBytes = BlockBytes(sizeof(Json::object_t));
constexpr std::uint64_t kArrayBytes = BlockBytes(sizeof(Json::array_t));
constexpr std::uint64_t kStringBytes = BlockBytes(sizeof(std::string));

/// Returns the bytes that a string's characters take outside of the string object.
std::uint64_t CharBytes(std::size_t size) {
  return size <= std::string().capacity() ? 0 : BlockBytes(size + 1);
}

/// Formats the position of a byte as "line 3, column 17".
std::string PlaceOf(std::string_view text, std::size_t byte) {
  const std::string_view before = text.substr(0, std::min(byte, text.size()));
  const auto lines = std::count(before.begin(), before.end(), '\n');
  const std::size_t start =
      before.rfind('\n') == std::string_view::npos ? 0 : before.rfind('\n') + 1;
  return "line " + std::to_string(lines + 1) + ", column " +
         std::to_string(before.size() - start + 1);
}

/// Describes the word at an error, for the message.
std::string WordAt(std::string_view text, std::size_t byte) {
  constexpr std::string_view kEnds = " \t\r\n,:[]{}";
  if (byte >= text.size()) return "unexpected end of the text";
  std::size_t first = byte;
  while (first > 0 && kEnds.find(text[first - 1]) == std::string_view::npos) --first;
  std::size_t last = std::max(first + 1, std::min(text.find_first_of(kEnds, first), text.size()));
  last = std::min(last, first + 24);
  return "cannot read \"" + std::string(text.substr(first, last - first)) + "\"";
}

/// Finds the bracket that opens one level too many. \pre there is one
std::size_t TooDeepAt(std::string_view text) {
  std::uint64_t depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    if ((c == '[' || c == '{') && ++depth > limits::kMoeJsonDepth) return i;
    if (c == ']' || c == '}') --depth;
  }
  return text.size();
}

/// Builds a tree from a parser's events. Checks memory and depth limits before it allocates.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  enum class Fault : std::uint8_t { kNone, kSyntax, kNumber, kTwice, kDeep, kMemory };

  Builder(std::uint64_t bytes, std::uint64_t most_depth)
      : budget_(bytes), most_depth_(most_depth) {}

  Fault fault() const { return fault_; }
  /// Returns the offset of the byte at which the parser stopped. \pre kSyntax or kNumber
  std::size_t byte() const { return byte_; }
  /// Returns the duplicate key of an object. \pre kTwice
  const std::string& twice() const { return twice_; }
  const TextBudget& budget() const { return budget_; }
  std::uint64_t most_depth() const { return most_depth_; }
  Json Take() && { return std::move(root_); }

  bool null() override { return Add(Json()) != nullptr; }
  bool boolean(bool value) override { return Add(Json(value)) != nullptr; }
  bool number_integer(number_integer_t value) override { return Add(Json(value)) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Add(Json(value)) != nullptr; }
  bool number_float(number_float_t value, const string_t& /*text*/) override {
    return Add(Json(value)) != nullptr;
  }
  bool string(string_t& value) override {
    return Charge(kStringBytes + CharBytes(value.size())) && Add(Json(value)) != nullptr;
  }
  bool binary(binary_t& value) override {
    return Charge(kStringBytes + CharBytes(value.size())) &&
           Add(Json::binary(std::move(value))) != nullptr;
  }
  bool start_object(std::size_t /*count*/) override {
    return CheckDepth() && Charge(kObjectBytes) && Open(Add(Json(Json::value_t::object)));
  }
  bool start_array(std::size_t /*count*/) override {
    return CheckDepth() && Charge(kArrayBytes) && Open(Add(Json(Json::value_t::array)));
  }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& value) override {
    if (!Charge(kMemberBytes + CharBytes(value.size()))) return false;
    auto& object = open_.back()->get_ref<Json::object_t&>();
    const auto [at, is_new] = object.try_emplace(value);
    if (!is_new) {
      twice_ = value;
      return Stop(Fault::kTwice);
    }
    member_ = &at->second;
    return true;
  }
  bool parse_error(std::size_t byte, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    constexpr int kNumberOverflow = 406;
    byte_ = byte > 0 ? byte - 1 : 0;
    return Stop(error.id == kNumberOverflow ? Fault::kNumber : Fault::kSyntax);
  }

 private:
  bool Stop(Fault fault) {
    if (fault_ == Fault::kNone) fault_ = fault;
    return false;
  }
  bool Charge(std::uint64_t bytes) { return budget_.Take(bytes) || Stop(Fault::kMemory); }
  bool CheckDepth() { return open_.size() < most_depth_ || Stop(Fault::kDeep); }
  /// Adds a value to the open container. Returns null if memory would exceed the limit.
  Json* Add(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_object()) {
      *member_ = std::move(value);
      return member_;
    }
    auto& list = open_.back()->get_ref<Json::array_t&>();
    if (list.size() == list.capacity()) {
      const std::size_t more = std::max<std::size_t>(list.capacity(), 1);
      if (!Charge(more * sizeof(Json))) return nullptr;
      list.reserve(list.size() + more);
    }
    return &list.emplace_back(std::move(value));
  }
  bool Open(Json* container) {
    if (container == nullptr) return false;
    open_.push_back(container);
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  TextBudget budget_;
  const std::uint64_t most_depth_;
  Json root_;
  std::vector<Json*> open_;  // containers from the root down; they move only once closed
  Json* member_ = nullptr;   // member of the innermost object, which the next value sets
  Fault fault_ = Fault::kNone;
  std::size_t byte_ = 0;
  std::string twice_;
};

/// Makes the error for the faults that JSON and MessagePack have in common.
tl::unexpected<Error> Refuse(const Builder& builder, const std::string& where) {
  switch (builder.fault()) {
    case Builder::Fault::kTwice:
      return Fail(Errc::kBadInput, where, ": key ", Quoted(builder.twice()), " appears twice");
    case Builder::Fault::kDeep:
      return Fail(Errc::kLimit, where, ": more than ", builder.most_depth(), " levels");
    case Builder::Fault::kMemory:
      return builder.budget().Exceeded(where);
    default:
      return Fail(Errc::kBadInput, where, ": byte ", builder.byte(), ": cannot be read");
  }
}

}  // namespace

Result<Json> Parse(std::string_view text, const std::string& where) {
  // The parser would treat a NUL byte as the end of the text.
  const std::size_t nul = text.find('\0');
  if (nul != std::string_view::npos) {
    return Fail(Errc::kBadInput, where, ": ", PlaceOf(text, nul), ": a NUL byte");
  }
  Builder builder(text.size(), limits::kMoeJsonDepth);
  if (Json::sax_parse(text.begin(), text.end(), &builder)) return std::move(builder).Take();
  const std::size_t byte = builder.byte();
  switch (builder.fault()) {
    case Builder::Fault::kSyntax:
      return Fail(Errc::kBadInput, where, ": ", PlaceOf(text, byte), ": ", WordAt(text, byte));
    case Builder::Fault::kNumber:
      return Fail(Errc::kBadInput, where, ": ", PlaceOf(text, byte), ": a number out of range");
    case Builder::Fault::kDeep:
      return Fail(Errc::kLimit, where, ": ", PlaceOf(text, TooDeepAt(text)), ": more than ",
                  limits::kMoeJsonDepth, " levels");
    default:
      return Refuse(builder, where);
  }
}

Result<Json> ParseMessagePack(std::span<const std::byte> bytes, const std::string& where) {
  Builder builder(bytes.size(), kPackedDepth);
  const auto* const first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  if (Json::sax_parse(first, first + bytes.size(), &builder, Json::input_format_t::msgpack)) {
    return std::move(builder).Take();
  }
  return Refuse(builder, where);
}

}  // namespace shardwright::json
