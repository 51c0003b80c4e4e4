#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "exec/integrity.h"

namespace shardwright::exec {

/// Name of the manifest in every output. A directory without it is not a complete output.
inline constexpr const char* kManifestName = "shardwright.json";

/// The digest of an output file: XXH3-128 over the digests of its units in order, then the digest
/// of its frame (all other bytes, in file order).
/// Source: docs/formats/manifest.md.
Digest FileDigest(std::span<const Digest> units, const Digest& frame);

struct ManifestFile {
  std::string path;
  std::uint64_t bytes = 0;
  Digest digest{};
  std::string twin{};  ///< "clone" or "link": its bytes were not read and have no digest
};

/// The manifest's text: `head` (a JSON object) with "files" added.
/// \error kInternal if head is not a JSON object
Result<std::string> MakeManifest(const std::string& head, const std::vector<ManifestFile>& files);

}  // namespace shardwright::exec
