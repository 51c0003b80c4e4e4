// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <memory>
#include <span>
#include <utility>

#include "checkpoints/catalogue_stream_internal.h"
#include "checkpoints/open_source.h"
#include "checkpoints/registry.h"
#include "support/base/crc32.h"
#include "support/os/dir.h"

// Layout: magic, CRC-32 of the rest, one zstd frame. Inside the frame, numbers are LEB128 and a
// text is its length and its bytes. The frame contains the format's name, tag, warnings, manifest,
// files, siblings and left-out entries. A file has containers, each with a metadata number; the
// first container with a new number also contains the metadata. A storage has a key (unless it
// equals its index), the gap after the previous payload, a length, and a CRC-32 if known. Version
// 5 is written for sources with compressed items and adds their byte ranges to each container;
// version 4 is written otherwise. Older versions are readable: in 3 every container contains its
// metadata; in 1 and 2 a file is one pickled container and formats are numbers; 1 has no siblings.

namespace shardwright::checkpoints {
namespace {

using catalogue::Damaged;
using catalogue::Packer;
using catalogue::Unpacker;

constexpr std::string_view kMagic("SWsource\0\0\0", 11);  // followed by one byte, the version
constexpr unsigned kForm = 5;
constexpr unsigned kPlainForm = 4;
constexpr std::size_t kHeaderBytes = kMagic.size() + 1 + 4;

std::string Index(std::size_t i) { return std::to_string(i); }

std::uint64_t ZigZag(std::int64_t value) {
  return (static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63);
}

std::int64_t UnZigZag(std::uint64_t value) {
  return static_cast<std::int64_t>(value >> 1) ^ -static_cast<std::int64_t>(value & 1);
}

constexpr std::uint64_t kHasSum = 1;
constexpr std::uint64_t kKeyIsIndex = 2;

void PackMetadata(const files::ContainerMetadata& metadata, Packer* out) {
  out->Number(static_cast<std::uint64_t>(metadata.head));
  out->Number(metadata.first);
  out->Number(metadata.last);
  out->Text(metadata.header);
  out->Number(metadata.storages.size());
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < metadata.storages.size(); ++i) {
    const files::Storage& storage = metadata.storages[i];
    const bool index = storage.key == Index(i);
    out->Number((storage.crc32 ? kHasSum : 0) | (index ? kKeyIsIndex : 0));
    if (!index) out->Text(storage.key);
    out->Number(ZigZag(static_cast<std::int64_t>(storage.offset - end)));
    out->Number(storage.bytes);
    if (storage.crc32) {
      std::array<char, 4> sum{};
      for (unsigned b = 0; b < 4; ++b) sum[b] = static_cast<char>(*storage.crc32 >> (8 * b));
      out->Bytes(std::string_view(sum.data(), sum.size()));
    }
    end = storage.offset + storage.bytes;
  }
}

/// \param head  the metadata starts with its kind and its offset
/// \param name  name of the file
Result<files::ContainerMetadata> UnpackMetadata(bool head, const std::string& name, Unpacker* in) {
  files::ContainerMetadata out;
  if (head) {
    SW_TRY_ASSIGN(const std::uint64_t kind, in->Number());
    if (kind > static_cast<std::uint64_t>(files::Head::kJson)) {
      return Damaged(name + ": a container has an unknown kind");
    }
    out.head = static_cast<files::Head>(kind);
    SW_TRY_ASSIGN(out.first, in->Number());
  }
  SW_TRY_ASSIGN(out.last, in->Number());
  if (out.first > out.last) return Damaged(name + ": a container ends before it begins");
  SW_TRY_ASSIGN(out.header, in->Text());
  SW_TRY_ASSIGN(const std::uint64_t count, in->Number());
  std::uint64_t end = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    files::Storage storage;
    SW_TRY_ASSIGN(const std::uint64_t flags, in->Number());
    if (flags > (kHasSum | kKeyIsIndex)) return Damaged(name + ": a storage has unknown flags");
    if ((flags & kKeyIsIndex) != 0) {
      storage.key = Index(static_cast<std::size_t>(i));
    } else {
      SW_TRY_ASSIGN(storage.key, in->Text());
    }
    SW_TRY_ASSIGN(const std::uint64_t gap, in->Number());
    storage.offset = end + static_cast<std::uint64_t>(UnZigZag(gap));
    SW_TRY_ASSIGN(storage.bytes, in->Number());
    if (storage.offset < out.first || storage.offset > out.last ||
        storage.bytes > out.last - storage.offset) {
      return Damaged(name + ": a storage is outside its container");
    }
    if ((flags & kHasSum) != 0) {
      std::uint32_t sum = 0;
      for (unsigned b = 0; b < 4; ++b) {
        SW_TRY_ASSIGN(const std::uint8_t byte, in->Byte());
        sum |= static_cast<std::uint32_t>(byte) << (8 * b);
      }
      storage.crc32 = sum;
    }
    end = storage.offset + storage.bytes;
    out.storages.push_back(std::move(storage));
  }
  return out;
}

