// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "files/utf8.h"
#include "files/zip/directory_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/str_cat.h"

namespace shardwright::zip {

namespace {

using Bytes = std::span<const std::byte>;

constexpr std::uint32_t kEntrySignature = 0x02014B50;
constexpr std::uint32_t kEndSignature = 0x06054B50;
constexpr std::uint32_t kEnd64Signature = 0x06064B50;
constexpr std::uint32_t kLocatorSignature = 0x07064B50;
constexpr std::uint64_t kEntryBytes = 46;
constexpr std::uint64_t kEndBytes = 22;
constexpr std::uint64_t kEnd64Bytes = 56;
constexpr std::uint64_t kLocatorBytes = 20;
constexpr std::uint64_t kTailBytes = std::uint64_t{64} << 10;
constexpr std::uint64_t kShortTailBytes = 2048;  // including the directory of a few entries
constexpr std::uint16_t kZip64Id = 1;
constexpr std::uint16_t kUnicodeNameId = 0x7075;
constexpr unsigned kVersionMost = 63;  // maximum format version that members need, in tenths

std::uint64_t Narrow(std::uint64_t value, std::uint64_t max) { return std::min(value, max); }

// Position of the directory, and its number of entries.
struct Place {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t entries = 0;
  std::uint64_t end = 0;  // start of the record after the directory
};

// The end of the file: it contains the end record and usually the whole directory.
struct Tail {
  std::vector<std::byte> bytes;
  std::uint64_t offset = 0;
};

Result<Tail> ReadTail(const files::Part& file, std::uint64_t file_bytes, std::uint64_t wanted) {
  Tail tail;
  tail.bytes.resize(Narrow(file_bytes, wanted));
  tail.offset = file_bytes - tail.bytes.size();
  SW_TRY(file.ReadAt(tail.offset, tail.bytes));
  return tail;
}

// Returns the position of the end record: the last one in the tail, as in torch and Python,
// since a comment may cover an earlier one. Its comment must end exactly at the end of the file.
std::optional<std::size_t> FindEndRecord(Bytes tail) {
  for (std::size_t at = tail.size() - kEndBytes + 1; at-- > 0;) {
    if (U32(tail, at) != kEndSignature) continue;
    if (at + kEndBytes + U16(tail, at + 20) != tail.size()) break;
    return at;
  }
  return std::nullopt;
}

Result<Place> ReadPlace64(const files::Part& file, Bytes locator, Bytes end, std::uint64_t end_at) {
  Place place;
  place.end = U64(locator, 8);
  const std::uint64_t locator_at = end_at - kLocatorBytes;
  if (U32(locator, 4) != 0 || U32(locator, 16) > 1) return BadInput("multi-disk zip file");
  if (place.end > locator_at || locator_at - place.end < kEnd64Bytes) {
    return BadInput("zip64 end record is outside the file");
  }
  std::vector<std::byte> record(kEnd64Bytes);
  SW_TRY(file.ReadAt(place.end, record));
  if (U32(record, 0) != kEnd64Signature) return BadInput("zip64 end record not found");
  if (U64(record, 4) != locator_at - place.end - 12)
    return BadInput("wrong size of the zip64 end record");
  if (U32(record, 16) != 0 || U32(record, 20) != 0) return BadInput("multi-disk zip file");
  place.entries = U64(record, 32);
  place.bytes = U64(record, 40);
  place.offset = U64(record, 48);
  if (U64(record, 24) != place.entries) return BadInput("multi-disk zip file");
  // A number that both records can store must be the same in both.
  const bool agree = (U16(end, 10) == 0xFFFF || U16(end, 10) == place.entries) &&
                     (U32(end, 12) == 0xFFFFFFFF || U32(end, 12) == place.bytes) &&
                     (U32(end, 16) == 0xFFFFFFFF || U32(end, 16) == place.offset);
  if (!agree) return BadInput("the two end records of the zip file disagree");
  return place;
}

Result<Place> ReadPlace(const files::Part& file, const Tail& tail, std::size_t at) {
  const Bytes end = Bytes(tail.bytes).subspan(at, kEndBytes);
  const std::uint64_t end_at = tail.offset + at;
  if (end_at >= kLocatorBytes) {
    std::vector<std::byte> locator(kLocatorBytes);
    SW_TRY(file.ReadAt(end_at - kLocatorBytes, locator));
    if (U32(locator, 0) == kLocatorSignature) return ReadPlace64(file, locator, end, end_at);
  }
  if (U16(end, 4) != 0 || U16(end, 6) != 0 || U16(end, 8) != U16(end, 10)) {
    return BadInput("multi-disk zip file");
  }
  return Place{U32(end, 16), U32(end, 12), U16(end, 10), end_at};
}

Status CheckPlace(const Place& place) {
  const Result<std::uint64_t> sum = CheckedAdd(place.offset, place.bytes);
  if (!sum || *sum != place.end) {
    return BadInput("central directory of ", place.bytes, " bytes at ", place.offset,
                    " does not end at ", place.end);
  }
  if (place.bytes > limits::kZipDirectoryBytes || place.entries > limits::kZipRecords) {
    return Fail(Errc::kLimit, "central directory of ", place.entries, " members in ", place.bytes,
                " bytes");
  }
  if (place.entries == 0) return BadInput("zip file without members");
  if (place.bytes / kEntryBytes < place.entries) {
    return BadInput("central directory of ", place.bytes, " bytes cannot hold ", place.entries,
                    " members");
  }
  return {};
}

// Checks an extra field with the name in UTF-8: some readers use that name, others ignore it.
bool IsOtherName(Bytes field, std::string_view name) {
  constexpr std::size_t kHead = 5;  // version of the field and CRC-32 of the name
  if (field.size() < kHead) return false;
  field = field.subspan(kHead);
  return std::string_view(reinterpret_cast<const char*>(field.data()), field.size()) != name;
}

// Sets the sizes and the offset that do not fit in the 32-bit fields
// of an entry. Fails if a field has another name than the entry.
Status ReadExtra(Bytes extra, Entry& entry) {
  constexpr std::uint32_t kElsewhere = 0xFFFFFFFF;
  bool found = false;
  while (!extra.empty()) {
    if (extra.size() < 4 || extra.size() - 4 < U16(extra, 2))
      return BadInput("malformed extra field");
    const std::uint16_t id = U16(extra, 0);
    Bytes body = extra.subspan(4, U16(extra, 2));
    extra = extra.subspan(4 + body.size());
    if (id == kUnicodeNameId && IsOtherName(body, entry.name)) {
      return BadInput("an extra field gives another name");
    }
    if (id != kZip64Id) continue;
    if (found) return BadInput("two zip64 fields");
    found = true;
    for (std::uint64_t* field : {&entry.bytes, &entry.compressed_bytes, &entry.header_offset}) {
      if (*field != kElsewhere) continue;
      if (body.size() < 8) return BadInput("zip64 field too short");
      *field = U64(body, 0);
      body = body.subspan(8);
      if (*field >> 63 != 0) return BadInput("zip64 value above 2^63");
    }
  }
  const bool missing = !found && (entry.bytes == kElsewhere || entry.header_offset == kElsewhere ||
                                  entry.compressed_bytes == kElsewhere);
  if (missing) return BadInput("zip64 field missing");
  return {};
}

/// Characters that no name has.
constexpr std::array<bool, 256> kUnsafe = [] {
  std::array<bool, 256> unsafe{};
  for (std::size_t c = 0; c < 0x20; ++c) unsafe[c] = true;
  for (const char c : {'\\', ':', '\x7F'}) unsafe[static_cast<unsigned char>(c)] = true;
  return unsafe;
}();

/// Checks a name, or its rest after a slash.
bool IsSafeRest(std::string_view name) {
  const auto is_dots = [](std::string_view part) { return part == "." || part == ".."; };
  bool unsafe = false;
  std::size_t first = 0;  // of the current part
  for (std::size_t i = 0; i < name.size(); ++i) {
    unsafe |= kUnsafe[static_cast<unsigned char>(name[i])];
    if (name[i] != '/') continue;
    const std::string_view part = name.substr(first, i - first);
    // An empty part is a leading or a double slash; a trailing slash marks a folder.
    if (part.empty() || is_dots(part)) return false;
    first = i + 1;
  }
  if (unsafe || is_dots(name.substr(first))) return false;
  return IsUtf8(name, Surrogates::kRefuse);
}

/// Checks the names of members. The folder of the name before is not checked again.
class NameCheck {
 public:
  bool IsSafe(std::string_view name) {
    const std::size_t known = name.starts_with(folder_) ? folder_.size() : 0;
    if (name.empty() || !IsSafeRest(name.substr(known))) return false;
    folder_ = name.substr(0, name.rfind('/') + 1);
    return true;
  }

