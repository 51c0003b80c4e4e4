#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>

#include "base/limits.h"
#include "dialect/safetensors/safetensors.h"
#include "format/safetensors/header.h"
#include "format/safetensors/index.h"

namespace shardwright::dialect::safetensors {
namespace {

namespace files = shardwright::safetensors;

constexpr std::string_view kSingleName = "model.safetensors";

/// What lies in the folders under names of the format.
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
      } else if (entry.name.ends_with(files::kSuffix)) {
        names.files.push_back(found);
      }
    }
  }
  return names;
}

Result<std::vector<Container>> ReadOne(const Found& found, const os::File& file,
                                       const os::Identity& /*identity*/) {
  auto text = files::ReadHeaderText(file);
  if (!text) return Within(found.path, text.error());
  const auto header = files::ParseHeader(*text);
  if (!header) return Within(found.path, header.error());
  shardwright::format::Skeleton skeleton;
  skeleton.head = shardwright::format::Head::kJson;
  skeleton.last = text->file_bytes;
  for (const files::Entry& entry : header->entries) {
    skeleton.storages.push_back({entry.name, entry.offset, entry.bytes, std::nullopt});
  }
  skeleton.header = std::move(text->text);
  Container container;
  container.skeleton = std::make_shared<const shardwright::format::Skeleton>(std::move(skeleton));
  return std::vector<Container>{std::move(container)};
}

bool HasName(const std::vector<Found>& files, std::string_view name) {
  return std::any_of(files.begin(), files.end(),
                     [&](const Found& file) { return file.name == name; });
}

/// The index that says which files count, if there is one that does.
Result<const Found*> ChooseIndex(const Names& names, std::vector<std::string>* warnings) {
  if (names.indexes.empty()) return nullptr;
  if (HasName(names.files, kSingleName)) {
    warnings->push_back(std::string(kSingleName) +
                        " is taken, as others do, and not the files of " +
                        names.indexes.front().name);
    return nullptr;
  }
  const auto usual =
      std::find_if(names.indexes.begin(), names.indexes.end(),
                   [](const Found& index) { return index.name == files::kIndexName; });
  if (usual != names.indexes.end()) return &*usual;
  const bool one = std::all_of(names.indexes.begin(), names.indexes.end(), [&](const Found& index) {
    return index.name == names.indexes.front().name;
  });
  if (one) return &names.indexes.front();
  return Fail(Errc::kUnsupported, names.indexes.front().path + " and " + names.indexes.back().name +
                                      ": several sets of files in one folder");
}

}  // namespace

Result<SourceSet> Scan(const Listing& listing) {
  SourceSet set;
  Names names = NamesIn(listing);
  std::vector<std::string> skipped;
  SW_TRY_ASSIGN(const Found* index, ChooseIndex(names, &set.warnings));
  std::set<std::string, std::less<>> wanted;
  if (index != nullptr) {
    SW_TRY_ASSIGN(set.manifest, os::ReadWholeText(index->path, limits::kSafetensorsIndexBytes));
    SW_TRY_ASSIGN(const files::Index parsed, files::ParseIndex(set.manifest, index->path));
    for (const auto& [name, file] : parsed.files) wanted.insert(file);
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
  SW_TRY(ReadFiles(std::move(chosen), ReadOne, &set));
  return set;
}

}  // namespace shardwright::dialect::safetensors
