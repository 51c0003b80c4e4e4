#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/checked.h"
#include "base/limits.h"
#include "base/text.h"
#include "dialect/core/links.h"
#include "dialect/megatron/folder.h"
#include "dialect/megatron/integrity.h"
#include "dialect/megatron/megatron.h"
#include "format/dcp/index.h"
#include "format/json/json.h"
#include "os/dir.h"

namespace shardwright::dialect::megatron {
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

bool IsMetadata(const os::Entry& entry) { return IsFile(entry) && entry.name == kMetadata; }

bool IsPart(const os::Entry& entry) {
  return IsFile(entry) &&
         (entry.name == kIndex || entry.name == kCommon || entry.name.ends_with(".distcp"));
}

Result<std::vector<Container>> ReadOne(const Found& found, const os::File& file,
                                       const os::Identity& /*identity*/) {
  auto container = ReadPickled(found, file);
  if (!container) return Within(found.path, container.error());
  return std::vector<Container>{*std::move(container)};
}

Status ListRank(const std::string& folder, const std::string& rank, std::vector<Found>* found,
                std::vector<std::string>* skipped) {
  const std::string path = folder + "/" + rank;
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path));
  for (const os::Entry& entry : entries) {
    const std::string name = rank + "/" + entry.name;
    if (IsFile(entry) && entry.name.starts_with("layer_wise_optimizer_")) {
      return Fail(Errc::kUnsupported,
                  path + "/" + entry.name + ": state of a layer-wise optimizer");
    }
    const bool known = entry.name == kModelFile || entry.name == kOptimizerFile;
    if (IsFile(entry) && known) {
      found->push_back({path + "/" + entry.name, name});
    } else {
      skipped->push_back(name);
    }
  }
  return {};
}

Result<SourceSet> ScanLegacy(const Listing& listing) {
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
  SW_TRY(ReadFiles(std::move(found), ReadOne, &set));
  return set;
}

/// Where the items of each data file lie, ascending.
using Stretches = std::map<std::string, std::map<std::uint64_t, std::uint64_t>, std::less<>>;

Result<Stretches> StretchesOf(const std::string& manifest, const std::string& path) {
  auto index = dcp::ReadIndex(manifest);
  if (!index) return Within(path, index.error());
  Stretches all;
  const auto add = [&](const dcp::Place& at) -> Status {
    const std::string& file = index->files[at.file];
    const auto [found, fresh] = all[file].emplace(at.offset, at.bytes);
    if (fresh || found->second == at.bytes) return {};
    return Fail(Errc::kBadInput, path + ": " + file + ": items of different lengths at byte " +
                                     std::to_string(at.offset));
  };
  for (const dcp::Entry& entry : index->entries) {
    if (!entry.is_tensor) SW_TRY(add(entry.at));
    for (const dcp::Chunk& chunk : entry.chunks) SW_TRY(add(chunk.at));
  }
  for (const auto& [file, items] : all) {
    std::uint64_t end = 0;
    for (const auto& [offset, bytes] : items) {
      if (offset < end) {
        return Fail(Errc::kBadInput, Joined(std::vector<std::string>{path, file,
                                                                     "items overlap at byte " +
                                                                         std::to_string(offset)},
                                            ": "));
      }
      SW_TRY_ASSIGN(end, CheckedAdd(offset, bytes));
    }
  }
  return all;
}

/// The file that tells the sums of the others is understood with them.
Result<std::vector<Container>> ReadIntegrity(const std::string& path) {
  auto skeleton = std::make_shared<format::Skeleton>();
  skeleton->head = format::Head::kJson;
  SW_TRY_ASSIGN(skeleton->header, os::ReadWholeText(path, limits::kJsonBytes));
  skeleton->last = skeleton->header.size();
  Container container;
  container.skeleton = std::move(skeleton);
  return std::vector<Container>{std::move(container)};
}

