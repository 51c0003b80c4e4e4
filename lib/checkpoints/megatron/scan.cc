// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/integrity.h"
#include "checkpoints/megatron/megatron.h"
#include "checkpoints/megatron/run_config.h"
#include "checkpoints/model/fields.h"
#include "checkpoints/model/links.h"
#include "files/dcp/index.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/real_path.h"

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::string_view kMetadata = "metadata.json";
constexpr std::string_view kIndex = dcp::kIndexName;
constexpr std::string_view kCommon = kCommonFile;

bool Any(const Listing& listing, bool (*wanted)(const os::Entry& entry)) {
  return std::any_of(listing.folders.begin(), listing.folders.end(), [&](const auto& folder) {
    return std::any_of(folder.entries.begin(), folder.entries.end(), wanted);
  });
}

bool IsRankFolder(const os::Entry& entry) {
  return entry.type == os::EntryType::kDir && ParseFolder(entry.name).has_value();
}

/// Returns true for the name of a checkpoint file in a rank's folder.
bool IsOfRank(std::string_view name) {
  return name == kModelFile || name == kOptimizerFile || name.starts_with(kLayerWisePrefix);
}

bool IsMetadata(const os::Entry& entry) { return IsFile(entry) && entry.name == kMetadata; }

bool IsPart(const os::Entry& entry) {
  return IsFile(entry) &&
         (entry.name == kIndex || entry.name == kCommon || entry.name.ends_with(".distcp"));
}

Result<std::vector<Container>> ReadOne(const Found& found, const os::File& file,
                                       const os::Identity& identity) {
  auto container = ReadPickled(found, file, identity);
  if (!container) return Within(found.path, container.error());
  return std::vector<Container>{*std::move(container)};
}

Status ListRank(const std::string& folder, const std::string& rank, std::vector<Found>* found,
                std::vector<std::string>* skipped) {
  const std::string path = folder + "/" + rank;
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path));
  for (const os::Entry& entry : entries) {
    const std::string name = rank + "/" + entry.name;
    if (IsFile(entry) && IsOfRank(entry.name)) {
      found->push_back({path + "/" + entry.name, name});
    } else {
      skipped->push_back(name);
    }
  }
  return {};
}

Result<SourceSet> ScanLegacy(const Listing& listing, const ScanOptions& options) {
  SourceSet set;
  std::vector<Found> found;
  std::vector<std::string> skipped;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      if (IsRankFolder(entry)) {
        SW_TRY(ListRank(folder.path, entry.name, &found, &skipped));
      } else {
        skipped.push_back(entry.name);
      }
    }
  }
  WarnAboutSkipped(skipped, &set);
  SW_TRY(ReadFiles(std::move(found), ReadFile, options, &set));
  return set;
}

/// Byte ranges of the items in each data file, ascending.
using Stretches = std::map<std::string, std::map<std::uint64_t, std::uint64_t>, std::less<>>;

Result<Stretches> ByteRangesOf(const std::string& manifest, const std::string& path) {
  auto index = dcp::ReadIndex(manifest);
  if (!index) return Within(path, index.error());
  Stretches all;
  const auto add = [&](const dcp::Place& at) -> Status {
    const std::string& file = index->files[at.file];
    const auto [found, fresh] = all[file].emplace(at.offset, at.bytes);
    if (fresh || found->second == at.bytes) return {};
    return Fail(Errc::kBadInput, path, ": ", file, ": items of different lengths at byte ",
                at.offset);
  };
  for (const dcp::Entry& entry : index->entries) {
    if (!entry.is_tensor) SW_TRY(add(entry.at));
    for (const dcp::Chunk& chunk : entry.chunks) SW_TRY(add(chunk.at));
  }
  for (const auto& [file, items] : all) {
    std::uint64_t end = 0;
    for (const auto& [offset, bytes] : items) {
      if (offset < end) {
        return Fail(Errc::kBadInput, path, ": ", file, ": items overlap at byte ", offset);
      }
      SW_TRY_ASSIGN(end, CheckedAdd(offset, bytes));
    }
  }
  return all;
}

/// Returns Found::how of a data file: the places of its items.
std::string HowToRead(const std::map<std::uint64_t, std::uint64_t>& items) {
  FieldWriter how;
  how.Number(items.size());
  for (const auto& [offset, bytes] : items) {
    how.Number(offset);
    how.Number(bytes);
  }
  return std::move(how).Take();
}