void PackIdentity(const os::Identity& identity, Packer* out) {
  out->Number(identity.bytes);
  out->Number(ZigZag(identity.mtime_ns));
  out->Number(identity.inode);
}

Status UnpackIdentity(Unpacker* in, os::Identity* out) {
  SW_TRY_ASSIGN(out->bytes, in->Number());
  SW_TRY_ASSIGN(const std::uint64_t mtime, in->Number());
  out->mtime_ns = UnZigZag(mtime);
  SW_TRY_ASSIGN(out->inode, in->Number());
  return {};
}

constexpr std::uint64_t kExecutable = 1;
constexpr std::uint64_t kHasContent = 2;

void PackSiblings(const SourceSet& source, Packer* out) {
  out->Number(source.siblings.size());
  for (const SiblingFile& sibling : source.siblings) {
    out->Text(sibling.name);
    out->Text(sibling.path);
    PackIdentity(sibling.identity, out);
    out->Number((sibling.executable ? kExecutable : 0) | (sibling.content ? kHasContent : 0));
    if (sibling.content) out->Text(*sibling.content);
  }
  out->Number(source.left_out.size());
  for (const LeftOut& one : source.left_out) {
    out->Text(one.name);
    out->Text(one.why);
  }
}

Result<SiblingFile> UnpackSibling(Unpacker* in) {
  SiblingFile out;
  SW_TRY_ASSIGN(out.name, in->Text());
  if (!os::SafeName(out.name)) return Damaged("a sibling file has an invalid name");
  if (IsPointer(out.name) || OwnFileReason(out.name)) {
    return Damaged("a sibling file has a name that is never copied: " + out.name);
  }
  SW_TRY_ASSIGN(out.path, in->Text());
  SW_TRY(UnpackIdentity(in, &out.identity));
  SW_TRY_ASSIGN(const std::uint64_t flags, in->Number());
  if (flags > (kExecutable | kHasContent)) return Damaged("a sibling file has unknown flags");
  out.executable = (flags & kExecutable) != 0;
  if ((flags & kHasContent) != 0) {
    SW_TRY_ASSIGN(out.content, in->Text());
    if (out.content->size() != out.identity.bytes)
      return Damaged("the content of a sibling file does not have its recorded size");
  }
  return out;
}

void PackCompressedItems(const std::vector<zstd::CompressedItem>& stretches, Packer* out) {
  out->Number(stretches.size());
  for (const zstd::CompressedItem& one : stretches) {
    out->Number(one.stored_first);
    out->Number(one.stored_bytes);
    out->Number(one.bytes);
    out->Number(one.zstd ? 1 : 0);
  }
}

Status UnpackCompressedItems(const SourceFile& file, Unpacker* in, Container* out) {
  SW_TRY_ASSIGN(const std::uint64_t count, in->Number());
  std::uint64_t end = 0;
  std::uint64_t stored_end = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    zstd::CompressedItem one;
    SW_TRY_ASSIGN(one.stored_first, in->Number());
    SW_TRY_ASSIGN(one.stored_bytes, in->Number());
    SW_TRY_ASSIGN(one.bytes, in->Number());
    SW_TRY_ASSIGN(const std::uint64_t zstd, in->Number());
    one.zstd = zstd == 1;
    one.first = end;
    const std::uint64_t file_bytes = file.identity.bytes;
    const bool fits = one.stored_first >= stored_end && one.stored_first <= file_bytes &&
                      one.stored_bytes <= file_bytes - one.stored_first &&
                      one.bytes <= out->metadata->last - end && zstd <= 1 &&
                      (one.zstd || one.bytes == one.stored_bytes);
    if (!fits) return Damaged(file.name + ": a compressed item is outside the file");
    stored_end = one.stored_first + one.stored_bytes;
    end += one.bytes;
    out->stretches.push_back(one);
  }
  if (count == 0 || end == out->metadata->last) return {};
  return Damaged(file.name + ": its compressed items do not cover it");
}

