// SPDX-License-Identifier: Apache-2.0
// The stream that torch.save wrote before its zip container:
//   1 a pickled magic number   2 a pickled version   3 a pickled dict about the machine
//   4 the object pickle        5 the pickled list of storage keys
//   6 for each key an 8-byte element count and the raw elements

#include "files/torch_pt/legacy_internal.h"

#include <algorithm>
#include <span>
#include <unordered_map>

#include "files/pickle/reader.h"
#include "support/base/checked.h"
#include "support/base/limits.h"

namespace shardwright::torch_pt {

namespace {

using std::string_view_literals::operator""sv;

constexpr std::int64_t kVersion = 1001;
constexpr std::uint64_t kFirstRead = std::uint64_t{64} << 10;

// Reads consecutive pickles from the start of a file.
class Stream {
 public:
  Stream(const files::Part& file, std::uint64_t file_bytes)
      : file_(file), file_bytes_(file_bytes) {}

  Result<std::string> NextPickle() {
    std::size_t resume = 0;
    while (true) {
      const std::string_view rest = std::string_view(buffer_).substr(at_);
      SW_TRY_ASSIGN(const std::optional<std::size_t> end, pickle::FindEnd(rest, resume));
      if (end) {
        at_ += *end;
        return std::string(rest.substr(0, *end));
      }
      if (buffer_.size() == file_bytes_) return BadInput("truncated inside a pickle");
      if (buffer_.size() > limits::kPickleBytes) {
        return Fail(Errc::kLimit, "pickle of more than ", limits::kPickleBytes, " bytes");
      }
      SW_TRY(Grow());
    }
  }

  std::uint64_t offset() const { return at_; }

 private:
  Status Grow() {
    const std::uint64_t have = buffer_.size();
    buffer_.resize(std::min(file_bytes_, std::max(kFirstRead, 4 * have)));
    return file_.ReadAt(have, std::as_writable_bytes(std::span(buffer_)).subspan(have));
  }

  const files::Part& file_;
  std::uint64_t file_bytes_ = 0;
  std::string buffer_;
  std::size_t at_ = 0;
};

Status CheckHead(Stream& stream) {
  SW_TRY_ASSIGN(const std::string magic, stream.NextPickle());
  if (magic != LegacyMagic()) return BadInput("not a legacy torch.save stream");
  SW_TRY_ASSIGN(const std::string version_pickle, stream.NextPickle());
  SW_TRY_ASSIGN(const pickle::Graph version, pickle::Load(version_pickle));
  SW_TRY_ASSIGN(const std::int64_t number, pickle::AsInt(version.root));
  if (number != kVersion) {
    return Fail(Errc::kUnsupported, "legacy stream of version ", number);
  }
  SW_TRY_ASSIGN(const std::string machine_pickle, stream.NextPickle());
  SW_TRY_ASSIGN(const pickle::Graph machine, pickle::Load(machine_pickle));
  const pickle::Node* little = machine.root->Find("little_endian");
  if (little == nullptr || little->kind != pickle::Kind::kBool) {
    return BadInput("legacy stream does not state its byte order");
  }
  if (little->integer == 0) return Fail(Errc::kUnsupported, "big-endian file");
  return {};
}

// Locates the raw data of one storage and advances `offset` past it.
Result<Storage> TakeStorage(const files::Part& file, std::uint64_t file_bytes,
                            const pickle::StorageUse& use, std::uint64_t& offset) {
  if (file_bytes - offset < 8) return BadInput("storage ", use.key, ": file is truncated");
  std::array<std::byte, 8> count_bytes{};
  SW_TRY(file.ReadAt(offset, count_bytes));
  std::uint64_t count = 0;
  for (std::size_t i = 8; i > 0; --i) {
    count = (count << 8) | std::to_integer<std::uint64_t>(count_bytes[i - 1]);
  }
  if (count != use.elems) {
    return BadInput("storage ", use.key, ": ", use.elems,
                    " elements expected from the pickle, found ", count);
  }
  Storage storage;
  storage.key = use.key;
  storage.offset = offset + 8;
  storage.bytes = use.elems * ItemSize(use.dtype);
  if (file_bytes - storage.offset < storage.bytes) {
    return BadInput("storage ", use.key, ": ", storage.bytes,
                    " bytes expected, the file ends after ", file_bytes - storage.offset);
  }
  offset = storage.offset + storage.bytes;
  return storage;
}

}  // namespace

std::string_view LegacyMagic() {
  return "\x80\x02\x8A\x0A\x6C\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19."sv;
}

Result<ContainerMetadata> ReadLegacy(const files::Part& file, std::uint64_t file_bytes) {
  Stream stream(file, file_bytes);
  SW_TRY(CheckHead(stream));
  ContainerMetadata metadata;
  metadata.last = file_bytes;
  SW_TRY_ASSIGN(metadata.header, stream.NextPickle());
  SW_TRY_ASSIGN(const pickle::Graph graph, pickle::Load(metadata.header));
  std::unordered_map<std::string_view, const pickle::StorageUse*> uses;
  for (const pickle::StorageUse& use : graph.storages) uses[use.key] = &use;
  SW_TRY_ASSIGN(const std::string keys_pickle, stream.NextPickle());
  SW_TRY_ASSIGN(const pickle::Graph keys, pickle::Load(keys_pickle));
  if (!keys.root->is_list()) return BadInput("list of storage keys expected");
  std::uint64_t offset = stream.offset();
  for (const pickle::Node* key : keys.root->items) {
    SW_TRY_ASSIGN(const std::string_view name, pickle::AsString(key));
    const auto use = uses.find(name);
    // A key is removed from the table when it is used, so a duplicate is also unknown.
    if (use == uses.end()) return BadInput("storage ", name, " appears twice or in no tensor");
    SW_TRY_ASSIGN(Storage storage, TakeStorage(file, file_bytes, *use->second, offset));
    metadata.storages.push_back(std::move(storage));
    uses.erase(use);
  }
  if (!uses.empty()) return BadInput("storage ", uses.begin()->first, " is missing");
  if (offset != file_bytes) {
    return BadInput(file_bytes - offset, " bytes after the last storage");
  }
  return metadata;
}

}  // namespace shardwright::torch_pt
