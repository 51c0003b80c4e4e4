// SPDX-License-Identifier: Apache-2.0
#include "files/torch_pt/reader.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <span>
#include <unordered_map>

#include "files/pickle/reader.h"
#include "files/torch_pt/legacy_internal.h"
#include "files/zip/reader.h"
#include "support/base/limits.h"

namespace shardwright::torch_pt {

namespace {

using std::string_view_literals::operator""sv;

constexpr std::uint64_t kSmallMember = 4096;  // version, byteorder
constexpr std::size_t kKeyBytes = 128;

enum class Kind : std::uint8_t { kZip, kLegacy };

// Detects the kind of file by its first bytes, not by its name.
Result<Kind> Sniff(const files::Part& file, std::uint64_t file_bytes) {
  std::array<char, 512> head{};
  const std::size_t bytes = std::min<std::uint64_t>(head.size(), file_bytes);
  SW_TRY(file.ReadAt(0, std::as_writable_bytes(std::span(head)).first(bytes)));
  const std::string_view text(head.data(), bytes);
  const auto unsupported = [&](std::string_view what) {
    return Fail(Errc::kUnsupported, file.path(), ": ", what);
  };
  if (text.starts_with("PK\x03\x04"sv)) return Kind::kZip;
  if (text.starts_with(LegacyMagic())) return Kind::kLegacy;
  if (text.substr(0, 8) == "PYTORCH1")
    return unsupported("container of a preview release of torch");
  if (bytes > 262 && text.substr(257, 5) == "ustar") {
    return unsupported("tar file of torch before 0.1.10: load it with torch and save it again");
  }
  if (bytes > 8 && text[8] == '{') return unsupported("a safetensors file, not a torch.save file");
  return BadInput(file.path(), ": not a torch.save file");
}

constexpr std::string_view kData = "data/";

// Maps names relative to the common root folder to members, without the many payloads.
using Records = std::unordered_map<std::string_view, const zip::Member*>;

Result<Records> Root(const zip::Container& container) {
  const std::string_view first = container.members.front().name;
  const std::size_t slash = first.find('/');
  if (slash == std::string_view::npos) return BadInput("member ", first, " is in no folder");
  const std::string_view root = first.substr(0, slash + 1);
  Records records;
  for (const zip::Member& member : container.members) {
    std::string_view name = member.name;
    if (!name.starts_with(root)) {
      return BadInput("member ", member.name, " is not in folder ", root);
    }
    name.remove_prefix(root.size());
    if (!name.empty() && name.back() != '/') {
      if (!name.starts_with(kData)) records.emplace(name, &member);
    } else if (member.bytes != 0) {
      return BadInput("folder ", member.name, " has content");
    }
  }
  return records;
}

Status CheckVersion(const files::Part& file, const Records& records) {
  auto record = records.find("version");
  if (record == records.end()) record = records.find(".data/version");
  if (record == records.end()) return BadInput(file.path(), ": no member version");
  SW_TRY_ASSIGN(const std::string text, zip::ReadMember(file, *record->second, kSmallMember));
  int version = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, version);
  const bool ends = parsed.ptr == end || (parsed.ptr + 1 == end && *parsed.ptr == '\n');
  if (parsed.ec != std::errc() || !ends || version < 1 || version > 10) {
    return BadInput(file.path(), ": member version is not a number from 1 to 10");
  }
  return {};
}

Status CheckByteOrder(const files::Part& file, const Records& records) {
  const auto record = records.find("byteorder");
  if (record == records.end()) return {};
  SW_TRY_ASSIGN(const std::string text, zip::ReadMember(file, *record->second, kSmallMember));
  if (text == "little") return {};
  if (text == "big") return Fail(Errc::kUnsupported, file.path(), ": big-endian file");
  return BadInput(file.path(), ": member byteorder is neither little nor big");
}

bool IsKey(std::string_view key) {
  const auto fine = [](char c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    return letter || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '-';
  };
  return !key.empty() && key.size() <= kKeyBytes && std::all_of(key.begin(), key.end(), fine);
}

Result<ContainerMetadata> ReadZip(const files::Part& file) {
  SW_TRY_ASSIGN(const zip::Container container, zip::ReadContainer(file));
  Result<Records> records = Root(container);
  if (!records) return Within(file.path(), std::move(records).error());
  if (records->contains("constants.pkl")) {
    return Fail(Errc::kUnsupported, file.path(), ": a TorchScript program, not a checkpoint");
  }
  const auto pickle = records->find("data.pkl");
  if (pickle == records->end()) return BadInput(file.path(), ": no member data.pkl");
  SW_TRY(CheckVersion(file, *records));
  SW_TRY(CheckByteOrder(file, *records));
  ContainerMetadata metadata;
  metadata.last = container.file_bytes;
  SW_TRY_ASSIGN(metadata.header, zip::ReadMember(file, *pickle->second, limits::kPickleBytes));
  const std::size_t root_bytes = container.members.front().name.find('/') + 1;
  metadata.storages.reserve(container.members.size());
  for (const zip::Member& member : container.members) {
    const std::string_view name = member.name.substr(root_bytes);
    if (!name.starts_with(kData) || name == kData) continue;
    const std::string_view key = name.substr(kData.size());
    if (Status stored = zip::CheckStored(member); !stored) {
      return Within(file.path(), std::move(stored).error());
    }
    if (!IsKey(key)) return BadInput(file.path(), ": unsafe name of member ", member.name);
    Storage storage{std::string(key), member.payload_offset, member.bytes, std::nullopt};
    // A stored 0 means that the CRC was not computed, except for an empty member.
    if (member.crc32 != 0 || member.bytes == 0) storage.crc32 = member.crc32;
    metadata.storages.push_back(std::move(storage));
  }
  return metadata;
}

Result<Document::StorageRef> Resolve(
    const pickle::StorageUse& use,
    const std::unordered_map<std::string_view, const Storage*>& storages) {
  const std::string where = "byte " + std::to_string(use.at) + ": storage data/" + use.key;
  const auto found = storages.find(use.key);
  if (found == storages.end()) return BadInput(where, " is missing");
  const Storage& storage = *found->second;
  const std::uint64_t bytes = use.elems * ItemSize(use.dtype);
  if (storage.bytes != bytes) {
    return BadInput(where, ": ", bytes, " bytes expected for ", use.elems, " elements of ",
                    (use.untyped ? "untyped storage" : std::string(Name(use.dtype))), ", found ",
                    storage.bytes);
  }
  Document::StorageRef ref;
  ref.dtype = use.dtype;
  ref.untyped = use.untyped;
  ref.bytes = bytes;
  ref.offset = storage.offset;
  ref.crc32 = storage.crc32;
  ref.member = "data/" + use.key;
  return ref;
}

Result<Document> Assemble(const ContainerMetadata& metadata) {
  SW_TRY_ASSIGN(pickle::Graph graph, pickle::Load(metadata.header));
  std::unordered_map<std::string_view, const Storage*> storages;
  storages.reserve(metadata.storages.size());
  for (const Storage& storage : metadata.storages) storages.emplace(storage.key, &storage);
  Document document;
  document.arena = std::move(graph.arena);
  document.root = graph.root;
  document.storages.reserve(graph.storages.size());
  for (const pickle::StorageUse& use : graph.storages) {
    SW_TRY_ASSIGN(Document::StorageRef ref, Resolve(use, storages));
    document.storages.push_back(std::move(ref));
  }
  return document;
}

}  // namespace

Result<ContainerMetadata> ReadMetadata(const files::Part& file) {
  SW_TRY_ASSIGN(const std::uint64_t bytes, file.Bytes());
  SW_TRY_ASSIGN(const Kind kind, Sniff(file, bytes));
  Result<ContainerMetadata> metadata = kind == Kind::kZip ? ReadZip(file) : ReadLegacy(file, bytes);
  if (!metadata) {
    if (metadata.error().message.starts_with(file.path())) return metadata;
    return Within(file.path(), std::move(metadata).error());
  }
  metadata->first = file.first();
  metadata->last += file.first();
  for (Storage& storage : metadata->storages) storage.offset += file.first();
  return metadata;
}

Result<Document> Parse(const ContainerMetadata& metadata) {
  Result<Document> document = Assemble(metadata);
  if (!document) return Within("data.pkl", std::move(document).error());
  return document;
}

}  // namespace shardwright::torch_pt
