// SPDX-License-Identifier: Apache-2.0
#include "engine/plan/target.h"

#include <memory>
#include <utility>

namespace shardwright::plan {
namespace {

OutputFile OnePayload(std::string path, Payload payload) {
  OutputFile file;
  file.path = std::move(path);
  file.bytes = payload.bytes;
  if (payload.bytes > 0) file.payloads.push_back(std::move(payload));
  return file;
}

}  // namespace

Status NoFrame(std::span<const std::uint32_t> /*crcs*/, const PutFrame& /*put*/) { return {}; }

OutputFile TextFile(std::string path, std::string text) {
  OutputFile file;
  file.path = std::move(path);
  file.bytes = text.size();
  file.frame = [text = std::make_shared<const std::string>(std::move(text))](
                   std::span<const std::uint32_t>, const PutFrame& put) { return put(0, *text); };
  return file;
}

OutputFile WholeFile(std::string path, const std::string& source, std::uint64_t bytes,
                     CloneMode clone, layout::ShardMap* map) {
  const auto index = static_cast<std::uint32_t>(map->files.size());
  map->files.push_back(source);
  Payload payload;
  payload.kind = Payload::Kind::kMember;
  payload.bytes = bytes;
  payload.member = static_cast<std::uint32_t>(map->members.size());
  map->members.push_back({index, 0, bytes, std::nullopt, "the whole file"});
  OutputFile file = OnePayload(std::move(path), std::move(payload));
  file.clone = clone;
  file.clone_of = index;
  if (clone == CloneMode::kLink) file.payloads.clear();
  return file;
}

OutputFile WholeFile(std::string path, std::string content) {
  Payload payload;
  payload.kind = Payload::Kind::kInline;
  payload.bytes = content.size();
  payload.bytes_inline = std::move(content);
  return OnePayload(std::move(path), std::move(payload));
}

}  // namespace shardwright::plan
