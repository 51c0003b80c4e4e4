// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/format.h"

#include <algorithm>

#include "support/base/checked.h"

namespace shardwright::checkpoints {

const std::string* TargetSpec::Find(std::string_view key) const {
  for (const auto& [name, value] : settings) {
    if (name == key) return &value;
  }
  return nullptr;
}

std::uint64_t TargetSpec::NumberOr(std::string_view key, std::uint64_t otherwise) const {
  const std::string* value = Find(key);
  return value == nullptr ? otherwise : NumberIn<std::uint64_t>(*value).value_or(otherwise);
}

bool Listing::HasFolder(std::string_view name) const {
  return std::any_of(folders.begin(), folders.end(), [&](const Folder& folder) {
    return std::any_of(folder.entries.begin(), folder.entries.end(), [&](const os::Entry& entry) {
      return entry.type == os::EntryType::kDir && entry.name == name;
    });
  });
}

bool IsFile(const os::Entry& entry) {
  return entry.type == os::EntryType::kFile || entry.type == os::EntryType::kSymlink;
}

}  // namespace shardwright::checkpoints