Status UnpackSiblings(Unpacker* in, SourceSet* out) {
  SW_TRY_ASSIGN(const std::uint64_t siblings, in->Number());
  for (std::uint64_t i = 0; i < siblings; ++i) {
    SW_TRY_ASSIGN(SiblingFile sibling, UnpackSibling(in));
    out->siblings.push_back(std::move(sibling));
  }
  SW_TRY_ASSIGN(const std::uint64_t left_out, in->Number());
  for (std::uint64_t i = 0; i < left_out; ++i) {
    LeftOut one;
    SW_TRY_ASSIGN(one.name, in->Text());
    SW_TRY_ASSIGN(one.why, in->Text());
    out->left_out.push_back(std::move(one));
  }
  return {};
}

void PackFile(const SourceFile& file, unsigned form, MetadataTable* metadata_table,
              std::size_t* packed, Packer* out) {
  out->Text(file.name);
  out->Text(file.path);
  PackIdentity(file.identity, out);
  out->Number(file.containers.size());
  for (const Container& container : file.containers) {
    const auto [metadata, index] = metadata_table->Share(container.metadata);
    out->Number(index);
    if (index == *packed) {
      PackMetadata(*metadata, out);
      ++*packed;
    }
    out->Number(container.inlined.size());
    for (const auto& [storage, bytes] : container.inlined) {
      out->Number(storage);
      out->Text(bytes);
    }
    if (form >= 5) PackCompressedItems(container.stretches, out);
  }
}

/// Reads the files of a set, in any version.
class FileUnpacker {
 public:
  FileUnpacker(unsigned form, Unpacker* in) : form_(form), in_(*in) {}

  Result<SourceFile> Next() {
    SourceFile out;
    SW_TRY_ASSIGN(out.name, in_.Text());
    SW_TRY_ASSIGN(out.path, in_.Text());
    SW_TRY(UnpackIdentity(&in_, &out.identity));
    std::uint64_t count = 1;
    if (form_ >= 3) {
      SW_TRY_ASSIGN(count, in_.Number());
    }
    if (count == 0) return Damaged(out.name + ": the file has no containers");
    for (std::uint64_t i = 0; i < count; ++i) {
      Container one;
      SW_TRY_ASSIGN(one.metadata, NextMetadata(out.name));
      SW_TRY(UnpackInlined(out.name, &one));
      if (form_ >= 5) SW_TRY(UnpackCompressedItems(out, &in_, &one));
      out.containers.push_back(std::move(one));
    }
    return out;
  }

 private:
  using Shared = std::shared_ptr<const files::ContainerMetadata>;

  Result<Shared> NextMetadata(const std::string& name) {
    if (form_ < 4) {
      SW_TRY_ASSIGN(files::ContainerMetadata metadata, UnpackMetadata(form_ == 3, name, &in_));
      return shared_.Share(std::make_shared<const files::ContainerMetadata>(std::move(metadata)))
          .first;
    }
    SW_TRY_ASSIGN(const std::uint64_t index, in_.Number());
    if (index > known_.size()) return Damaged(name + ": its metadata is missing");
    if (index == known_.size()) {
      SW_TRY_ASSIGN(files::ContainerMetadata metadata, UnpackMetadata(true, name, &in_));
      known_.push_back(std::make_shared<const files::ContainerMetadata>(std::move(metadata)));
    }
    return known_[static_cast<std::size_t>(index)];
  }

  Status UnpackInlined(const std::string& name, Container* out) {
    const std::vector<files::Storage>& storages = out->metadata->storages;
    SW_TRY_ASSIGN(const std::uint64_t inlined, in_.Number());
    for (std::uint64_t i = 0; i < inlined; ++i) {
      SW_TRY_ASSIGN(const std::uint64_t storage, in_.Number());
      SW_TRY_ASSIGN(std::string bytes, in_.Text());
      if (storage >= storages.size() ||
          bytes.size() != storages[static_cast<std::size_t>(storage)].bytes) {
        return Damaged(name + ": an inlined payload has no matching storage");
      }
      out->inlined.emplace(static_cast<std::uint32_t>(storage), std::move(bytes));
    }
    return {};
  }

  const unsigned form_;
  Unpacker& in_;
  std::vector<Shared> known_;  // by number
  MetadataTable shared_;       // for versions without metadata numbers
};

// Versions 1 and 2 store a format as an index into this list.
constexpr std::array<std::string_view, 2> kNumbered = {"deepspeed", "universal"};

