// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "checkpoints/safetensors/safetensors.h"
#include "files/safetensors/header.h"
#include "files/safetensors/index.h"
#include "support/base/limits.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::safetensors {
namespace {

namespace file_format = shardwright::safetensors;

constexpr std::string_view kSingleName = "model.safetensors";

/// Found files and indexes, selected by name.
struct Names {
  std::vector<Found> files;
  std::vector<Found> indexes;
};

Names NamesIn(const Listing& listing) {
  Names names;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      if (!IsFile(entry)) continue;
      const Found found{folder.path + "/" + entry.name, entry.name};
      if (IsIndex(entry.name)) {
        names.indexes.push_back(found);
      } else if (entry.name.ends_with(file_format::kSuffix)) {
        names.files.push_back(found);
      }
    }
  }
  return names;
}

bool HasName(const std::vector<Found>& files, std::string_view name) {
  return std::any_of(files.begin(), files.end(),
                     [&](const Found& file) { return file.name == name; });
}

/// Returns the index that lists the files of the set, or null if none applies.
Result<const Found*> ChooseIndex(const Names& names, std::vector<std::string>* warnings) {
  if (names.indexes.empty()) return nullptr;
  if (HasName(names.files, kSingleName)) {
    warnings->push_back(StrCat("reading ", kSingleName,
                               ", as other programs do, and ignoring the files of ",
                               names.indexes.front().name));
    return nullptr;
  }
  const auto usual =
      std::find_if(names.indexes.begin(), names.indexes.end(),
                   [](const Found& index) { return index.name == file_format::kIndexName; });
  if (usual != names.indexes.end()) return &*usual;
  const bool one = std::all_of(names.indexes.begin(), names.indexes.end(), [&](const Found& index) {
    return index.name == names.indexes.front().name;
  });
  if (one) return &names.indexes.front();
  return Fail(Errc::kUnsupported, names.indexes.front().path, " and ", names.indexes.back().name,
              ": several sets of files in one folder");
}

/// Fails if an index names none of the folder's files although there are
/// some: they were renamed, or saved again with a different shard size.
Status CheckStale(const Found& index, const std::set<std::string, std::less<>>& wanted,
                  const std::vector<Found>& files) {
  const bool stale =
      !files.empty() && std::none_of(files.begin(), files.end(),
                                     [&](const Found& file) { return wanted.contains(file.name); });
  if (!stale) return {};
  std::vector<std::string> others;
  others.reserve(files.size());
  for (const Found& file : files) others.push_back(file.name);
  return Fail(Errc::kNotFound, index.path, ": stale index: it lists ",
              FirstFew({wanted.begin(), wanted.end()}), ", none of which exists; found ",
              FirstFew(others), ": move the index away to read the files by their names");
}

/// Returns the rank in a sharded_state file name of vLLM: "model-rank-3-part-0.safetensors".
std::optional<std::string> RankOfVllm(std::string_view name) {
  constexpr std::string_view kRank = "model-rank-";
  constexpr std::string_view kPart = "-part-";
  if (!name.starts_with(kRank)) return std::nullopt;
  name.remove_prefix(kRank.size());
  const std::size_t end = name.find(kPart);
  if (end == std::string_view::npos || end == 0) return std::nullopt;
  const std::string_view rank = name.substr(0, end);
  if (rank.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  return std::string(rank);
}

/// Fails for vLLM files of several tensor-parallel ranks, because they do not record
/// how tensors were fused and sharded. Accepts one rank, which has complete tensors.
Status CheckVllm(const std::vector<Found>& files, std::vector<std::string>* warnings) {
  std::set<std::string> ranks;
  for (const Found& file : files) {
    if (auto rank = RankOfVllm(file.name)) ranks.insert(*std::move(rank));
  }
  if (ranks.empty()) return {};
  if (ranks.size() == 1) {
    warnings->push_back(files.front().name +
                        ": vLLM sharded_state: tensors keep vLLM's names and stay fused");
    return {};
  }
  return Fail(Errc::kUnsupported, files.front().path, ": vLLM sharded_state for ",
              Plural(ranks.size(), "tensor-parallel rank"),
              ": its files do not record how tensors were fused and sharded; convert the original "
              "model instead");
}

}  // namespace

Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& /*identity*/) {
  auto text = file_format::ReadHeaderText(file);
  if (!text) return Within(found.path, text.error());
  const auto header = file_format::ParseHeader(*text);
  if (!header) return Within(found.path, header.error());
  shardwright::files::ContainerMetadata metadata;
  metadata.head = shardwright::files::Head::kJson;
  metadata.last = text->file_bytes;
  for (const file_format::Entry& entry : header->entries) {
    metadata.storages.push_back({entry.name, entry.offset, entry.bytes, std::nullopt});
  }
  metadata.header = std::move(text->text);
  Container container;
  container.metadata =
      std::make_shared<const shardwright::files::ContainerMetadata>(std::move(metadata));
  return std::vector<Container>{std::move(container)};
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  SourceSet set;
  Names names = NamesIn(listing);
  std::vector<std::string> skipped;
  SW_TRY(CheckVllm(names.files, &set.warnings));
  SW_TRY_ASSIGN(const Found* index, ChooseIndex(names, &set.warnings));
  std::set<std::string, std::less<>> wanted;
  if (index != nullptr) {
    SW_TRY_ASSIGN(set.manifest, os::ReadWholeText(index->path, limits::kSafetensorsIndexBytes));
    SW_TRY_ASSIGN(const file_format::Index parsed,
                  file_format::ParseIndex(set.manifest, index->path));
    for (const auto& [name, file] : parsed.files) wanted.insert(file);
    SW_TRY(CheckStale(*index, wanted, names.files));
  } else if (HasName(names.files, kSingleName)) {
    wanted.emplace(kSingleName);
  } else {
    for (const Found& file : names.files) wanted.insert(file.name);
  }
  std::vector<Found> chosen;
  for (Found& file : names.files) {
    if (wanted.contains(file.name)) {
      chosen.push_back(std::move(file));
    } else {
      skipped.push_back(file.name);
    }
  }
  WarnAboutSkipped(skipped, &set);
  SW_TRY(ReadFiles(std::move(chosen), ReadFile, options, &set));
  return set;
}

}  // namespace shardwright::checkpoints::safetensors
