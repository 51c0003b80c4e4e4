// SPDX-License-Identifier: Apache-2.0
#include "files/safetensors/header.h"

#include <algorithm>
#include <array>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "files/safetensors/dtypes_internal.h"
#include "files/safetensors/header_sax_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/memory.h"
#include "support/base/text.h"

namespace shardwright::safetensors {
namespace {

constexpr std::string_view kSpaces = " \t\r\n";
// Memory that a command uses per tensor in total: entry,
// parameter, rule, logical tensor, plan, listing, report.
constexpr std::uint64_t kTensorBytes = 3584;
// Additional memory per distinct shape: the cuts of source and target.
constexpr std::uint64_t kShapeBytes = 1536;

constexpr std::uint64_t kExtent = std::uint64_t{1} << 62;

/// Identifies another kind of file by its first bytes, for messages; empty if it is unknown.
std::string_view OtherKind(std::string_view first) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kKinds = {
      {{"version ", "a pointer of Git LFS: the file itself has not been fetched"},
       {"PK\x03\x04", "a zip archive, such as torch.save writes"},
       {"\x80\x02", "a pickle"},
       {"\x80\x04", "a pickle"},
       {"<!DOCTYP", "a web page"},
       {"<html", "a web page"}}};
  for (const auto& [begin, kind] : kKinds) {
    if (first.starts_with(begin)) return kind;
  }
  return {};
}

std::string Named(const std::string& name) { return "tensor " + Quoted(name); }

const TypeInfo* TypeOf(DType dtype) {
  const auto* const found = std::find_if(kTypes.begin(), kTypes.end(),
                                         [&](const TypeInfo& t) { return t.dtype == dtype; });
  return found == kTypes.end() ? nullptr : found;
}

/// Returns the bytes of a dense tensor. Checks all extents, even if one of them is zero.
Result<std::uint64_t> BytesOf(const TypeInfo& type, const Shape& shape) {
  std::uint64_t most = type.bits;
  bool empty = false;
  for (const std::uint64_t extent : shape) {
    empty = empty || extent == 0;
    if (extent > kExtent) return Fail(Errc::kBadInput, "an extent above 2^62");
    SW_TRY_ASSIGN(most, CheckedMul(most, std::max<std::uint64_t>(extent, 1)));
  }
  if (empty) return 0;
  if (most % 8 != 0) {
    return Fail(Errc::kBadInput, most, " bits are not a whole number of bytes");
  }
  return most / 8;
}

/// Converts and checks one entry of the header by itself.
Result<Entry> EntryOf(RawEntry raw) {
  Entry entry;
  const auto* const type = std::find_if(kTypes.begin(), kTypes.end(),
                                        [&](const TypeInfo& t) { return t.word == raw.dtype; });
  if (type == kTypes.end()) {
    return Fail(Errc::kUnsupported, Named(raw.name), ": unknown dtype \"", raw.dtype, "\"");
  }
  entry.dtype = type->dtype;
  const auto bytes = BytesOf(*type, raw.shape);
  if (!bytes) {
    return Within(Named(raw.name) + ": shape " + ToString(raw.shape) + " of " + raw.dtype,
                  bytes.error());
  }
  if (raw.first > raw.last || raw.last - raw.first != *bytes) {
    return Fail(Errc::kBadInput, Named(raw.name), ": ", *bytes, " bytes expected from shape ",
                ToString(raw.shape), " of ", raw.dtype, ", found data_offsets [", raw.first, ", ",
                raw.last, "]");
  }
  entry.name = std::move(raw.name);
  entry.shape = std::move(raw.shape);
  entry.offset = raw.first;
  entry.bytes = *bytes;
  return entry;
}

/// Checks that the entries, sorted by offset, fill [0, data_bytes) exactly once.
Status CheckCover(const std::vector<Entry>& entries, std::uint64_t data_bytes) {
  std::uint64_t end = 0;
  std::uint64_t most = 0;
  for (const Entry& entry : entries) most = std::max(most, entry.offset + entry.bytes);
  if (most > data_bytes) {
    return Fail(Errc::kBadInput, "truncated: ", most,
                " bytes of tensors expected from the header, found ", data_bytes);
  }
  const Entry* before = nullptr;
  for (const Entry& entry : entries) {
    if (entry.offset != end) {
      const std::string what =
          entry.offset < end ? std::string(": overlaps the data before it")
                             : StrCat(": a hole of ", entry.offset - end, " bytes precedes it");
      return Fail(Errc::kBadInput, Named(entry.name), what,
                  (before == nullptr ? "" : ", after " + Named(before->name)));
    }
    end += entry.bytes;
    before = &entry;
  }
  if (end != data_bytes) {
    return Fail(Errc::kBadInput, data_bytes - end, " bytes follow the last tensor");
  }
  return {};
}

/// Returns a name that two entries have, or null.
const std::string* Repeated(const std::vector<Entry>& entries) {
  std::vector<const std::string*> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(&entry.name);
  std::sort(names.begin(), names.end(), [](const auto* a, const auto* b) { return *a < *b; });
  const auto twice = std::adjacent_find(names.begin(), names.end(),
                                        [](const auto* a, const auto* b) { return *a == *b; });
  return twice == names.end() ? nullptr : *twice;
}

}  // namespace

std::string_view Word(DType dtype) {
  const TypeInfo* type = TypeOf(dtype);
  return type == nullptr ? std::string_view() : type->word;
}

