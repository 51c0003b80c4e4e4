// SPDX-License-Identifier: Apache-2.0
#include "files/zip/reader.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/zip/directory_internal.h"
#include "support/base/checked.h"
#include "support/base/crc32.h"
#include "support/base/limits.h"
#include "support/base/str_cat.h"

namespace shardwright::zip {

namespace {

using Bytes = std::span<const std::byte>;

constexpr std::uint32_t kLocalSignature = 0x04034B50;
constexpr std::uint64_t kLocalBytes = 30;
constexpr std::uint16_t kEncrypted = 0x2041;  // encrypted, strongly so, or masked headers
constexpr std::uint16_t kDescriptor = 0x0008;
constexpr std::uint64_t kGuessBytes = 128;     // a local header with name and padding
constexpr std::uint64_t kGapBytes = 16 << 10;  // gaps up to this size are read, not skipped
constexpr std::uint64_t kWindowBytes = std::uint64_t{256} << 10;

/// Returns the bytes with which all names begin.
std::size_t CommonBytes(const std::vector<Entry>& entries) {
  std::string_view common = entries.front().name;
  for (const Entry& entry : entries) {
    if (entry.name.starts_with(common)) continue;
    const auto [differs, end] =
        std::mismatch(common.begin(), common.end(), entry.name.begin(), entry.name.end());
    common = common.substr(0, static_cast<std::size_t>(differs - common.begin()));
  }
  return common.size();
}

/// A case-insensitive set of names for containers with many members: one buffer for all names,
/// without the bytes with which all of them begin.
class NameSet {
 public:
  /// \pre there are entries
  explicit NameSet(const std::vector<Entry>& entries)
      : common_(CommonBytes(entries)), slots_(std::bit_ceil(2 * entries.size())) {
    std::size_t bytes = 0;
    for (const Entry& entry : entries) bytes += entry.name.size() - common_;
    text_.resize(bytes + 1);  // for the pointer of an empty rest
  }

  /// Adds a name; returns false if it exists. \pre it is the name of an entry, each added once
  bool Insert(std::string_view name) {
    name.remove_prefix(common_);
    char* const first = text_.data() + used_;
    for (std::size_t i = 0; i < name.size(); ++i) {
      const char c = name[i];
      first[i] = static_cast<char>(c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c);
    }
    used_ += name.size();
    const std::string_view lower(first, name.size());
    std::size_t at = std::hash<std::string_view>()(lower) & (slots_.size() - 1);
    for (; slots_[at].data() != nullptr; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at] == lower) return false;
    }
    slots_[at] = lower;
    return true;
  }

 private:
  std::size_t common_;
  std::string text_;
  std::size_t used_ = 0;  // bytes of text_
  std::vector<std::string_view> slots_;
};

Status CheckEntry(const Entry& entry) {
  if ((entry.flags & kEncrypted) != 0) return BadInput("encrypted");
  if (entry.method == 0 && entry.bytes != entry.compressed_bytes) {
    return BadInput("stored, but its two sizes differ: ", entry.bytes, " and ",
                    entry.compressed_bytes);
  }
  return {};
}

// Checks that members follow one another before the directory. Uses only the directory; Locate
// checks exactly once local headers are read. Detects most bad files without reading these.
Status CheckOrder(const std::vector<Entry>& entries, std::uint64_t directory_offset) {
  NameSet names(entries);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = entries[i];
    if (Status fine = CheckEntry(entry); !fine) {
      return Within(StrCat("member ", entry.name), std::move(fine).error());
    }
    const bool last = i + 1 == entries.size();
    const std::uint64_t limit = last ? directory_offset : entries[i + 1].header_offset;
    const std::uint64_t fixed = kLocalBytes + entry.name.size();
    const bool fits = entry.header_offset <= limit && limit - entry.header_offset >= fixed &&
                      limit - entry.header_offset - fixed >= entry.compressed_bytes;
    if (!fits) {
      return BadInput("member ", entry.name, " of ", entry.compressed_bytes, " bytes at ",
                      entry.header_offset, " overlaps the data at ", limit);
    }
    if (!names.Insert(entry.name)) {
      return BadInput("member ", entry.name, " appears twice");
    }
  }
  return {};
}

// Reads local headers in file order; nearby small members share one read.
class Window {
 public:
  Window(const files::Part& file, const std::vector<Entry>& entries, std::uint64_t end)
      : file_(file), entries_(entries), end_(end) {}

  // Returns the fixed part and the name of entry i's local header. \pre CheckOrder has passed
  Result<Bytes> Header(std::size_t i) {
    const std::uint64_t offset = entries_[i].header_offset;
    const std::uint64_t bytes = kLocalBytes + entries_[i].name.size();
    const bool inside = offset >= first_ && offset - first_ <= buffer_.size() &&
                        buffer_.size() - (offset - first_) >= bytes;
    if (!inside) {
      buffer_.resize(std::min(std::max(bytes, Reach(i)), end_ - offset));
      first_ = offset;
      SW_TRY(file_.ReadAt(offset, buffer_));
    }
    return Bytes(buffer_).subspan(offset - first_, bytes);
  }

