// SPDX-License-Identifier: Apache-2.0
#include "files/torch_pt/writer.h"

#include <algorithm>
#include <string_view>

#include "files/pickle/writer.h"
#include "support/base/checked.h"
#include "support/base/crc32.h"

namespace shardwright::torch_pt {

namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kRoot = "archive/";
constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kLocalBytes = 30;
constexpr std::uint64_t kPaddingHeader = 4;
constexpr std::uint64_t kEntryBytes = 46;
constexpr std::uint64_t kTrailerBytes = 56 + 20 + 22;
constexpr std::uint64_t kMax32 = 0xFFFFFFFF;
constexpr std::uint16_t kFlags = 0x0808;       // data descriptor follows, name is UTF-8
constexpr std::uint16_t kFlagsEmpty = 0x0800;  // no descriptor after an empty member

struct Small {
  std::string_view name;
  std::string_view content;
};
// Members between data.pkl and the storages, and the one after the storages.
constexpr Small kHead[] = {
    {".format_version", "1"}, {".storage_alignment", "64"}, {"byteorder", "little"}};
constexpr Small kLast = {"version", "3\n"};

void Put(std::string& out, std::uint64_t number, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) out.push_back(static_cast<char>(number >> (8 * i)));
}

void Zeros(std::string& out, std::size_t bytes) { out.append(bytes, '\0'); }

// Location of a member, from which its headers are computed with its name and size.
struct Member {
  std::string_view name;  // relative to the root folder
  std::uint64_t bytes = 0;
  std::uint64_t header_offset = 0;

  bool big_size() const { return bytes >= kMax32; }
  bool big_offset() const { return header_offset >= kMax32; }
  std::uint64_t zip64_bytes() const {
    if (!big_size() && !big_offset()) return 0;
    return 4U + (big_size() ? 16U : 0U) + (big_offset() ? 8U : 0U);
  }
  std::uint64_t unpadded_offset() const {
    return header_offset + kLocalBytes + kRoot.size() + name.size() + zip64_bytes() +
           kPaddingHeader;
  }
  std::uint64_t payload_offset() const { return RoundUp(unpadded_offset(), kAlignment); }
  std::uint64_t descriptor_bytes() const { return bytes == 0 ? 0 : zip64_bytes() != 0 ? 24 : 16; }
  std::uint64_t end() const { return payload_offset() + bytes + descriptor_bytes(); }
  std::uint16_t flags() const { return bytes == 0 ? kFlagsEmpty : kFlags; }
  std::uint64_t entry_bytes() const {
    const std::uint64_t fields = (big_size() ? 2U : 0U) + (big_offset() ? 1U : 0U);
    return kEntryBytes + kRoot.size() + name.size() + (fields == 0 ? 0 : 4 + 8 * fields);
  }
};

void PutLocalHeader(std::string& out, const Member& member) {
  out.append("PK\x03\x04"sv);
  Put(out, 0, 2);
  Put(out, member.flags(), 2);
  Zeros(out, 2 + 4 + 4 + 4 + 4);  // method, time, CRC and sizes are in the directory
  Put(out, kRoot.size() + member.name.size(), 2);
  const std::uint64_t padding = member.payload_offset() - member.unpadded_offset();
  Put(out, member.zip64_bytes() + kPaddingHeader + padding, 2);
  out.append(kRoot).append(member.name);
  if (member.zip64_bytes() != 0) {
    Put(out, 1, 2);
    Put(out, member.zip64_bytes() - 4, 2);
    if (member.big_size()) {
      Put(out, member.bytes, 8);
      Put(out, 0, 8);  // as in torch: compressed size 0
    }
    if (member.big_offset()) Put(out, member.header_offset, 8);
  }
  out.append("FB");
  Put(out, padding, 2);
  out.append(padding, 'Z');
}

void PutDescriptor(std::string& out, const Member& member, std::uint32_t crc) {
  if (member.bytes == 0) return;
  out.append("PK\x07\x08"sv);
  Put(out, crc, 4);
  const unsigned width = member.zip64_bytes() != 0 ? 8 : 4;
  Put(out, member.bytes, width);
  Put(out, member.bytes, width);
}

void PutEntry(std::string& out, const Member& member, std::uint32_t crc) {
  out.append("PK\x01\x02"sv);
  Put(out, 0, 4);
  Put(out, member.flags(), 2);
  Zeros(out, 2 + 4);
  Put(out, crc, 4);
  Put(out, std::min(member.bytes, kMax32), 4);
  Put(out, std::min(member.bytes, kMax32), 4);
  Put(out, kRoot.size() + member.name.size(), 2);
  const std::uint64_t extra =
      member.entry_bytes() - kEntryBytes - kRoot.size() - member.name.size();
  Put(out, extra, 2);
  Zeros(out, 2 + 2 + 2 + 4);
  Put(out, std::min(member.header_offset, kMax32), 4);
  out.append(kRoot).append(member.name);
  if (extra == 0) return;
  Put(out, 1, 2);
  Put(out, extra - 4, 2);
  if (member.big_size()) {
    Put(out, member.bytes, 8);
    Put(out, member.bytes, 8);
  }
  if (member.big_offset()) Put(out, member.header_offset, 8);
}

