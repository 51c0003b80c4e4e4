// SPDX-License-Identifier: Apache-2.0
#include "convert/catalogue.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/exec/integrity.h"
#include "engine/exec/manifest.h"
#include "engine/exec/run/identity.h"
#include "engine/plan/target_builder.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/file.h"
#include "support/os/io_threads.h"

namespace shardwright::convert {
namespace {

constexpr const char* kCatalogueFile = "catalogue.swc";
constexpr std::uint64_t kCatalogueBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kPackAlign = 64;

constexpr std::string_view kCompressedSuffix = ".zst";

std::string PackName(std::size_t file, Pack pack) {
  char name[32];
  std::snprintf(name, sizeof name, "pack/%06zu", file);
  return name + std::string(pack == Pack::kZstd ? kCompressedSuffix : ".bin");
}

const char* PackWord(Pack pack) {
  switch (pack) {
    case Pack::kNone:
      return "none";
    case Pack::kCopy:
      return "copy";
    case Pack::kZstd:
      return "zstd";
  }
  return "";
}

Result<nlohmann::json> ReadManifest(const std::string& folder) {
  const std::string path = folder + "/" + exec::kManifestName;
  SW_TRY_ASSIGN(const std::string manifest, os::ReadWholeText(path, limits::kJsonBytes));
  SW_TRY_ASSIGN(json::Json json, json::Parse(manifest, path));
  if (!json.is_object() || !json.contains("kind") || json["kind"] != "catalogue") {
    return Fail(Errc::kBadInput, path, ": not the manifest of a fragment catalogue");
  }
  return json;
}

/// Plans the packed clone of a source: one file of payloads for each of its files.
/// \param builder  receives the pack files, and `map` the members that feed them
checkpoints::SourceSet PackedClone(const checkpoints::SourceSet& set, Pack pack,
                                   layout::ShardMap* map, plan::TargetBuilder* builder) {
  checkpoints::SourceSet packed = set;
  for (std::size_t f = 0; f < set.files.size(); ++f) {
    checkpoints::SourceFile& clone = packed.files[f];
    map->files.push_back(set.files[f].path);
    const std::string path = PackName(f, pack);
    const std::uint32_t out = builder->AddFile(path);
    std::vector<files::ContainerMetadata> metadata_table;
    for (const checkpoints::Container& container : clone.containers) {
      files::ContainerMetadata& metadata = metadata_table.emplace_back(*container.metadata);
      for (files::Storage& to : metadata.storages) {
        const files::Storage from = to;
        // An empty storage has no offset. A rounded one could exceed the file's size.
        const std::uint64_t end = builder->bytes(out);
        to.offset = from.bytes == 0 ? end : RoundUp(end, kPackAlign);
        if (from.bytes == 0) continue;
        builder->AddMember(out, to.offset, static_cast<std::uint32_t>(map->members.size()),
                           from.bytes);
        map->members.push_back({static_cast<std::uint32_t>(f), from.offset, from.bytes, from.crc32,
                                NameOf(metadata, from)});
      }
    }
    for (std::size_t c = 0; c < metadata_table.size(); ++c) {
      metadata_table[c].first = 0;
      metadata_table[c].last = builder->bytes(out);
      clone.containers[c].metadata =
          std::make_shared<const files::ContainerMetadata>(std::move(metadata_table[c]));
      clone.containers[c].stretches.clear();
    }
    clone.path = path;  // relative, because a packed catalogue may be moved
    clone.identity = {builder->bytes(out), 0, 0};
  }
  for (checkpoints::SiblingFile& clone : packed.siblings) {
    if (clone.content) continue;
    const std::uint64_t bytes = clone.identity.bytes;
    plan::OutputFile out = plan::WholeFile(PackName(builder->file_count(), pack), clone.path, bytes,
                                           plan::CloneMode::kCopy, map);
    clone.path = out.path;
    clone.identity = {bytes, 0, 0};
    builder->AddFile(std::move(out));
  }
  return packed;
}

/// Compares a sibling file's pack with its digest in the manifest, the only checksum
/// of its bytes. For files of the checkpoint, the source itself has checksums.
Status CheckPack(const os::File& stored, const std::string& name, Pack pack,
                 const std::map<std::string, exec::ListedFile>& files) {
  const auto listed = files.find(name);
  if (listed == files.end() || listed->second.digest.empty()) {
    return Fail(Errc::kBadInput, stored.path(), ": the manifest has no digest of this file");
  }
  SW_TRY_ASSIGN(const os::Identity identity, stored.Stat());
  std::vector<std::byte> buffer;
  std::vector<exec::Digest> units;
  exec::DigestStream whole;
  for (std::uint64_t at = 0; at < identity.bytes; at += buffer.size()) {
    buffer.resize(std::min(plan::kUnitBytes, identity.bytes - at));
    SW_TRY(stored.ReadAt(at, buffer));
    if (pack == Pack::kCopy) {
      units.push_back(exec::DigestOf(buffer));
    } else {
      whole.Add(buffer);  // a compressed file has only frame bytes
    }
  }
  const std::string found = exec::Hex(exec::FileDigest(units, whole.Finish()));
  if (found == listed->second.digest) return {};
  return Fail(Errc::kBadInput, stored.path(), ": damaged: expected digest ", listed->second.digest,
              " from the manifest, found ", found);
}

/// Sets the paths of a packed set to the payload files next to its catalogue. They
/// were written after the catalogue's text was fixed, so it contains only their sizes.
Status FindPacks(const std::string& folder, Pack pack, const nlohmann::json& manifest,
                 checkpoints::SourceSet* set) {
  const auto files = exec::ListedFiles(manifest);
  if (!files) {
    return Fail(Errc::kBadInput, folder, "/", exec::kManifestName, ": no valid list of files");
  }
  const auto find = [&](std::size_t number, std::string* path, os::Identity* identity,
                        bool sibling) -> Status {
    const std::string name = PackName(number, pack);
    *path = folder + "/" + name;
    SW_TRY_ASSIGN(const os::File stored, os::File::OpenRead(*path));
    SW_TRY_ASSIGN(const os::Identity found, stored.Stat());
    if (pack == Pack::kCopy && found.bytes != identity->bytes) {
      return Fail(Errc::kBadInput, *path, ": ", identity->bytes,
                  " bytes expected from the catalogue, found ", found.bytes);
    }
    // A compressed file has its own size, so keep the uncompressed size from the catalogue.
    *identity = {pack == Pack::kCopy ? found.bytes : identity->bytes, found.mtime_ns, found.inode};
    return sibling ? CheckPack(stored, name, pack, *files) : Status();
  };
  SW_TRY(os::ForEachFile(set->files.size(), os::kIoThreads, [&](std::uint64_t i) {
    checkpoints::SourceFile& file = set->files[i];
    return find(i, &file.path, &file.identity, false);
  }));
  std::size_t number = set->files.size();
  for (checkpoints::SiblingFile& sibling : set->siblings) {
    if (!sibling.content) SW_TRY(find(number++, &sibling.path, &sibling.identity, true));
  }
  return {};
}

}  // namespace

Result<bool> IsCatalogue(const std::string& folder) {
  return os::Exists(folder + "/" + kCatalogueFile);
}

Result<checkpoints::SourceSet> ReadCatalogue(const std::string& folder, bool siblings) {
  SW_TRY_ASSIGN(const nlohmann::json json, ReadManifest(folder));
  const std::string path = folder + "/" + kCatalogueFile;
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kCatalogueBytes));
  Result<checkpoints::SourceSet> set = checkpoints::DeserializeSource(text);
  if (!set) return Within(path, std::move(set).error());
  if (!siblings) {
    set->siblings.clear();
    set->left_out.clear();
  }
  if (json.contains("packed")) {
    for (const Pack pack : {Pack::kNone, Pack::kCopy, Pack::kZstd}) {
      if (json["packed"] != PackWord(pack)) continue;
      if (pack != Pack::kNone) SW_TRY(FindPacks(folder, pack, json, &*set));
      return set;
    }
  }
  return Fail(Errc::kBadInput, folder, "/", exec::kManifestName,
              ": \"packed\": none, copy or zstd expected");
}

