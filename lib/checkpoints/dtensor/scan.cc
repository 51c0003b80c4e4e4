// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "checkpoints/dtensor/dtensor.h"
#include "checkpoints/dtensor/names_internal.h"
#include "support/base/limits.h"

namespace shardwright::checkpoints::dtensor {
namespace {

bool HasItemTable(const Listing::Folder& folder) {
  return std::any_of(folder.entries.begin(), folder.entries.end(), [](const os::Entry& entry) {
    return IsFile(entry) && entry.name == kItemTable;
  });
}

/// Returns true for a file that belongs to a checkpoint.
/// torch_checkpointing uses general file names, so its table must exist.
bool Counts(const RankFile& file, bool has_table) {
  return file.trainer != Trainer::kTorchCheckpointing || has_table;
}

}  // namespace

Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity) {
  auto container = ReadPickled(found, file, identity);
  if (!container) return Within(found.path, std::move(container).error());
  std::vector<Container> all;
  all.push_back(*std::move(container));
  return all;
}

bool Claims(const Listing& listing) {
  return std::any_of(listing.folders.begin(), listing.folders.end(), [](const auto& folder) {
    const bool has_table = HasItemTable(folder);
    return std::any_of(folder.entries.begin(), folder.entries.end(), [&](const os::Entry& entry) {
      if (!IsFile(entry)) return false;
      const auto file = ParseRankFile(entry.name);
      return file && file->item == Item::kModel && Counts(*file, has_table);
    });
  });
}

Belongs BelongsTo(std::string_view name) {
  const bool ours = name == kVerlConfig || name == kItemTable || ParseRankFile(name).has_value();
  return ours ? Belongs::kOneVersion : Belongs::kNo;
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  SourceSet set;
  std::vector<Found> found;
  std::vector<std::string> skipped;
  for (const Listing::Folder& folder : listing.folders) {
    const bool has_table = HasItemTable(folder);
    for (const os::Entry& entry : folder.entries) {
      if (!IsFile(entry)) continue;
      const std::string path = folder.path + "/" + entry.name;
      if (entry.name == kVerlConfig || entry.name == kItemTable) {
        SW_TRY_ASSIGN(std::string text, os::ReadWholeText(path, limits::kJsonBytes));
        if (!set.manifest.empty() && set.manifest != text) {
          return BadInput(path, ": differs from the file of this name in another folder");
        }
        set.manifest = std::move(text);
        continue;
      }
      const auto file = ParseRankFile(entry.name);
      if (!file) continue;
      if (Counts(*file, has_table)) {
        found.push_back({path, entry.name});
      } else {
        skipped.push_back(entry.name);
      }
    }
  }
  WarnAboutSkipped(skipped, &set);
  SW_TRY(ReadFiles(std::move(found), ReadFile, options, &set));
  return set;
}

}  // namespace shardwright::checkpoints::dtensor