Result<Shape> ElemShape(const Entry& entry) {
  const TypeInfo* type = TypeOf(entry.dtype);
  SW_CHECK(type != nullptr);
  const std::uint64_t together = ValuesTogether(type->bits);
  Shape shape = entry.shape;
  if (together == 1) return shape;
  if (shape.empty() || shape.back() % together != 0) {
    return Fail(Errc::kUnsupported, Named(entry.name), ": rows of ", type->word,
                " that do not fill whole bytes: shape ", ToString(entry.shape));
  }
  shape.back() = shape.back() / together * (together * type->bits / 8);
  return shape;
}

Result<HeaderText> ReadHeaderText(const os::File& file) {
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  std::string prefix(std::min(identity.bytes, kLengthBytes + 1), '\0');
  SW_TRY(file.ReadAt(0, std::as_writable_bytes(std::span(prefix))));
  std::uint64_t header_bytes = 0;
  for (std::size_t i = std::min<std::size_t>(prefix.size(), kLengthBytes); i-- > 0;) {
    header_bytes = header_bytes << 8 | static_cast<std::uint8_t>(prefix[i]);
  }
  // The first bytes of a pickle may look like a plausible header length: 640, for example.
  const bool fits =
      identity.bytes >= kLengthBytes + 2 && header_bytes <= identity.bytes - kLengthBytes;
  const bool ours =
      fits && (prefix.back() == '{' || kSpaces.find(prefix.back()) != std::string_view::npos);
  if (const std::string_view kind = OtherKind(prefix); !ours && !kind.empty()) {
    return Fail(Errc::kBadInput, "not a safetensors file, but ", kind);
  }
  if (identity.bytes < kLengthBytes + 2) {
    return Fail(Errc::kBadInput, "not a safetensors file: only ", identity.bytes, " bytes long");
  }
  if (header_bytes > limits::kSafetensorsHeaderBytes) {
    // Up to a few times the cap, the file was probably not split; larger values are not a length.
    return Fail(fits ? Errc::kLimit : Errc::kBadInput,
                fits ? "" : "not a safetensors file: ", "a header of ", header_bytes,
                " bytes, at most ", limits::kSafetensorsHeaderBytes);
  }
  if (header_bytes < 2 || !fits) {
    return Fail(Errc::kBadInput, "not a safetensors file, or truncated: a header of ", header_bytes,
                " bytes in a file of ", identity.bytes);
  }
  HeaderText header;
  header.file_bytes = identity.bytes;
  header.text.resize(header_bytes);
  SW_TRY(file.ReadAt(kLengthBytes, std::as_writable_bytes(std::span(header.text))));
  return header;
}

Result<Header> ParseHeader(const HeaderText& source) {
  const std::string_view text = source.text;
  if (text.size() > limits::kSafetensorsHeaderBytes ||
      text.size() + kLengthBytes > source.file_bytes) {
    return Fail(Errc::kBadInput, "a header of ", text.size(), " bytes in a file of ",
                source.file_bytes);
  }
  const std::size_t first = text.find_first_not_of(kSpaces);
  if (first == std::string_view::npos || text[first] != '{') {
    return Fail(Errc::kBadInput, "not a safetensors file: its header does not begin with {");
  }
  // The parser would treat a NUL as the end of the text.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return Fail(Errc::kBadInput, "header: invalid JSON at byte ", nul + 1, ": NUL");
  }
  Header header;
  if (first > 0) header.warnings.emplace_back("the header has white space before its {");
  if (const std::size_t last = text.find_last_of('}'); last != std::string_view::npos) {
    if (text.find_first_not_of(' ', last + 1) != std::string_view::npos) {
      header.warnings.emplace_back("the header has bytes other than spaces after its }");
    }
  }
  TextBudget budget(text.size());
  std::set<Shape> shapes;
  const auto add = [&](RawEntry one) -> Status {
    const std::uint64_t shape_bytes = shapes.insert(one.shape).second ? kShapeBytes : 0;
    if (!budget.Take(kTensorBytes + shape_bytes + BlockBytes(one.name.size()))) {
      return budget.Exceeded("header");
    }
    SW_TRY_ASSIGN(Entry entry, EntryOf(std::move(one)));
    header.entries.push_back(std::move(entry));
    return {};
  };
  SW_TRY_ASSIGN(RawHeader raw, ParseRaw(text, add, &budget));
  header.metadata = std::move(raw.metadata);
  if (!raw.unknown_field.empty()) {
    header.warnings.push_back("the header has fields that the format does not define, such as " +
                              raw.unknown_field);
  }
  if (const std::string* name = Repeated(header.entries)) {
    return Fail(Errc::kBadInput, Named(*name), ": appears twice in the header");
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const Entry& a, const Entry& b) {
    // Sort empty tensors at the same offset by name.
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  const std::uint64_t data_first = kLengthBytes + text.size();
  SW_TRY(CheckCover(header.entries, source.file_bytes - data_first));
  for (Entry& entry : header.entries) entry.offset += data_first;
  return header;
}

Result<Header> ReadHeader(const os::File& file) {
  const auto text = ReadHeaderText(file);
  if (!text) return Within(file.path(), text.error());
  auto header = ParseHeader(*text);
  if (!header) return Within(file.path(), header.error());
  return header;
}

}  // namespace shardwright::safetensors
