// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/manifest.h"

#include <cerrno>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "support/base/limits.h"
#include "support/json/json.h"
#include "support/os/dir.h"
#include "support/os/file.h"
#include "support/os/real_path.h"

namespace shardwright::exec {
namespace {

/// Allows for copied outputs: cp -r may write the manifest before other files of the output.
constexpr std::int64_t kCopyNs = std::int64_t{60} * 1'000'000'000;

Status Refuse(const std::string& output, const std::string& why) {
  return Fail(Errc::kBusy, output, ": ", why,
              ", so --force does not replace it; remove it, or choose another name");
}

constexpr const char* kPayloadSum = "payload_crc32";

// A JSON string cannot contain this text, because its quotes would be escaped.
constexpr std::string_view kKey = "\"xxh3_128\":";
constexpr std::size_t kDigits = 32;

/// Returns the position of the digits, or npos if there are none.
std::size_t FindDigits(std::string_view text) {
  std::size_t at = text.find(kKey);
  if (at == std::string_view::npos) return at;
  at = text.find_first_not_of(' ', at + kKey.size());
  const bool whole = at < text.size() && text.size() - at >= kDigits + 2 && text[at] == '"';
  return whole ? at + 1 : std::string_view::npos;
}

std::string SumAround(std::string_view text, std::size_t at) {
  const std::string zeros = NoTextSum();
  DigestStream digest;
  for (const std::string_view part :
       {text.substr(0, at), std::string_view(zeros), text.substr(at + kDigits)}) {
    digest.Add(std::as_bytes(std::span(part)));
  }
  return Hex(digest.Finish());
}

}  // namespace

Status CheckReplaceable(const std::string& folder, std::span<const std::string> sources) {
  SW_TRY_ASSIGN(const os::ParentName split, os::SplitOutput(folder));
  const std::string output = split.Path();
  SW_TRY_ASSIGN(const bool is_dir, os::IsDir(output));
  if (!is_dir) return {};  // the code that opens it reports the error
  SW_TRY_ASSIGN(const std::string real, os::ResolvePath(output));
  if (real.empty()) return {};
  const std::string inside = real + "/";
  for (const std::string& source : sources) {
    SW_TRY_ASSIGN(const std::string path, os::ResolvePath(source));
    if (!path.starts_with(inside)) continue;
    std::string message = output;
    message += ": OUTPUT contains a file of INPUT, " + source;
    return Fail(Errc::kUsage, message);
  }
  SW_TRY_ASSIGN(const os::Tree tree, os::WalkTree(output));
  if (!tree.other.empty()) {
    return Refuse(output,
                  tree.other.front().substr(output.size() + 1) + " is neither a file nor a folder");
  }
  if (tree.files.empty()) return {};
  const std::string manifest_path = output + "/" + kManifestName;
  auto text = os::ReadWholeText(manifest_path, limits::kJsonBytes);
  if (!text && text.error().sys == ENOENT) {
    return Refuse(output, std::string("not an output of Shardwright: it has no ") + kManifestName);
  }
  if (!text) return tl::unexpected<Error>(std::move(text).error());
  const auto parsed = json::Parse(*text, kManifestName);
  if (!parsed) return Refuse(output, "not an output of Shardwright: " + parsed.error().message);
  const auto listed = ListedFiles(*parsed);
  if (!listed) {
    return Refuse(output,
                  StrCat("not an output of Shardwright: its ", kManifestName, " lists no files"));
  }
  const auto identity = [](const std::string& path) -> Result<os::Identity> {
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
    return file.Stat();
  };
  SW_TRY_ASSIGN(const os::Identity manifest, identity(manifest_path));
  for (const std::string& path : tree.files) {
    const std::string name = path.substr(output.size() + 1);
    if (name == kManifestName) continue;
    const auto found = listed->find(name);
    if (found == listed->end()) {
      return Refuse(output, name + " was not written by the run that made this output");
    }
    SW_TRY_ASSIGN(const os::Identity now, identity(path));
    if (now.bytes != found->second.bytes || now.mtime_ns > manifest.mtime_ns + kCopyNs) {
      return Refuse(output, name + " has changed since the run that made this output");
    }
  }
  return {};
}

std::optional<std::map<std::string, ListedFile>> ListedFiles(const nlohmann::json& manifest) {
  if (!manifest.is_object() || !manifest.contains("files") || !manifest["files"].is_array()) {
    return std::nullopt;
  }
  std::map<std::string, ListedFile> out;
  for (const nlohmann::json& file : manifest["files"]) {
    if (!file.is_object() || !file.contains("path") || !file["path"].is_string() ||
        !file.contains("bytes") || !file["bytes"].is_number_unsigned()) {
      return std::nullopt;
    }
    ListedFile listed{file["bytes"].get<std::uint64_t>(), {}, {}};
    if (file.contains("xxh3_128")) {
      if (!file["xxh3_128"].is_string()) return std::nullopt;
      listed.digest = file["xxh3_128"].get<std::string>();
    }
    if (file.contains(kPayloadSum)) {
      if (!file[kPayloadSum].is_number_unsigned()) return std::nullopt;
      const auto sum = file[kPayloadSum].get<std::uint64_t>();
      if (sum > std::numeric_limits<std::uint32_t>::max()) return std::nullopt;
      listed.payload_crc32 = static_cast<std::uint32_t>(sum);
    }
    out[file["path"].get<std::string>()] = std::move(listed);
  }
  return out;
}

Digest FileDigest(std::span<const Digest> units, const Digest& frame) {
  DigestStream stream;
  stream.Add(std::as_bytes(units));
  stream.Add(std::as_bytes(std::span(frame)));
  return stream.Finish();
}

Result<std::string> MakeManifest(const std::string& head, const std::vector<ManifestFile>& files) {
  nlohmann::ordered_json json = nlohmann::ordered_json::parse(head, nullptr, false);
  if (!json.is_object()) return Fail(Errc::kInternal, "the manifest's head is not a JSON object");
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const ManifestFile& file : files) {
    nlohmann::ordered_json line = {{"path", file.path}, {"bytes", file.bytes}};
    if (file.clone.empty()) {
      line["xxh3_128"] = Hex(file.digest);
      if (file.payload_crc32) line[kPayloadSum] = *file.payload_crc32;
    } else {
      line["clone_mode"] = file.clone;
    }
    list.push_back(std::move(line));
  }
  json["files"] = std::move(list);
  // Names of sibling files are arbitrary bytes, but JSON requires UTF-8.
  return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string NoTextSum() { return std::string(kDigits, '0'); }

std::string WithTextSum(std::string text) {
  const std::size_t at = FindDigits(text);
  SW_CHECK(at != std::string::npos);
  text.replace(at, kDigits, SumAround(text, at));
  return text;
}

Status CheckTextSum(std::string_view text, const std::string& where) {
  const std::size_t at = FindDigits(text);
  if (at == std::string_view::npos) return {};
  const std::string_view said = text.substr(at, kDigits);
  const std::string found = SumAround(text, at);
  if (said == found) return {};
  return Fail(Errc::kBadInput, where, ": \"", kTextSum, "\" is ", said,
              ", but the checksum of the text is ", found,
              ": the text is damaged; if you edited it on purpose, remove the field");
}

}  // namespace shardwright::exec
