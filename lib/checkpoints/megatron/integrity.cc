// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/integrity.h"

#include <nlohmann/json.hpp>

#include "checkpoints/megatron/run_config.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/sha256.h"

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::string_view kAlgorithm = "sha256";

bool IsSum(const json::Json& value) {
  if (!value.is_string()) return false;
  const auto& text = value.get_ref<const std::string&>();
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

Result<FileSums> ParseIntegrity(std::string_view text, const std::string& where) {
  SW_TRY_ASSIGN(const json::Json parsed, json::Parse(text, where));
  const json::Json* algorithm = json::Find(parsed, "algorithm");
  if (algorithm != nullptr && (!algorithm->is_string() || *algorithm != kAlgorithm)) {
    return Fail(Errc::kUnsupported, where, ": algorithm \"sha256\" expected, found ",
                algorithm->dump());
  }
  const json::Json* files = json::Find(parsed, "files");
  if (files == nullptr || !files->is_object()) {
    return Fail(Errc::kBadInput, where, ": files: an object expected");
  }
  FileSums sums;
  for (const auto& [name, sum] : files->items()) {
    if (!IsSum(sum)) {
      return Fail(Errc::kBadInput, where, ": ", Quoted(name),
                  ": 64 hexadecimal digits expected, found ", sum.dump());
    }
    sums.emplace(name, sum.get<std::string>());
  }
  return sums;
}

std::string IntegrityText(const FileSums& sums) {
  nlohmann::ordered_json files = nlohmann::ordered_json::object();
  for (const auto& [name, sum] : sums) files[name] = sum;
  return nlohmann::ordered_json({{"algorithm", kAlgorithm}, {"files", std::move(files)}}).dump(2);
}

Status CheckListed(const FileSums& sums, std::string_view name, std::string_view text,
                   const std::string& where) {
  const auto listed = sums.find(name);
  if (listed == sums.end()) {
    return Fail(Errc::kBadInput, where, ": ", kIntegrity, " does not list it");
  }
  const std::string found = os::Sha256Of(text);
  if (found == listed->second) return {};
  return Fail(Errc::kBadInput, where, ": damaged: SHA-256 ", listed->second, " expected by ",
              kIntegrity, ", found ", found);
}

Result<std::vector<FileDigest>> DigestsOf(const SourceSet& source) {
  std::vector<FileDigest> digests;
  for (const SourceFile& list : source.files) {
    if (list.name != kIntegrity) continue;
    if (list.containers.size() != 1) {
      return Fail(Errc::kBadInput, list.name, ": one text expected");
    }
    SW_TRY_ASSIGN(const FileSums sums,
                  ParseIntegrity(list.containers.front().metadata->header, list.name));
    for (std::uint32_t i = 0; i < source.files.size(); ++i) {
      const std::string& name = source.files[i].name;
      const auto listed = sums.find(name);
      // Other programs add these files after Megatron-Core has written the list.
      const bool own = name == kRunConfig || name == kTrainState || name == kNemoConfig;
      if (name == kIntegrity || (own && listed == sums.end())) continue;
      if (listed == sums.end()) {
        return Fail(Errc::kBadInput, name, ": ", kIntegrity, " does not list it");
      }
      digests.push_back({i, listed->second});
    }
  }
  return digests;
}

}  // namespace shardwright::checkpoints::megatron
