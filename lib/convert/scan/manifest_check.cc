// SPDX-License-Identifier: Apache-2.0
#include "convert/scan/manifest_check.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/deepspeed/common/scan.h"
#include "engine/exec/integrity.h"
#include "engine/exec/manifest.h"
#include "support/base/crc32.h"
#include "support/base/limits.h"
#include "support/json/json.h"
#include "support/os/dir.h"

namespace shardwright::convert {
namespace {

/// Combines the checksums of a file's payloads in file order. Empty if one has no checksum.
std::optional<std::uint32_t> PayloadCrc32(const checkpoints::SourceFile& file) {
  std::vector<const files::Storage*> storages;
  for (const checkpoints::Container& one : file.containers) {
    for (const files::Storage& storage : one.metadata->storages) {
      if (storage.bytes == 0) continue;
      if (!storage.crc32) return std::nullopt;
      storages.push_back(&storage);
    }
  }
  std::ranges::sort(storages, {}, &files::Storage::offset);
  std::uint32_t crc = 0;
  for (const files::Storage* one : storages) crc = Crc32Share(crc, one->bytes) ^ *one->crc32;
  return crc;
}

tl::unexpected<Error> OtherThanListed(const std::string& path, const std::string& found,
                                      const std::string& listed, const std::string& manifest) {
  return Fail(Errc::kBadInput, path, ": expected ", listed, " from ", manifest, ", found ", found,
              ": the file was replaced or belongs to another run; delete the manifest to read the "
              "folder without this check");
}

/// Compares the files of a tag folder with the entries under
/// `prefix` of a manifest, if that exists and has such entries.
Status CompareWithManifest(const checkpoints::SourceSet& set, const std::string& folder,
                           const std::string& manifest, const std::string& prefix) {
  const auto text = os::ReadWholeText(manifest, limits::kJsonBytes);
  if (!text && text.error().sys == ENOENT) return {};
  if (!text) return tl::unexpected<Error>(text.error());
  SW_TRY_ASSIGN(const json::Json parsed, json::Parse(*text, manifest));
  const auto listed = exec::ListedFiles(parsed);
  if (!listed) {
    return Fail(Errc::kBadInput, manifest,
                ": not a manifest; delete it to read the folder without this check");
  }
  const auto find = [&](const std::string& name) -> const exec::ListedFile* {
    const auto found = listed->find(prefix + name);
    return found == listed->end() ? nullptr : &found->second;
  };
  for (const checkpoints::SourceFile& file : set.files) {
    const exec::ListedFile* const known = find(file.name);
    if (known == nullptr || !known->payload_crc32 || file.path != folder + "/" + file.name)
      continue;
    const std::optional<std::uint32_t> sum = PayloadCrc32(file);
    if (sum == known->payload_crc32) continue;
    return OtherThanListed(file.path, sum ? StrCat("CRC-32 ", *sum) : "no CRC-32",
                           StrCat("CRC-32 ", *known->payload_crc32), manifest);
  }
  const exec::ListedFile* const known = find(checkpoints::kAtomsFile);
  if (known == nullptr || known->digest.empty()) return {};
  const exec::Digest digest =
      exec::FileDigest({}, exec::DigestOf(std::as_bytes(std::span(set.manifest))));
  if (exec::Hex(digest) == known->digest) return {};
  return OtherThanListed(folder + "/" + checkpoints::kAtomsFile, "digest " + exec::Hex(digest),
                         "digest " + known->digest, manifest);
}

}  // namespace

Status CheckListed(const checkpoints::SourceSet& set) {
  if (set.format != "universal") return {};
  std::set<std::string> folders;
  for (const checkpoints::SourceFile& file : set.files) {
    folders.insert(file.path.substr(0, file.path.size() - file.name.size() - 1));
  }
  for (const std::string& folder : folders) {
    const std::string above = folder + "/../";
    SW_TRY(CompareWithManifest(set, folder, above + exec::kManifestName, set.tag + "/"));
    SW_TRY(CompareWithManifest(set, folder, folder + "/" + exec::kManifestName, ""));
  }
  return {};
}

}  // namespace shardwright::convert