/// Returns true for text files that the reader uses: checksums, the configuration of a run.
bool IsText(std::string_view name) {
  return name == kIntegrity || name == kRunConfig || name == kNemoConfig;
}

Result<std::vector<Container>> ReadText(const os::File& file) {
  auto metadata = std::make_shared<files::ContainerMetadata>();
  metadata->head = files::Head::kJson;
  SW_TRY_ASSIGN(metadata->header, os::ReadWholeText(file, limits::kJsonBytes));
  metadata->last = metadata->header.size();
  Container container;
  container.metadata = std::move(metadata);
  return std::vector<Container>{std::move(container)};
}

/// Reads the containers of a data file, one for each item.
/// \param places  ascending byte ranges inside the file
Result<std::vector<Container>> ReadItems(const Found& found, const os::File& file,
                                         std::vector<files::SmallParts::Range> places) {
  std::vector<Container> containers;
  containers.reserve(places.size());
  const std::vector<files::SmallParts::Range> all = places;
  files::SmallParts small(file, std::move(places));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& [offset, bytes] = all[i];
    Result<Container> container = tl::unexpected<Error>(Error());
    if (files::SmallParts::IsSmall(all[i])) {
      SW_TRY_ASSIGN(const auto loaded, small.At(i));
      container = ReadPickled(found, files::Part(file, offset, loaded));
    } else {
      files::ReadAhead ahead(file, offset, bytes, files::ReadAhead::kItem);
      container = ReadPickled(found, files::Part(file, offset, bytes, ahead));
    }
    if (!container) return Within(found.path, std::move(container).error());
    containers.push_back(*std::move(container));
  }
  return containers;
}

/// Adds NeMo's description of the model, which is next to the folder of the weights.
Status AddNemoConfig(const std::string& folder, std::vector<Found>* found) {
  SW_TRY_ASSIGN(const std::string real, os::ResolvePath(folder));
  const std::size_t slash = real.rfind('/');
  if (slash == std::string::npos || real.substr(slash + 1) != kNemoFolder) return {};
  const std::string path = real.substr(0, slash + 1) + std::string(kNemoConfig);
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (there) found->push_back({path, std::string(kNemoConfig)});
  return {};
}

Result<SourceSet> ScanDist(const Listing& listing, const ScanOptions& options) {
  SourceSet set;
  const auto path_of = [&](std::string_view name) -> std::string {
    for (const Listing::Folder& folder : listing.folders) {
      for (const os::Entry& entry : folder.entries) {
        if (IsFile(entry) && entry.name == name) return folder.path + "/" + entry.name;
      }
    }
    return "";
  };
  const std::string metadata = path_of(kMetadata);
  SW_TRY_ASSIGN(const std::string said, os::ReadWholeText(metadata, limits::kJsonBytes));
  SW_TRY(CheckMetadata(said, metadata));
  const std::string index = path_of(kIndex);
  if (index.empty()) {
    return Fail(Errc::kNotFound, listing.folders.front().path, "/", kIndex,
                " is missing: an incomplete copy or save");
  }
  SW_TRY_ASSIGN(set.manifest, ReadTextInFolder(index, limits::kPickleBytes));
  SW_TRY(CheckNotEmpty(index, set.manifest.size()));
  SW_TRY_ASSIGN(const Stretches stretches, ByteRangesOf(set.manifest, index));
  std::vector<Found> found;
  std::vector<std::string> skipped;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      const bool data = stretches.contains(entry.name) || entry.name == kCommon ||
                        entry.name == kRunConfig || entry.name == kTrainState;
      if (IsFile(entry) && data) {
        found.push_back({folder.path + "/" + entry.name, entry.name, true});
        const auto items = stretches.find(entry.name);
        if (items != stretches.end()) found.back().how = HowToRead(items->second);
      } else if (entry.name != kMetadata && entry.name != kIndex && entry.name != kIntegrity) {
        skipped.push_back(entry.name);
      }
    }
  }
  SW_TRY(AddNemoConfig(listing.folders.front().path, &found));
  const std::string integrity = path_of(kIntegrity);
  if (!integrity.empty()) {
    SW_TRY_ASSIGN(const std::string text, ReadTextInFolder(integrity, limits::kJsonBytes));
    SW_TRY_ASSIGN(const FileSums sums, ParseIntegrity(text, integrity));
    SW_TRY(CheckListed(sums, kMetadata, said, metadata));
    SW_TRY(CheckListed(sums, kIndex, set.manifest, index));
    found.push_back({integrity, std::string(kIntegrity), true});
  }
  WarnAboutSkipped(skipped, &set);
  SW_TRY(ReadFiles(std::move(found), ReadFile, options, &set));
  return set;
}

}  // namespace

Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity) {
  if (IsText(found.name)) return ReadText(file);
  if (found.how.empty()) return ReadOne(found, file, identity);
  FieldReader how(found.how);
  SW_TRY_ASSIGN(const std::uint64_t count, how.Number());
  std::vector<files::SmallParts::Range> places;
  places.reserve(static_cast<std::size_t>(count));
  std::uint64_t end = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    SW_TRY_ASSIGN(const std::uint64_t offset, how.Number());
    SW_TRY_ASSIGN(const std::uint64_t bytes, how.Number());
    end = offset + bytes;
    if (offset > identity.bytes || bytes > identity.bytes - offset) {
      return Fail(Errc::kBadInput, found.path, ": the file has ", identity.bytes,
                  " bytes, but an item ends at byte ", end);
    }
    places.push_back({offset, bytes});
  }
  SW_TRY_ASSIGN(std::vector<Container> containers, ReadItems(found, file, std::move(places)));
  if (end < identity.bytes) {
    return Fail(Errc::kBadInput, found.path, ": ", identity.bytes - end,
                " bytes after the last item: the file belongs to another save");
  }
  return containers;
}

