// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/safetensors/safetensors.h"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "files/safetensors/header.h"
#include "files/safetensors/index.h"
#include "support/base/bytes.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints::safetensors {
namespace {

namespace file_format = shardwright::safetensors;

constexpr std::uint64_t kShardBytes = 5'000'000'000;

Result<DType> DTypeOf(std::string_view key, std::string_view value) {
  const auto dtype = DTypeFromName(value);
  if (dtype && IsFloating(*dtype) && !file_format::Word(*dtype).empty()) return *dtype;
  return Fail(Errc::kUsage, "target ", key, "=", value,
              ": a floating type expected, such as float32, bfloat16, float16 or "
              "float8_e4m3fn");
}

Result<std::uint64_t> ShardBytesOf(std::string_view key, std::string_view value) {
  const std::string where = "target " + std::string(key) + "=" + std::string(value);
  const auto bytes = ParseBytes(value);
  if (!bytes) return Fail(Errc::kUsage, where, ": ", bytes.error().message);
  if (*bytes > 0) return *bytes;
  return Fail(Errc::kUsage, where, ": a size above 0 expected, such as 5GB or 512MiB");
}

Result<std::uint64_t> AlphaOf(std::string_view key, std::string_view value) {
  const std::uint64_t alpha = NumberIn<std::uint64_t>(value).value_or(0);
  if (alpha > 0) return alpha;
  return Fail(Errc::kUsage, "target ", key, "=", value, ": a whole number above 0 expected");
}

}  // namespace

std::vector<std::string> FileMetadata::Contents() const {
  std::vector<std::string> contents;
  for (const auto& [key, value] : values) {
    if (key != "format") contents.push_back("metadata \"" + key + "\"");
  }
  return contents;
}

std::string FilesLayout::Json() const {
  nlohmann::ordered_json json = {{"dtype", Name(dtype)},
                                 {"only", kOnlyWords[static_cast<std::size_t>(only)]},
                                 {"shard_size", shard_bytes}};
  if (convert) json["convert"] = true;
  if (keep_prefixes) json["keep_prefixes"] = true;
  if (!adapter.empty()) json["adapter"] = adapter;
  if (lora_alpha > 0) json["lora_alpha"] = lora_alpha;
  return json.dump();
}

bool Claims(const Listing& listing) {
  return std::any_of(listing.folders.begin(), listing.folders.end(), [](const auto& folder) {
    return std::any_of(folder.entries.begin(), folder.entries.end(), [](const os::Entry& entry) {
      return IsFile(entry) && BelongsTo(entry.name) != Belongs::kNo;
    });
  });
}

bool IsTrained(DType dtype) { return IsFloating(dtype) && ItemSize(dtype) > 1; }

bool IsIndex(std::string_view name) {
  return name.ends_with(".json") && name.find(".safetensors.index.") != std::string_view::npos;
}

Belongs BelongsTo(std::string_view name) {
  return IsIndex(name) || name.ends_with(file_format::kSuffix) ? Belongs::kOneVersion
                                                               : Belongs::kNo;
}

std::optional<Numbered> ParseNumbered(std::string_view name) {
  constexpr std::string_view kOf = "-of-";
  constexpr std::size_t kDigits = 5;
  if (!name.ends_with(file_format::kSuffix)) return std::nullopt;
  name.remove_suffix(file_format::kSuffix.size());
  constexpr std::size_t kTail = 1 + kDigits + kOf.size() + kDigits;
  if (name.size() <= kTail || name[name.size() - kTail] != '-') return std::nullopt;
  const std::string_view tail = name.substr(name.size() - kTail + 1);
  if (tail.substr(kDigits, kOf.size()) != kOf) return std::nullopt;
  const auto number = NumberIn<std::uint64_t>(tail.substr(0, kDigits));
  const auto count = NumberIn<std::uint64_t>(tail.substr(kDigits + kOf.size()));
  if (!number || !count) return std::nullopt;
  return Numbered{std::string(name.substr(0, name.size() - kTail)), *number, *count};
}

bool StandsAlone(std::string_view name) {
  const std::optional<Numbered> numbered = ParseNumbered(name);
  return name.ends_with(file_format::kSuffix) && (!numbered || numbered->count == 1);
}

Status CheckKey(std::string_view key, std::string_view value) {
  if (key == "shard-size") {
    SW_TRY(ShardBytesOf(key, value));
  } else if (key == "dtype") {
    SW_TRY(DTypeOf(key, value));
  } else if (key == "lora-alpha") {
    SW_TRY(AlphaOf(key, value));
  } else if (key == "adapter") {
    if (value.empty()) return Fail(Errc::kUsage, "target adapter=: a name expected");
  } else if (key == "keep-prefixes") {
    if (value != "yes") return Fail(Errc::kUsage, "target keep-prefixes: yes expected");
  } else if (std::find(kOnlyWords.begin(), kOnlyWords.end(), value) == kOnlyWords.end()) {
    return Fail(Errc::kUsage, "target ", key, "=", value, ": weight or master expected");
  }
  return {};
}

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source) {
  auto own = std::make_shared<FilesLayout>();
  own->shard_bytes = kShardBytes;
  if (const std::string* only = spec.Find("only")) {
    own->only = *only == kOnlyWords[1] ? Only::kMaster : Only::kWeight;
  }
  if (const std::string* size = spec.Find("shard-size")) {
    SW_TRY_ASSIGN(own->shard_bytes, ShardBytesOf("shard-size", *size));
  }
  own->dtype = own->only == Only::kMaster ? DType::kF32 : source.layout.dtype;
  if (const std::string* dtype = spec.Find("dtype")) {
    SW_TRY_ASSIGN(own->dtype, DTypeOf("dtype", *dtype));
    own->convert = true;
  }
  own->keep_prefixes = spec.Find("keep-prefixes") != nullptr;
  if (const std::string* adapter = spec.Find("adapter")) own->adapter = *adapter;
  if (const std::string* alpha = spec.Find("lora-alpha")) {
    SW_TRY_ASSIGN(own->lora_alpha, AlphaOf("lora-alpha", *alpha));
  }
  Layout layout;
  layout.dtype = own->dtype;
  layout.own = std::move(own);
  return layout;
}

std::span<const std::string_view> Sides(const TargetSpec& /*spec*/) {
  static constexpr std::array<std::string_view, 1> kSides = {"hf"};
  return kSides;
}

}  // namespace shardwright::checkpoints::safetensors
