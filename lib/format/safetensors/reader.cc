#include "format/safetensors/reader.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "base/checked.h"
#include "base/limits.h"

namespace shardwright::safetensors {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kPrefixBytes = 8;
constexpr std::uint64_t kHeaderBytes = std::uint64_t{100} << 20;  // the format's own cap

constexpr std::pair<std::string_view, DType> kDTypes[] = {
    {"F64", DType::kF64},   {"F32", DType::kF32},        {"F16", DType::kF16},
    {"BF16", DType::kBF16}, {"I64", DType::kI64},        {"I32", DType::kI32},
    {"I16", DType::kI16},   {"I8", DType::kI8},          {"U64", DType::kU64},
    {"U32", DType::kU32},   {"U16", DType::kU16},        {"U8", DType::kU8},
    {"BOOL", DType::kBool}, {"F8_E5M2", DType::kF8E5M2}, {"F8_E4M3", DType::kF8E4M3}};

Result<std::vector<std::uint64_t>> Numbers(const Json* list, const std::string& where) {
  std::vector<std::uint64_t> numbers;
  if (list == nullptr || !list->is_array() || list->size() > limits::kTensorRank) {
    return Fail(Errc::kBadInput, where + ": a list of whole numbers expected");
  }
  for (const Json& value : *list) {
    if (!value.is_number_unsigned()) {
      return Fail(Errc::kBadInput, where + ": a list of whole numbers expected");
    }
    numbers.push_back(value.get<std::uint64_t>());
  }
  return numbers;
}

const Json* Member(const Json& object, const char* name) {
  const auto at = object.find(name);
  return at == object.end() ? nullptr : &*at;
}

Result<Entry> ReadEntry(const std::string& name, const Json& json, std::uint64_t data_first,
                        std::uint64_t data_bytes) {
  const std::string where = "tensor \"" + name + "\"";
  if (!json.is_object()) return Fail(Errc::kBadInput, where + ": an object expected");
  Entry entry;
  entry.name = name;
  const Json* dtype = Member(json, "dtype");
  const auto* const known =
      std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& pair) {
        return dtype != nullptr && dtype->is_string() &&
               dtype->get_ref<const std::string&>() == pair.first;
      });
  if (known == std::end(kDTypes)) {
    return Fail(Errc::kUnsupported,
                where + ": dtype " + (dtype == nullptr ? "is missing" : dtype->dump()));
  }
  entry.dtype = known->second;
  SW_TRY_ASSIGN(entry.shape, Numbers(Member(json, "shape"), where + ": shape"));
  SW_TRY_ASSIGN(const auto range, Numbers(Member(json, "data_offsets"), where + ": data_offsets"));
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(entry.shape));
  SW_TRY_ASSIGN(entry.bytes, CheckedMul(elems, ItemSize(entry.dtype)));
  if (range.size() != 2 || range[0] > range[1] || range[1] > data_bytes ||
      range[1] - range[0] != entry.bytes) {
    return Fail(Errc::kBadInput, where + ": data_offsets do not fit shape " +
                                     ToString(entry.shape) + " in " + std::to_string(data_bytes) +
                                     " bytes");
  }
  entry.offset = data_first + range[0];
  return entry;
}

}  // namespace

Result<std::vector<Entry>> ReadHeader(const os::File& file) {
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  std::array<std::byte, kPrefixBytes> prefix{};
  if (identity.bytes < kPrefixBytes) {
    return Fail(Errc::kBadInput, file.path() + ": no safetensors file: " +
                                     std::to_string(identity.bytes) + " bytes");
  }
  SW_TRY(file.ReadAt(0, prefix));
  std::uint64_t header_bytes = 0;
  for (std::size_t i = kPrefixBytes; i-- > 0;) {
    header_bytes = header_bytes << 8 | std::to_integer<std::uint64_t>(prefix[i]);
  }
  if (header_bytes > identity.bytes - kPrefixBytes || header_bytes > kHeaderBytes) {
    return Fail(Errc::kBadInput, file.path() + ": no safetensors file: header of " +
                                     std::to_string(header_bytes) + " bytes");
  }
  std::string text(header_bytes, '\0');
  SW_TRY(file.ReadAt(kPrefixBytes, std::as_writable_bytes(std::span(text))));
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return Fail(Errc::kBadInput, file.path() + ": header is no JSON object");
  std::vector<Entry> entries;
  const std::uint64_t data_first = kPrefixBytes + header_bytes;
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__") continue;
    auto entry = ReadEntry(name, value, data_first, identity.bytes - data_first);
    if (!entry) return Within(file.path(), entry.error());
    entries.push_back(*std::move(entry));
  }
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  ranges.reserve(entries.size());
  for (const Entry& entry : entries) ranges.emplace_back(entry.offset, entry.offset + entry.bytes);
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) {
      return Fail(Errc::kBadInput,
                  file.path() + ": tensors overlap at byte " + std::to_string(ranges[i].first));
    }
  }
  return entries;
}

}  // namespace shardwright::safetensors