Result<SourceSet> ScanDist(const Listing& listing) {
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
    return Fail(Errc::kNotFound, listing.folders.front().path + "/" + std::string(kIndex) +
                                     " is missing: an incomplete copy or save");
  }
  SW_TRY(StaysInFolder(index));
  SW_TRY_ASSIGN(set.manifest, os::ReadWholeText(index, limits::kPickleBytes));
  SW_TRY_ASSIGN(const Stretches stretches, StretchesOf(set.manifest, index));
  std::vector<Found> found;
  std::vector<std::string> skipped;
  for (const Listing::Folder& folder : listing.folders) {
    for (const os::Entry& entry : folder.entries) {
      const bool data = stretches.contains(entry.name) || entry.name == kCommon;
      if (IsFile(entry) && data) {
        SW_TRY(StaysInFolder(folder.path + "/" + entry.name));
        found.push_back({folder.path + "/" + entry.name, entry.name});
      } else if (entry.name != kMetadata && entry.name != kIndex && entry.name != kIntegrity) {
        skipped.push_back(entry.name);
      }
    }
  }
  const std::string integrity = path_of(kIntegrity);
  if (!integrity.empty()) {
    SW_TRY(StaysInFolder(integrity));
    SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(integrity, limits::kJsonBytes));
    SW_TRY_ASSIGN(const FileSums sums, ParseIntegrity(text, integrity));
    SW_TRY(CheckListed(sums, kMetadata, said, metadata));
    SW_TRY(CheckListed(sums, kIndex, set.manifest, index));
    found.push_back({integrity, std::string(kIntegrity)});
  }
  WarnAboutSkipped(skipped, &set);
  const auto read = [&](const Found& one, const os::File& file,
                        const os::Identity& identity) -> Result<std::vector<Container>> {
    if (one.name == kIntegrity) return ReadIntegrity(one.path);
    const auto items = stretches.find(one.name);
    if (items == stretches.end()) return ReadOne(one, file, identity);
    std::vector<Container> containers;
    for (const auto& [offset, bytes] : items->second) {
      if (offset > identity.bytes || bytes > identity.bytes - offset) {
        return Fail(Errc::kBadInput, one.path + ": " + std::to_string(identity.bytes) +
                                         " bytes, an item reaches to byte " +
                                         std::to_string(offset + bytes));
      }
      auto container = ReadPickled(one, file, offset, bytes);
      if (!container) return Within(one.path, container.error());
      containers.push_back(*std::move(container));
    }
    const auto& [last, bytes] = *items->second.rbegin();
    if (last + bytes < identity.bytes) {
      return Fail(Errc::kBadInput, one.path + ": " + std::to_string(identity.bytes - last - bytes) +
                                       " bytes behind the last item: of another save");
    }
    return containers;
  };
  SW_TRY(ReadFiles(std::move(found), read, &set));
  return set;
}

}  // namespace

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
    return Fail(Errc::kUnsupported, path +
                                        ": a checkpoint of zarr arrays, which Megatron-Core "
                                        "has stopped to write");
  }
  if (backend != "torch_dist" || !is_first("sharded_backend_version")) {
    return Fail(Errc::kBadInput, path +
                                     ": sharded_backend \"torch_dist\" of version 1 expected, "
                                     "found \"" +
                                     backend + "\"");
  }
  const bool common = json::Find(*parsed, "common_backend") != nullptr;
  if (common && (word("common_backend") != "torch" || !is_first("common_backend_version"))) {
    return Fail(Errc::kBadInput, path +
                                     ": common_backend \"torch\" of version 1 expected, found \"" +
                                     word("common_backend") + "\"");
  }
  return {};
}

bool Claims(const Listing& listing) {
  return Any(listing, IsRankFolder) || (Any(listing, IsMetadata) && Any(listing, IsPart));
}

Belongs BelongsTo(std::string_view name) {
  const std::size_t slash = name.find('/');
  if (slash != std::string_view::npos) {
    const std::string_view file = name.substr(slash + 1);
    const bool rank = ParseFolder(name.substr(0, slash)).has_value();
    return rank && (file == kModelFile || file == kOptimizerFile) ? Belongs::kOneVersion
                                                                  : Belongs::kNo;
  }
  const bool known = name == kMetadata || name == kIndex || name == kCommon || name == kIntegrity ||
                     name.ends_with(".distcp");
  return known ? Belongs::kOneVersion : Belongs::kNo;
}

Result<SourceSet> Scan(const Listing& listing) {
  const bool legacy = Any(listing, IsRankFolder);
  if (legacy && Any(listing, IsMetadata)) {
    return Fail(Errc::kBadInput, listing.folders.front().path +
                                     ": folders mp_rank_* beside metadata.json: two checkpoints "
                                     "in one folder");
  }
  if (legacy) return ScanLegacy(listing);
  return ScanDist(listing);
}

}  // namespace shardwright::dialect::megatron
