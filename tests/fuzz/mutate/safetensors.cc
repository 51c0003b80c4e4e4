// SPDX-License-Identifier: Apache-2.0
// Mutates the header of a safetensors file as JSON, then places the tensors without gaps again.

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "fuzz/mutate/mutate.h"

namespace shardwright::fuzz {
namespace {

using Json = nlohmann::ordered_json;
using std::string_view_literals::operator""sv;

constexpr std::array kTypes = {"F32"sv,  "F16"sv, "BF16"sv,    "F64"sv,     "I8"sv,  "I16"sv,
                               "I32"sv,  "I64"sv, "U8"sv,      "U16"sv,     "U32"sv, "U64"sv,
                               "BOOL"sv, "C64"sv, "F8_E4M3"sv, "F8_E5M2"sv, "F4"sv,  "X"sv};
constexpr std::size_t kMost = 4096;  // payload

std::uint64_t ItemBits(std::string_view type) {
  if (type == "C64") return 64;
  if (type == "F4") return 4;
  if (type == "BOOL" || type.starts_with("F8")) return 8;
  const std::size_t digit = std::min(type.find_first_of("0123456789"), type.size());
  std::uint64_t bits = 8;  // stays if there is no number, or one beyond 64 bits
  (void)std::from_chars(type.data() + digit, type.data() + type.size(), bits);
  return bits;
}

/// Names a tensor of the header; "" where there is none.
std::string Any(const Json& header, Chance& chance) {
  std::vector<std::string> names;
  for (const auto& [name, entry] : header.items()) {
    if (entry.is_object() && entry.contains("shape") && entry["shape"].is_array()) {
      names.push_back(name);
    }
  }
  return names.empty() ? "" : names[chance.Below(names.size())];
}

void Change(Json* header, Chance& chance) {
  const std::string name = Any(*header, chance);
  if (name.empty()) {
    (*header)["t"] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 4}}};
    return;
  }
  Json& entry = (*header)[name];
  Json& shape = entry["shape"];
  switch (chance.Below(9)) {
    case 0:
      entry["dtype"] = kTypes[chance.Below(kTypes.size())];
      break;
    case 1:
      shape.push_back(chance.OneIn(2) ? chance.Odd() : chance.Below(5));
      break;
    case 2:
      if (!shape.empty()) shape[chance.Below(shape.size())] = chance.Odd();
      break;
    case 3:
      shape = Json::array();
      break;
    case 4:
      header->erase(name);
      break;
    case 5:
      (*header)["copy of " + name] = Json(entry);
      break;
    case 6: {
      Json& metadata = (*header)["__metadata__"];
      if (!metadata.is_object()) metadata = Json::object();
      metadata["k" + std::to_string(chance.Below(3))] = chance.OneIn(8) ? Json(1) : Json("text");
      break;
    }
    case 7:
      entry["data_offsets"] = {chance.Odd(), chance.Odd()};
      break;
    default:
      entry[chance.OneIn(2) ? "shape" : "more"] = chance.OneIn(2) ? Json(-1) : Json(nullptr);
      break;
  }
}

/// Places tensors without gaps, in the order of the header. Returns the end of the last.
std::uint64_t Place(Json* header) {
  std::uint64_t end = 0;
  for (auto& [name, entry] : header->items()) {
    if (!entry.is_object() || !entry.contains("shape") || !entry["shape"].is_array()) continue;
    const bool typed = entry.contains("dtype") && entry["dtype"].is_string();
    std::uint64_t bits = typed ? ItemBits(entry["dtype"].get<std::string>()) : 8;
    for (const Json& extent : entry["shape"]) {
      bits *= extent.is_number_unsigned() ? extent.get<std::uint64_t>() : 1;
    }
    entry["data_offsets"] = {end, end + bits / 8};
    end += bits / 8;
  }
  return end;
}

}  // namespace

std::string MutateSafetensors(std::string_view bytes, Chance& chance) {
  if (bytes.size() < 8 || bytes.front() == 'i') return chance.Change(std::string(bytes));
  const std::uint64_t length = Number(bytes.substr(0, 8));
  std::string text(bytes.substr(8, length));
  std::string payload(length < bytes.size() - 8 ? bytes.substr(8 + length) : std::string_view());
  Json header = Json::parse(text, nullptr, false);
  if (header.is_object() && !chance.OneIn(4)) {
    for (std::size_t i = 1 + chance.Below(3); i > 0; --i) Change(&header, chance);
    if (!chance.OneIn(4)) payload.resize(std::min<std::uint64_t>(Place(&header), kMost));
    text = header.dump(-1, ' ', false, Json::error_handler_t::replace);
    if (!chance.OneIn(4)) text.resize((text.size() + 7) / 8 * 8, ' ');
  } else {
    text = chance.Change(std::move(text));
  }
  return Little(chance.OneIn(16) ? chance.Odd() : text.size(), 8) + text + payload;
}

}  // namespace shardwright::fuzz
