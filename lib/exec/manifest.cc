#include "exec/manifest.h"

#include <nlohmann/json.hpp>

namespace shardwright::exec {

namespace {

// No text in JSON holds this within a string.
constexpr std::string_view kKey = "\"xxh3_128\":";
constexpr std::size_t kDigits = 32;

/// Where the digits begin; npos: there are none.
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
    if (file.twin.empty()) {
      line["xxh3_128"] = Hex(file.digest);
    } else {
      line["twin"] = file.twin;
    }
    list.push_back(std::move(line));
  }
  json["files"] = std::move(list);
  // Names of neighbours are bytes; JSON wants UTF-8.
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
  return Fail(Errc::kBadInput,
              where + ": \"" + kTextSum + "\" says " + std::string(said) + ", the text has " +
                  found + ": it is damaged, or was changed on purpose: then remove the field");
}

}  // namespace shardwright::exec
