// SPDX-License-Identifier: Apache-2.0
#include "files/safetensors/index.h"

#include <array>
#include <cstdio>

#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/dir.h"

namespace shardwright::safetensors {

using json::Json;

Result<Index> ParseIndex(std::string_view text, const std::string& where) {
  if (text.size() > limits::kSafetensorsIndexBytes) {
    return Fail(Errc::kLimit, where, ": ", text.size(), " bytes, at most ",
                limits::kSafetensorsIndexBytes);
  }
  SW_TRY_ASSIGN(const Json json, json::Parse(text, where));
  const Json* map = json::Find(json, "weight_map");
  if (map == nullptr || !map->is_object()) {
    return Fail(Errc::kBadInput, where, ": not an index: it has no object weight_map");
  }
  Index index;
  for (const auto& [name, file] : map->items()) {
    const std::string at = where + ": weight_map of " + Quoted(name);
    if (!file.is_string()) {
      return Fail(Errc::kBadInput, at, ": a file name expected, found ", json::KindOf(file));
    }
    const auto& text_of_file = file.get_ref<const std::string&>();
    const Status safe = os::SafeName(text_of_file);
    if (!safe) return Within(at, safe.error());
    index.files.emplace(name, text_of_file);
  }
  const Json* metadata = json::Find(json, "metadata");
  const Json* total = metadata == nullptr ? nullptr : json::Find(*metadata, "total_size");
  // Some writers store a real number, or omit it: ignored.
  if (total != nullptr && total->is_number_unsigned())
    index.total_bytes = total->get<std::uint64_t>();
  return index;
}

std::string IndexText(const Index& index) {
  std::string text = "{\n  \"metadata\": {";
  if (index.total_bytes)
    text += "\n    \"total_size\": " + std::to_string(*index.total_bytes) + "\n  ";
  text += "},\n  \"weight_map\": {";
  bool first = true;
  for (const auto& [name, file] : index.files) {
    text += first ? "\n    " : ",\n    ";
    first = false;
    json::AppendString(&text, name);
    text += ": ";
    json::AppendString(&text, file);
  }
  text += "\n  }\n}\n";
  return text;
}

std::string FileName(std::uint64_t file, std::uint64_t files) {
  if (files == 1) return "model" + std::string(kSuffix);
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05llu-of-%05llu",
                static_cast<unsigned long long>(file) + 1, static_cast<unsigned long long>(files));
  return name.data() + std::string(kSuffix);
}

}  // namespace shardwright::safetensors