Status CheckMetadata(std::string_view text, const std::string& path) {
  const auto parsed = json::Parse(text, path);
  if (!parsed) return tl::unexpected<Error>(parsed.error());
  const auto word = [&](const char* key) {
    const json::Json* value = json::Find(*parsed, key);
    return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
  };
  const auto is_first = [&](const char* key) {
    const json::Json* value = json::Find(*parsed, key);
    return value != nullptr && value->is_number_unsigned() && value->get<std::uint64_t>() == 1;
  };
  const std::string backend = word("sharded_backend");
  if (backend == "zarr") {
    return Fail(Errc::kUnsupported, path,
                ": zarr checkpoints, which Megatron-Core no longer writes, are not supported");
  }
  if (backend != "torch_dist" || !is_first("sharded_backend_version")) {
    return Fail(backend.empty() ? Errc::kBadInput : Errc::kUnsupported, path,
                ": sharded_backend \"torch_dist\" of version 1 expected, "
                "found \"",
                backend, "\"");
  }
  const bool common = json::Find(*parsed, "common_backend") != nullptr;
  if (common && (word("common_backend") != "torch" || !is_first("common_backend_version"))) {
    return Fail(Errc::kUnsupported, path,
                ": common_backend \"torch\" of version 1 expected, found \"",
                word("common_backend"), "\"");
  }
  return {};
}

bool Claims(const Listing& listing) {
  return Any(listing, IsRankFolder) || (Any(listing, IsMetadata) && Any(listing, IsPart));
}

Belongs BelongsTo(std::string_view name) {
  if (name == kNemoConfig) return Belongs::kOneVersion;
  const std::size_t slash = name.find('/');
  if (slash != std::string_view::npos) {
    const std::string_view file = name.substr(slash + 1);
    const bool rank = ParseFolder(name.substr(0, slash)).has_value();
    return rank && IsOfRank(file) ? Belongs::kOneVersion : Belongs::kNo;
  }
  const bool known = name == kMetadata || name == kIndex || name == kCommon || name == kIntegrity ||
                     name == kRunConfig || name == kTrainState || name.ends_with(".distcp");
  return known ? Belongs::kOneVersion : Belongs::kNo;
}

Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options) {
  const bool legacy = Any(listing, IsRankFolder);
  if (legacy && Any(listing, IsMetadata)) {
    return Fail(Errc::kUnsupported, listing.folders.front().path,
                ": found mp_rank_* folders and metadata.json, two checkpoints "
                "in one folder: move one of them to a folder of its own");
  }
  if (legacy) return ScanLegacy(listing, options);
  return ScanDist(listing, options);
}

}  // namespace shardwright::checkpoints::megatron