Result<std::string> MapsOfCatalogue(const std::string& folder) {
  SW_TRY_ASSIGN(const nlohmann::json json, ReadManifest(folder));
  const auto maps = json.find("maps");
  return maps == json.end() ? std::string() : maps->dump();
}

Result<std::string> WeightsOfCatalogue(const std::string& folder) {
  SW_TRY_ASSIGN(const nlohmann::json json, ReadManifest(folder));
  const auto weights = json.find("weights_of");
  return weights != json.end() && weights->is_string() ? weights->get<std::string>()
                                                       : std::string();
}

bool IsCompressed(const checkpoints::SourceSet& set) {
  return !set.files.empty() && set.files.front().path.ends_with(kCompressedSuffix);
}

Result<ConvertReport> ExtractCatalogue(comm::Comm& comm, Input& input, Pack pack,
                                       const ConvertOptions& options, Sink& sink) {
  layout::ShardMap map;
  plan::TargetBuilder builder;
  const checkpoints::SourceSet packed =
      pack == Pack::kNone ? checkpoints::SourceSet() : PackedClone(input.set, pack, &map, &builder);
  const auto text = std::make_shared<const std::string>(
      checkpoints::Serialize(pack == Pack::kNone ? input.set : packed));
  exec::FileBytes bytes(map, PathsOf(input.set));
  nlohmann::ordered_json head = ManifestHead("ucp-extract", "catalogue", input);
  head["packed"] = PackWord(pack);
  if (!input.set.weights_of.empty()) head["weights_of"] = input.set.weights_of;
  for (const MapUsed& used : input.mapped) head["maps"].push_back(used.Recipe());
  ConvertReport report;
  builder.AddText(kCatalogueFile, *text);
  plan::Target target = std::move(builder).Take();
  target.compressed = pack == Pack::kZstd;
  exec::Identity identity = RunIdentity(input);
  identity.Add("--pack", PackWord(pack));
  SW_TRY_ASSIGN(report, RunPlan(comm, input, map, target, bytes, head.dump(), std::move(identity),
                                options, sink));
  report.siblings = ListSiblings(input.set);
  report.maps = input.mapped;
  return report;
}

}  // namespace shardwright::convert
