#include "exec/manifest.h"

#include <nlohmann/json.hpp>

namespace shardwright::exec {

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

}  // namespace shardwright::exec
