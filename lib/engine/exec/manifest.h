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

/// Computes the digest of an output file: XXH3-128 over the digests of its units
/// in order, then the digest of its frame (all other bytes, in file order).
/// Source: docs/formats/manifest.md.
Digest FileDigest(std::span<const Digest> units, const Digest& frame);

struct ManifestFile {
  std::string path;
  std::uint64_t bytes = 0;
  Digest digest{};
  std::string clone{};  ///< "clone" or "link": its bytes were not read and have no checksums
  /// CRC-32 of the concatenation of all its payloads; absent if it has no payloads.
  std::optional<std::uint32_t> payload_crc32{};
};

/// A file listed in a manifest.
struct ListedFile {
  std::uint64_t bytes = 0;
  std::string digest;  ///< hexadecimal; empty if the manifest has none
  std::optional<std::uint32_t> payload_crc32;
};

/// Returns the files of a manifest by path, or nothing if it
/// is not a manifest or one of its fields has the wrong type.
/// \param manifest  its parsed text; may also be "discarded", which is not a manifest
/// Pure.
std::optional<std::map<std::string, ListedFile>> ListedFiles(const nlohmann::json& manifest);

/// Checks that a new output may replace a folder (--force): the folder
/// must be empty, or an output that is unchanged since the run that
/// made it. Files that a trainer has added since are never removed.
/// \param sources  files that are read for the new output
/// \error kUsage  a source is inside the folder; kBusy  the folder is not an output, or a file in
///        it is not in its manifest, has another size, or is a minute newer than it; kNotFound
/// Local.
Status CheckReplaceable(const std::string& folder, std::span<const std::string> sources);

/// Returns the manifest's text: `head` (a JSON object) with "files" added.
/// \error kInternal  `head` is not a JSON object
Result<std::string> MakeManifest(const std::string& head, const std::vector<ManifestFile>& files);

// JSON texts that carry their own checksum: one of the first fields is the digest of all bytes
// of the text, with zeros in place of the digest's digits. Source: docs/formats/store.md.

/// Name of the checksum field.
inline constexpr const char* kTextSum = "xxh3_128";

/// Returns the value of the field before the digest is known: 32 zeros.
std::string NoTextSum();

/// Replaces the zeros in the field of a text with its digest.
/// Pure.
std::string WithTextSum(std::string text);

/// Verifies the checksum of a text. Accepts a text without
/// the field, as older releases and other programs write.
/// \param where  names the text in the message
/// \error kBadInput  the digest does not match the text
/// Pure.
Status CheckTextSum(std::string_view text, const std::string& where);

}  // namespace shardwright::exec
