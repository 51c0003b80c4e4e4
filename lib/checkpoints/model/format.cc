// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/format.h"

#include <algorithm>

namespace shardwright::checkpoints {

const std::string* TargetSpec::Find(std::string_view key) const {
  for (const auto& [name, value] : settings) {
    if (name == key) return &value;
  }
  return nullptr;
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