 private:
  // Returns the number of bytes to read from entry i on.
  std::uint64_t Reach(std::size_t i) const {
    const std::uint64_t first = entries_[i].header_offset;
    std::uint64_t end = first + kGuessBytes;
    for (std::size_t next = i + 1; next < entries_.size(); ++next) {
      const std::uint64_t at = entries_[next].header_offset;
      if (at > end + kGapBytes || at + kGuessBytes - first > kWindowBytes) break;
      end = at + kGuessBytes;
    }
    return end - first;
  }

  const files::Part& file_;
  const std::vector<Entry>& entries_;
  std::uint64_t end_ = 0;
  std::uint64_t first_ = 0;
  std::vector<std::byte> buffer_;
};

Status CheckLocal(Bytes header, const Entry& entry) {
  if (U32(header, 0) != kLocalSignature)
    return BadInput("no local header at the offset in the directory");
  if (U16(header, 6) != entry.flags || U16(header, 8) != entry.method) {
    return BadInput("local header and directory disagree on flags or method");
  }
  if (U16(header, 26) != entry.name.size()) {
    return BadInput("local header and directory disagree on the name");
  }
  // With a data descriptor these fields are zero; in zip64 they do not contain the sizes.
  const bool descriptor = (entry.flags & kDescriptor) != 0;
  const auto says = [&](std::size_t at, std::uint64_t value) {
    return U32(header, at) == value || (descriptor && U32(header, at) == 0);
  };
  const bool zip64 = U32(header, 22) == 0xFFFFFFFF;
  const bool agree = says(14, entry.crc32) &&
                     (zip64 || (says(22, entry.bytes) && says(18, entry.compressed_bytes)));
  if (!agree) return BadInput("local header and directory disagree on size or CRC");
  return {};
}

/// Locates a member's payload.
Status Locate(Bytes header, const Entry& entry, std::uint64_t limit, Member& member) {
  SW_TRY(CheckLocal(header, entry));
  const std::string_view name(reinterpret_cast<const char*>(header.data()) + kLocalBytes,
                              entry.name.size());
  if (name != entry.name) return BadInput("local header and directory disagree on the name");
  member.name = entry.name;
  member.header_offset = entry.header_offset;
  member.payload_offset = entry.header_offset + header.size() + U16(header, 28);
  member.bytes = entry.bytes;
  member.method = entry.method;
  member.crc32 = entry.crc32;
  if (member.payload_offset > limit || limit - member.payload_offset < entry.compressed_bytes) {
    return BadInput(entry.compressed_bytes, " bytes at ", member.payload_offset,
                    " overlap the data at ", limit);
  }
  return {};
}

Result<Container> Read(const files::Part& file) {
  SW_TRY_ASSIGN(const std::uint64_t file_bytes, file.Bytes());
  SW_TRY_ASSIGN(Directory directory, ReadDirectory(file, file_bytes));
  std::vector<Entry>& entries = directory.entries;
  const auto earlier = [](const Entry& a, const Entry& b) {
    return a.header_offset < b.header_offset;
  };
  if (!std::is_sorted(entries.begin(), entries.end(), earlier)) {
    std::sort(entries.begin(), entries.end(), earlier);
  }
  SW_TRY(CheckOrder(entries, directory.offset));
  Container container;
  container.file_bytes = file_bytes;
  container.members.resize(entries.size());
  Window window(file, entries, directory.offset);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const bool last = i + 1 == entries.size();
    const std::uint64_t limit = last ? directory.offset : entries[i + 1].header_offset;
    SW_TRY_ASSIGN(const Bytes header, window.Header(i));
    if (Status located = Locate(header, entries[i], limit, container.members[i]); !located) {
      return Within(StrCat("member ", entries[i].name), std::move(located).error());
    }
  }
  container.text = std::move(directory.bytes);
  return container;
}

}  // namespace

const Member* Container::Find(std::string_view name) const {
  for (const Member& member : members) {
    if (member.name == name) return &member;
  }
  return nullptr;
}

Result<Container> ReadContainer(const files::Part& file) {
  Result<Container> container = Read(file);
  // Errors of os::File already contain the file's name.
  if (!container && !container.error().message.starts_with(file.path())) {
    return Within(file.path(), std::move(container).error());
  }
  return container;
}

Status CheckStored(const Member& member) {
  if (member.method == 0) return {};
  return Fail(Errc::kUnsupported, "member ", member.name, " is compressed (method ", member.method,
              "): only stored members are read");
}

Result<std::string> ReadMember(const files::Part& file, const Member& member,
                               std::uint64_t max_bytes) {
  const std::string where = StrCat(file.path(), ": member ", member.name);
  if (Status stored = CheckStored(member); !stored) {
    return Within(file.path(), std::move(stored).error());
  }
  if (member.bytes > max_bytes) {
    return Fail(Errc::kLimit, where, ": ", member.bytes, " bytes, at most ", max_bytes,
                " are read");
  }
  std::string bytes(member.bytes, '\0');
  const std::span<std::byte> out = std::as_writable_bytes(std::span(bytes));
  SW_TRY(file.ReadAt(member.payload_offset, out));
  if (member.crc32 != 0 && Crc32(out) != member.crc32) {
    return Fail(Errc::kBadInput, where, ": wrong CRC-32: the file is damaged");
  }
  return bytes;
}

}  // namespace shardwright::zip
