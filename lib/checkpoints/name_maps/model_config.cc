// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/name_maps/model_config.h"

#include <string_view>

#include "checkpoints/model/links.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::checkpoints {
namespace {

std::string ParentOf(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  const std::size_t slash = path.rfind('/', end);
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

}  // namespace

Result<std::string> FindConfig(const std::vector<std::string>& source_paths) {
  for (const std::string& root : source_paths) {
    // verl stores it in a separate folder.
    const std::string parent = ParentOf(root);
    for (const std::string& folder :
         {root, root + "/huggingface", parent, parent + "/huggingface"}) {
      const std::string path = folder + "/config.json";
      const Result<bool> there = os::Exists(path);
      if (!there || !*there) continue;
      SW_TRY_ASSIGN(const std::string text, ReadTextInFolder(path, limits::kJsonBytes));
      std::string found = path;
      found.append("\n").append(text);
      return found;
    }
  }
  return std::string();
}

Result<std::string> FindAdapterConfig(const std::vector<std::string>& source_paths) {
  for (const std::string& root : source_paths) {
    for (const std::string& folder :
         {root, root + "/lora_adapter", root + "/adapter", ParentOf(root),
          ParentOf(root) + "/lora_adapter", ParentOf(root) + "/adapter"}) {
      const std::string path = folder + "/adapter_config.json";
      const Result<bool> there = os::Exists(path);
      if (there && *there) return os::ReadWholeText(path, limits::kJsonBytes);
    }
  }
  return std::string();
}

Result<KnownConfig> MergeConfigs(const std::string& config, const Checkpoint& checkpoint) {
  KnownConfig facts;
  if (!checkpoint.facts.empty()) {
    facts = {checkpoint.facts, StrCat(checkpoint.origin, " checkpoint ", checkpoint.tag)};
  }
  if (config.empty()) return facts;
  const std::size_t line = config.find('\n');
  const std::string path = config.substr(0, line);
  SW_TRY_ASSIGN(ModelConfig told, FactsIn(std::string_view(config).substr(line + 1), path));
  for (const auto& [key, value] : facts.values) {
    const auto other = told.find(key);
    if (other == told.end() || other->second == value) continue;
    return Fail(Errc::kBadInput, Quoted(key), " is ", Quoted(other->second), " in ", path, ", ",
                Quoted(value), " in the ", facts.origin);
  }
  told.merge(facts.values);
  return KnownConfig{std::move(told),
                     facts.origin.empty() ? path : path + " and the " + facts.origin};
}

}  // namespace shardwright::checkpoints
