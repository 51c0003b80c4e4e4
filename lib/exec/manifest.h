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

/// Whether another output may be put in the place of a folder (--force): it is empty, or an output
/// as the run that made it has left it. What a trainer has written into it since is nobody's to
/// remove.
/// \param sources  files that are read for the new output
/// \error kUsage  a source lies in it; kBusy  it is no output, or something in it is not listed in
///        its manifest, has another size, or is newer by a minute: named; kNotFound
/// Local.
Status CheckReplaceable(const std::string& output, std::span<const std::string> sources);

/// The manifest's text: `head` (a JSON object) with "files" added.
/// \error kInternal if head is not a JSON object
Result<std::string> MakeManifest(const std::string& head, const std::vector<ManifestFile>& files);

}  // namespace shardwright::exec