Result<std::string> UnpackFormat(unsigned form, Unpacker* in) {
  std::string name;
  if (form < 3) {
    SW_TRY_ASSIGN(const std::uint64_t kind, in->Number());
    if (kind >= kNumbered.size()) return Damaged("unknown checkpoint format");
    name = kNumbered[static_cast<std::size_t>(kind)];
  } else {
    SW_TRY_ASSIGN(name, in->Text());
  }
  if (FindFormat(name) == nullptr) return Damaged("unknown checkpoint format");
  return name;
}

std::uint32_t Sum(std::string_view bytes) { return Crc32(std::as_bytes(std::span(bytes))); }

}  // namespace

std::string Serialize(const SourceSet& source) {
  constexpr std::uint64_t kStorageBytes = 16;  // estimated size of a packed storage
  constexpr std::uint64_t kFileBytes = 256;    // estimated size of a file without its metadata
  MetadataTable metadata_table;
  std::uint64_t content_bytes = kFileBytes * source.files.size();
  std::size_t different = 0;
  unsigned form = kPlainForm;
  for (const SourceFile& file : source.files) {
    for (const Container& one : file.containers) {
      if (!one.stretches.empty()) form = kForm;
      const auto [metadata, index] = metadata_table.Share(one.metadata);
      if (index < different) continue;
      content_bytes += metadata->header.size() + kStorageBytes * metadata->storages.size();
      ++different;
    }
  }
  Packer packer(content_bytes);
  packer.Text(source.format);
  packer.Text(source.tag);
  packer.Number(source.warnings.size());
  for (const std::string& warning : source.warnings) packer.Text(warning);
  packer.Text(source.manifest);
  packer.Number(source.files.size());
  std::size_t packed = 0;
  for (const SourceFile& file : source.files)
    PackFile(file, form, &metadata_table, &packed, &packer);
  PackSiblings(source, &packer);
  const std::string frame = packer.Finish();

  std::string out(kMagic);
  out += static_cast<char>(form);
  const std::uint32_t sum = Sum(frame);
  for (unsigned b = 0; b < 4; ++b) out += static_cast<char>(sum >> (8 * b));
  out += frame;
  return out;
}

Result<SourceSet> DeserializeSource(std::string_view bytes) {
  constexpr std::size_t kVersionBytes = 3;  // without the version byte
  const std::string_view name = kMagic.substr(0, kMagic.size() - kVersionBytes);
  if (!bytes.starts_with(name)) return Damaged("not a catalogue");
  if (bytes.size() <= kMagic.size()) return Damaged("it ends early");
  const unsigned form = static_cast<std::uint8_t>(bytes[kMagic.size()]);
  if (!bytes.starts_with(kMagic) || form < 1 || form > kForm) {
    return Fail(Errc::kUnsupported, "catalogue: written by another version of this program");
  }
  if (bytes.size() < kHeaderBytes) return Damaged("it ends early");
  std::uint32_t sum = 0;
  for (unsigned b = 0; b < 4; ++b) {
    sum |= static_cast<std::uint32_t>(static_cast<std::uint8_t>(bytes[kMagic.size() + 1 + b]))
           << (8 * b);
  }
  const std::string_view frame = bytes.substr(kHeaderBytes);
  if (Sum(frame) != sum) return Damaged("its checksum does not match");

  Unpacker in(frame);
  SourceSet out;
  SW_TRY_ASSIGN(out.format, UnpackFormat(form, &in));
  SW_TRY_ASSIGN(out.tag, in.Text());
  // The tag is empty if the rank saw no part of the checkpoint.
  if (!out.tag.empty() && !os::SafeName(out.tag))
    return Damaged("its tag is not a valid folder name");
  SW_TRY_ASSIGN(const std::uint64_t warnings, in.Number());
  for (std::uint64_t i = 0; i < warnings; ++i) {
    SW_TRY_ASSIGN(std::string warning, in.Text());
    out.warnings.push_back(std::move(warning));
  }
  SW_TRY_ASSIGN(out.manifest, in.Text());
  SW_TRY_ASSIGN(const std::uint64_t files, in.Number());
  FileUnpacker unpacker(form, &in);
  for (std::uint64_t i = 0; i < files; ++i) {
    SW_TRY_ASSIGN(SourceFile file, unpacker.Next());
    out.files.push_back(std::move(file));
  }
  if (form >= 2) SW_TRY(UnpackSiblings(&in, &out));
  SW_TRY(in.Done());
  return out;
}

}  // namespace shardwright::checkpoints