 private:
  std::string_view folder_;  // safe; ends in a slash, or is empty
};

// Parses the entry at the start of `rest` and moves past it.
Status TakeEntry(Bytes& rest, NameCheck& names, Entry& entry) {
  if (rest.size() < kEntryBytes || U32(rest, 0) != kEntrySignature) {
    return BadInput("malformed central directory");
  }
  const std::size_t name_bytes = U16(rest, 28);
  const std::size_t extra_bytes = U16(rest, 30);
  const std::size_t all = kEntryBytes + name_bytes + extra_bytes + U16(rest, 32);
  if (rest.size() < all) return BadInput("malformed central directory");
  entry.name = {reinterpret_cast<const char*>(rest.data()) + kEntryBytes, name_bytes};
  if (!names.IsSafe(entry.name)) return BadInput("unsafe name of a member");
  if (const auto needed = std::to_integer<unsigned>(rest[6]); needed > kVersionMost) {
    return Fail(Errc::kUnsupported, "member ", entry.name, " needs version ", needed / 10, ".",
                needed % 10, " of zip");
  }
  entry.flags = U16(rest, 8);
  entry.method = U16(rest, 10);
  entry.crc32 = U32(rest, 16);
  entry.compressed_bytes = U32(rest, 20);
  entry.bytes = U32(rest, 24);
  entry.header_offset = U32(rest, 42);
  const std::uint16_t disk = U16(rest, 34);
  if (disk != 0 && disk != 0xFFFF) return BadInput("multi-disk zip file");
  if (Status read = ReadExtra(rest.subspan(kEntryBytes + name_bytes, extra_bytes), entry); !read) {
    return Within(StrCat("member ", entry.name), std::move(read).error());
  }
  rest = rest.subspan(all);
  return {};
}

}  // namespace

Result<Directory> ReadDirectory(const files::Part& file, std::uint64_t file_bytes) {
  if (file_bytes < kEndBytes) return BadInput("central directory not found: file is truncated");
  SW_TRY_ASSIGN(Tail tail, ReadTail(file, file_bytes, kShortTailBytes));
  std::optional<std::size_t> at = FindEndRecord(tail.bytes);
  if (!at) {  // after a long comment, which is rare
    SW_TRY_ASSIGN(tail, ReadTail(file, file_bytes, kTailBytes + kEndBytes));
    at = FindEndRecord(tail.bytes);
  }
  if (!at)
    return BadInput("central directory not found: file is truncated or has bytes after its end");
  SW_TRY_ASSIGN(const Place place, ReadPlace(file, tail, *at));
  SW_TRY(CheckPlace(place));
  Directory directory;
  directory.offset = place.offset;
  std::size_t skipped = 0;
  if (place.offset >= tail.offset) {
    directory.bytes = std::move(tail.bytes);
    skipped = place.offset - tail.offset;
  } else {
    directory.bytes.resize(place.bytes);
    SW_TRY(file.ReadAt(place.offset, directory.bytes));
  }
  Bytes rest = Bytes(directory.bytes).subspan(skipped, place.bytes);
  directory.entries.resize(place.entries);
  NameCheck names;
  for (Entry& entry : directory.entries) SW_TRY(TakeEntry(rest, names, entry));
  if (!rest.empty()) return BadInput("central directory holds more than its members");
  return directory;
}

}  // namespace shardwright::zip
