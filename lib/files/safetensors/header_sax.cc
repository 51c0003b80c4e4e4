// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "files/safetensors/header_sax_internal.h"
#include "support/base/limits.h"

namespace shardwright::safetensors {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::uint64_t kMostNumber = (std::uint64_t{1} << 63) - 1;
constexpr std::uint64_t kUnknownDepth = 64;
constexpr std::uint64_t kMetadataBytes = 128;  // of a key with its value, without characters

/// State of the parser: the element that the next event belongs to.
enum class Place : std::uint8_t {
  kStart,
  kTop,       // in the header: names
  kMetadata,  // in __metadata__: keys
  kEntry,     // in an entry: fields
  kShape,     // in its list
  kOffsets,   // in its list
  kUnknown,   // in a field that the format does not have
  kDone,
};

enum class Field : std::uint8_t { kNone, kDtype, kShape, kOffsets, kUnknown };

class Handler final : public nlohmann::json_sax<Json> {
 public:
  Handler(const std::function<Status(RawEntry)>& each, TextBudget* budget)
      : each_(each), budget_(*budget) {}

  Result<RawHeader> Take(bool complete) && {
    if (error_) return tl::unexpected<Error>(std::move(*error_));
    SW_CHECK(complete);
    return std::move(raw_);
  }