void PutTrailer(std::string& out, std::uint64_t entries, std::uint64_t directory_offset,
                std::uint64_t directory_bytes) {
  out.append("PK\x06\x06"sv);
  Put(out, 44, 8);
  Put(out, 0x031E, 2);
  Put(out, 45, 2);
  Put(out, 0, 8);
  Put(out, entries, 8);
  Put(out, entries, 8);
  Put(out, directory_bytes, 8);
  Put(out, directory_offset, 8);
  out.append("PK\x06\x07"sv);
  Put(out, 0, 4);
  Put(out, directory_offset + directory_bytes, 8);
  Put(out, 1, 4);
  out.append("PK\x05\x06"sv);
  Put(out, 0, 4);
  Put(out, std::min<std::uint64_t>(entries, 0xFFFF), 2);
  Put(out, std::min<std::uint64_t>(entries, 0xFFFF), 2);
  Put(out, std::min(directory_bytes, kMax32), 4);
  Put(out, std::min(directory_offset, kMax32), 4);
  Put(out, 0, 2);
}

std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The members of a file in file order, added one after another.
class Members {
 public:
  Members(std::uint64_t pickle_bytes, std::size_t storage_count) {
    all_.reserve(storage_count + std::size(kHead) + 2);
    Append("data.pkl", pickle_bytes);
    for (const Small& small : kHead) Append(small.name, small.content.size());
    first_storage_ = all_.size();
  }

  // \pre `name` outlives this
  Result<Member> Add(std::string_view name, std::uint64_t bytes) {
    constexpr std::uint64_t kMaxEnd = std::uint64_t{1} << 62;
    if (end_ > kMaxEnd || bytes > kMaxEnd) {
      return Fail(Errc::kBadInput, "storages of more than 2^62 bytes in one file");
    }
    return Append(name, bytes);
  }

  const std::vector<Member>& all() const { return all_; }
  std::size_t first_storage() const { return first_storage_; }
  std::uint64_t end() const { return end_; }
  std::uint64_t directory_bytes() const {
    std::uint64_t bytes = 0;
    for (const Member& member : all_) bytes += member.entry_bytes();
    return bytes;
  }

 private:
  Member Append(std::string_view name, std::uint64_t bytes) {
    all_.push_back(Member{name, bytes, end_});
    end_ = all_.back().end();
    return all_.back();
  }

  std::vector<Member> all_;
  std::size_t first_storage_ = 0;
  std::uint64_t end_ = 0;
};

std::vector<std::string> StorageNames(std::size_t count) {
  std::vector<std::string> names;
  names.reserve(count);
  for (std::size_t key = 0; key < count; ++key) names.push_back("data/" + std::to_string(key));
  return names;
}

}  // namespace

Result<Layout> Layout::Make(const pickle::Node* root, std::span<const StorageSpec> storages) {
  std::vector<pickle::StorageUse> uses;
  uses.reserve(storages.size());
  Layout layout;
  for (const StorageSpec& spec : storages) {
    const DType dtype = spec.untyped ? DType::kU8 : spec.dtype;
    uses.push_back(pickle::StorageUse{{}, dtype, spec.untyped, spec.elems});
    SW_TRY_ASSIGN(const std::uint64_t bytes, CheckedMul(spec.elems, ItemSize(dtype)));
    layout.payloads_.push_back(Payload{0, bytes});
  }
  SW_TRY_ASSIGN(pickle::Dumped dumped, pickle::Dump(root, uses));
  layout.pickle_ = std::move(dumped.bytes);
  layout.pickle_crc_ = Crc32(BytesOf(layout.pickle_));
  layout.order_ = std::move(dumped.order);
  const std::vector<std::string> names = StorageNames(storages.size());
  Members members(layout.pickle_.size(), storages.size());
  for (std::size_t key = 0; key < names.size(); ++key) {
    Payload& payload = layout.payloads_[layout.order_[key]];
    SW_TRY_ASSIGN(const Member member, members.Add(names[key], payload.bytes));
    payload.offset = member.payload_offset();
  }
  SW_TRY(members.Add(kLast.name, kLast.content.size()));
  layout.file_bytes_ = members.end() + members.directory_bytes() + kTrailerBytes;
  return layout;
}

std::vector<Layout::Piece> Layout::Frame(std::span<const std::uint32_t> crcs) const {
  SW_CHECK(crcs.size() == payloads_.size());
  const std::vector<std::string> names = StorageNames(payloads_.size());
  Members members(pickle_.size(), payloads_.size());
  // Cannot fail, because Make has checked these sizes.
  for (std::size_t key = 0; key < names.size(); ++key) {
    SW_CHECK(members.Add(names[key], payloads_[order_[key]].bytes));
  }
  SW_CHECK(members.Add(kLast.name, kLast.content.size()));
  std::vector<Piece> pieces(1);
  std::string directory;
  for (std::size_t i = 0; i < members.all().size(); ++i) {
    const Member& member = members.all()[i];
    const std::size_t key = i - members.first_storage();
    PutLocalHeader(pieces.back().bytes, member);
    std::uint32_t crc = 0;
    if (i >= members.first_storage() && key < names.size()) {
      crc = member.bytes == 0 ? 0 : crcs[order_[key]];
      if (member.bytes != 0) pieces.push_back(Piece{member.payload_offset() + member.bytes, {}});
    } else {
      const std::string_view content = i == 0                        ? std::string_view(pickle_)
                                       : i < members.first_storage() ? kHead[i - 1].content
                                                                     : kLast.content;
      crc = i == 0 ? pickle_crc_ : Crc32(BytesOf(content));
      pieces.back().bytes.append(content);
    }
    PutDescriptor(pieces.back().bytes, member, crc);
    PutEntry(directory, member, crc);
  }
  pieces.back().bytes.append(directory);
  PutTrailer(pieces.back().bytes, members.all().size(), members.end(), directory.size());
  return pieces;
}

}  // namespace shardwright::torch_pt
