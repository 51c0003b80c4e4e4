// SPDX-License-Identifier: Apache-2.0
// Mutates zip archives as lists of members and writes them with matching checksums and sizes.

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "fuzz/mutate/mutate.h"
#include "support/base/crc32.h"

namespace shardwright::fuzz {
namespace {

using std::string_view_literals::operator""sv;

constexpr auto kLocal = "PK\3\4"sv, kCentral = "PK\1\2"sv, kEnd = "PK\5\6"sv;

struct Member {
  std::string name;
  std::string bytes;  // as stored
  std::uint16_t method = 0;
  std::uint32_t crc = 0;
  std::uint32_t whole = 0;  // bytes when unpacked
};

/// A number of `bytes` bytes at `at`; 0 beyond the end.
std::uint64_t Field(std::string_view text, std::size_t at, std::size_t bytes) {
  return at < text.size() ? Number(text.substr(at, bytes)) : 0;
}

std::optional<std::vector<Member>> MembersOf(std::string_view zip) {
  const std::size_t end = zip.rfind(kEnd);
  if (end == std::string_view::npos) return {};
  std::vector<Member> members;
  std::size_t at = Field(zip, end + 16, 4);
  for (std::size_t left = Field(zip, end + 10, 2); left > 0; --left) {
    if (at >= zip.size() || zip.substr(at, 4) != kCentral) return {};
    const std::size_t name = Field(zip, at + 28, 2);
    const std::size_t local = Field(zip, at + 42, 4);
    const std::size_t packed = Field(zip, at + 20, 4);
    const std::size_t first = local + 30 + Field(zip, local + 26, 2) + Field(zip, local + 28, 2);
    if (first > zip.size() || packed > zip.size() - first || at + 46 > zip.size()) return {};
    members.push_back({.name = std::string(zip.substr(at + 46, name)),
                       .bytes = std::string(zip.substr(first, packed)),
                       .method = static_cast<std::uint16_t>(Field(zip, at + 10, 2)),
                       .crc = static_cast<std::uint32_t>(Field(zip, at + 16, 4)),
                       .whole = static_cast<std::uint32_t>(Field(zip, at + 24, 4))});
    at += 46 + name + Field(zip, at + 30, 2) + Field(zip, at + 32, 2);
  }
  if (members.empty()) return {};
  return members;
}

constexpr std::array kNames = {"a/data.pkl"sv,
                               "archive/data.pkl"sv,
                               "a/byteorder"sv,
                               "archive/version"sv,
                               "a/data/0"sv,
                               "archive/data/1"sv,
                               "archive/data/18446744073709551616"sv,
                               "a/.data/serialization_id"sv,
                               "../data.pkl"sv,
                               "/etc/x"sv,
                               "a/data/"sv,
                               "a//data/0"sv,
                               "a\\data.pkl"sv,
                               ""sv};

void Change(Member* member, Chance& chance) {
  if (member->method != 0) {
    member->bytes = chance.Change(std::move(member->bytes));
    return;
  }
  member->bytes = member->name.ends_with(".pkl") ? MutatePickle(member->bytes, chance)
                                                 : chance.Change(std::move(member->bytes));
  member->crc = Crc32(std::as_bytes(std::span(member->bytes)));
  member->whole = static_cast<std::uint32_t>(member->bytes.size());
}

void Change(std::vector<Member>* members, Chance& chance) {
  const auto at = members->begin() + static_cast<std::ptrdiff_t>(chance.Below(members->size()));
  const auto other = members->begin() + static_cast<std::ptrdiff_t>(chance.Below(members->size()));
  switch (chance.Below(8)) {
    case 0:
      if (members->size() > 1) members->erase(at);
      break;
    case 1:
      members->push_back(*at);
      break;
    case 2:
      std::iter_swap(at, other);
      break;
    case 3:
      at->name = chance.OneIn(2) ? chance.Change(at->name) : kNames[chance.Below(kNames.size())];
      break;
    case 4:
      at->method = chance.OneIn(2) ? 8 : static_cast<std::uint16_t>(chance.Odd());
      break;
    default:
      Change(&*at, chance);
      break;
  }
}

/// Half of the archives align their bytes to 64 as PyTorch does, with padding in an extra field.
std::string Written(const std::vector<Member>& members, Chance& chance) {
  const bool aligned = chance.OneIn(2);
  const bool zip64 = chance.OneIn(4);
  std::string zip;
  std::string directory;
  for (const Member& member : members) {
    const std::string sums = Little(member.crc, 4) + Little(member.bytes.size(), 4) +
                             Little(member.whole, 4) + Little(member.name.size(), 2);
    const std::size_t start = zip.size() + 30 + member.name.size();
    const std::size_t padding = aligned ? (64 - (start + 4) % 64) % 64 : 0;
    const std::string extra = aligned ? "FB" + Little(padding, 2) + std::string(padding, 'Z') : "";
    const std::string version = Little(zip64 ? 45 : 20, 2);
    const std::string head = version + Little(0, 2) + Little(member.method, 2) + Little(0, 4);
    directory.append(kCentral).append(Little(20, 2)).append(head).append(sums);
    directory += std::string(12, '\0') + Little(zip.size(), 4) + member.name;
    zip.append(kLocal).append(head).append(sums).append(Little(extra.size(), 2));
    zip += member.name + extra + member.bytes;
  }
  const std::size_t at = zip.size();
  const std::string count = Little(members.size(), 2);
  zip += directory;
  if (zip64) {
    const std::size_t record = zip.size();
    zip += "PK\6\6" + Little(44, 8) + Little(45, 2) + Little(45, 2) + Little(0, 8) +
           Little(members.size(), 8) + Little(members.size(), 8) + Little(directory.size(), 8) +
           Little(at, 8);
    zip += "PK\6\7" + Little(0, 4) + Little(record, 8) + Little(1, 4);
  }
  zip.append(kEnd).append(Little(0, 4)).append(count).append(count);
  return zip + Little(directory.size(), 4) + Little(at, 4) + Little(0, 2);
}

/// One field of one head becomes another number.
void Lie(std::string* zip, Chance& chance) {
  std::vector<std::size_t> heads;
  for (std::size_t at = zip->find("PK"); at != std::string::npos; at = zip->find("PK", at + 1)) {
    heads.push_back(at);
  }
  if (heads.empty()) return;
  const std::size_t at = heads[chance.Below(heads.size())] + 4 + chance.Below(42);
  const std::size_t bytes = chance.OneIn(2) ? 2 : 4;
  if (at + bytes > zip->size()) return;
  const std::uint64_t before = Field(*zip, at, bytes);
  zip->replace(at, bytes, Little(chance.OneIn(2) ? chance.Odd() : before + 1, bytes));
}

}  // namespace

std::string MutateZip(std::string_view bytes, Chance& chance) {
  std::optional<std::vector<Member>> members = MembersOf(bytes);
  if (!members) return chance.Change(std::string(bytes));
  for (std::size_t i = 1 + chance.Below(2); i > 0; --i) Change(&*members, chance);
  std::string zip = Written(*members, chance);
  if (chance.OneIn(3)) Lie(&zip, chance);
  return zip;
}

}  // namespace shardwright::fuzz