  bool null() override {
    if (place_ == Place::kTop && in_metadata_key_) return true;  // null: treated as absent
    return Other();
  }
  bool boolean(bool /*value*/) override { return Other(); }
  bool number_integer(number_integer_t /*value*/) override {
    return place_ == Place::kUnknown || field_ == Field::kUnknown
               ? Other()
               : Wrong("a non-negative number expected");
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return Other();
    if (value > kMostNumber) return Wrong("a number above 2^63 - 1");
    if (place_ == Place::kShape) {
      entry_.shape.push_back(value);
      return entry_.shape.size() <= limits::kTensorRank ||
             Wrong("more than " + std::to_string(limits::kTensorRank) + " dimensions");
    }
    if (offsets_ == 2) return Wrong("two data_offsets expected");
    (offsets_ == 0 ? entry_.first : entry_.last) = value;
    offsets_ += 1;
    return true;
  }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return Other();
    return Wrong("a whole number expected, found " + text.substr(0, 40));
  }
  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      if (!budget_.Take(kMetadataBytes + BlockBytes(key_.size()) + BlockBytes(value.size()))) {
        error_ = budget_.Exceeded("header").value();
        return false;
      }
      raw_.metadata[key_] = value;
      return true;
    }
    if (place_ == Place::kEntry && field_ == Field::kDtype) {
      entry_.dtype = value.substr(0, 40);
      field_ = Field::kNone;
      return true;
    }
    return Other();
  }
  bool binary(binary_t& /*value*/) override { return Other(); }

  bool start_object(std::size_t /*count*/) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
      return true;
    }
    if (place_ == Place::kTop) {
      place_ = in_metadata_key_ ? Place::kMetadata : Place::kEntry;
      return true;
    }
    return Deeper();
  }
  bool end_object() override {
    if (place_ == Place::kUnknown) return Shallower();
    if (place_ == Place::kEntry) return EndEntry();
    place_ = place_ == Place::kMetadata ? Place::kTop : Place::kDone;
    return true;
  }
  bool start_array(std::size_t /*count*/) override {
    if (place_ == Place::kEntry && field_ == Field::kShape) {
      place_ = Place::kShape;
      return true;
    }
    if (place_ == Place::kEntry && field_ == Field::kOffsets) {
      place_ = Place::kOffsets;
      return true;
    }
    return Deeper();
  }
  bool end_array() override {
    if (place_ == Place::kUnknown) return Shallower();
    if (place_ == Place::kOffsets && offsets_ != 2) return Wrong("two data_offsets expected");
    place_ = Place::kEntry;
    field_ = Field::kNone;
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::kUnknown) return true;
    if (value.size() > limits::kNameBytes) {
      return Wrong("a name of " + std::to_string(value.size()) + " bytes is too long",
                   Errc::kLimit);
    }
    if (place_ == Place::kMetadata) {
      if (raw_.metadata.contains(value)) return Wrong("key \"" + value + "\" appears twice");
      key_ = std::move(value);
      return true;
    }
    if (place_ == Place::kTop) return BeginName(std::move(value));
    return BeginField(value);
  }

  bool parse_error(std::size_t byte, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    if (!error_) {
      error_ =
          Error{Errc::kBadInput, "header: invalid JSON at byte " + std::to_string(byte), 0, -1};
    }
    return false;
  }

 private:
  bool BeginName(std::string name) {
    in_metadata_key_ = name == kMetadataKey;
    entry_ = {};
    seen_ = 0;
    offsets_ = 0;
    entry_.name = std::move(name);
    if (!in_metadata_key_) return true;
    if (had_metadata_) return Wrong("appears twice in the header");
    had_metadata_ = true;
    return true;
  }
  bool BeginField(const std::string& name) {
    field_ = name == "dtype"          ? Field::kDtype
             : name == "shape"        ? Field::kShape
             : name == "data_offsets" ? Field::kOffsets
                                      : Field::kUnknown;
    if (field_ == Field::kUnknown) {
      if (raw_.unknown_field.empty()) raw_.unknown_field = "\"" + name + "\"";
      return true;
    }
    const unsigned bit = 1U << static_cast<unsigned>(field_);
    if ((seen_ & bit) != 0) return Wrong("field " + name + " appears twice");
    seen_ |= bit;
    return true;
  }
  bool EndEntry() {
    for (const auto& [field, name] :
         {std::pair{Field::kDtype, "dtype"}, std::pair{Field::kShape, "shape"},
          std::pair{Field::kOffsets, "data_offsets"}}) {
      if ((seen_ & 1U << static_cast<unsigned>(field)) == 0) {
        return Wrong(std::string(name) + " is missing");
      }
    }
    place_ = Place::kTop;
    Status taken = each_(std::move(entry_));
    if (taken) return true;
    error_ = std::move(taken).error();
    return false;
  }
  /// Handles a value of a type that is not allowed here.
  bool Other() {
    if (place_ == Place::kUnknown) return true;
    if (place_ == Place::kEntry && field_ == Field::kUnknown) {
      field_ = Field::kNone;
      return true;
    }
    switch (place_) {
      case Place::kStart:
      case Place::kTop:
        return Wrong("an object expected");
      case Place::kMetadata:
        return Wrong("a text expected for \"" + key_ + "\"");
      case Place::kShape:
      case Place::kOffsets:
        return Wrong("a list of whole numbers expected");
      default:
        return Wrong(field_ == Field::kDtype ? "a text expected for dtype"
                                             : "a list of whole numbers expected");
    }
  }
  bool Deeper() {
    if (place_ == Place::kEntry && field_ == Field::kUnknown) {
      place_ = Place::kUnknown;
      depth_ = 1;
      return true;
    }
    if (place_ != Place::kUnknown) return Other();
    return ++depth_ <= kUnknownDepth ||
           Wrong("more than " + std::to_string(kUnknownDepth) + " levels");
  }
  bool Shallower() {
    if (--depth_ == 0) {
      place_ = Place::kEntry;
      field_ = Field::kNone;
    }
    return true;
  }
  bool Wrong(const std::string& what, Errc code = Errc::kBadInput) {
    const std::string where = place_ == Place::kStart ? "header"
                              : in_metadata_key_      ? std::string(kMetadataKey)
                                                      : "tensor \"" + entry_.name + "\"";
    error_ = Error{code, where + ": " + what, 0, -1};
    return false;
  }

  const std::function<Status(RawEntry)>& each_;
  TextBudget& budget_;
  RawHeader raw_;
  std::optional<Error> error_;
  Place place_ = Place::kStart;
  Field field_ = Field::kNone;
  RawEntry entry_;           // being read
  unsigned seen_ = 0;        // its fields
  unsigned offsets_ = 0;     // its data_offsets
  std::uint64_t depth_ = 0;  // in kUnknown
  std::string key_;          // in kMetadata
  bool in_metadata_key_ = false;
  bool had_metadata_ = false;
};

}  // namespace

Result<RawHeader> ParseRaw(std::string_view text, const std::function<Status(RawEntry)>& each,
                           TextBudget* budget) {
  Handler handler(each, budget);
  const bool complete = Json::sax_parse(text.begin(), text.end(), &handler);
  return std::move(handler).Take(complete);
}

}  // namespace shardwright::safetensors
