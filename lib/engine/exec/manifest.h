// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/exec/integrity.h"
#include "support/base/result.h"

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
  std::string clone{};  ///< "clone" or "link": its bytes were not read and have no sums
  /// CRC-32 of all its payloads, one after the other; nothing for a file that has none.
  std::optional<std::uint32_t> payload_crc32{};
};

/// A file as a manifest lists it.
struct ListedFile {
  std::uint64_t bytes = 0;
  std::string digest;  ///< hexadecimal; empty: it has none
  std::optional<std::uint32_t> payload_crc32;
};

/// The files of a manifest, by their paths; nothing if this is no manifest, or one of its fields
/// has another type.
/// \param manifest  what its text was parsed to, also "discarded"
/// Pure.
std::optional<std::map<std::string, ListedFile>> ListedFiles(const nlohmann::json& manifest);

/// Whether another output may be put in the place of a folder (--force): it is empty, or an output
/// as the run that made it has left it. What a trainer has written into it since is nobody's to
/// remove.
/// \param sources  files that are read for the new output
/// \error kUsage  a source lies in it; kBusy  it is no output, or something in it is not listed in
///        its manifest, has another size, or is newer by a minute: named; kNotFound
/// Local.
Status CheckReplaceable(const std::string& folder, std::span<const std::string> sources);

/// The manifest's text: `head` (a JSON object) with "files" added.
/// \error kInternal if head is not a JSON object
Result<std::string> MakeManifest(const std::string& head, const std::vector<ManifestFile>& files);

// Texts in JSON that tell whether they are damaged: one of the first fields is the digest of all
// their bytes, with zeros for its own digits. Source: docs/formats/store.md.

/// Name of the field.
inline constexpr const char* kTextSum = "xxh3_128";

/// What the field has while the text is made: 32 zeros.
std::string NoTextSum();

/// Enters the digest of a text that has the field.
/// Pure.
std::string WithTextSum(std::string text);

/// Proves a text that has the field; one without it, of an older release or another program, is
/// taken as it is.
/// \param where  names the text in the message
/// \error kBadInput  the digest is of another text
/// Pure.
Status CheckTextSum(std::string_view text, const std::string& where);

}  // namespace shardwright::exec
