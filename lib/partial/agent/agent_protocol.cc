// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_protocol.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <utility>

#include "engine/plan/plan.h"
#include "partial/store/write_blobs.h"
#include "support/base/bytes.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kSendBytes = std::uint64_t{1} << 20;
/// Number of bytes that are received and counted at once.
constexpr std::size_t kPieceBytes = std::size_t{64} << 10;
constexpr std::size_t kPieceUnits = 1024;

/// Checks the lengths of units: each at most a unit's size, together the blob.
Status CheckUnits(const std::vector<std::uint32_t>& units, const BlobRef& expected,
                  const std::string& where) {
  std::uint64_t sum = 0;
  for (const std::uint32_t bytes : units) {
    if (bytes == 0 || bytes > plan::kUnitBytes) {
      return Fail(Errc::kBadInput, where, ": unit of 1 to ", plan::kUnitBytes,
                  " bytes expected, found ", bytes);
    }
    sum += bytes;
  }
  if (sum == expected.bytes) return {};
  return Fail(Errc::kBadInput, where, ": units of ", expected.bytes,
              " bytes in total expected, found ", sum);
}

/// Receives the lengths of units. Counts memory for their checksums too: units may be tiny.
Result<std::vector<std::uint32_t>> ReceiveUnits(os::Connection& connection, std::uint64_t count,
                                                Counted* counted) {
  std::vector<std::uint32_t> units;
  while (units.size() < count) {
    std::array<std::byte, 4 * kPieceUnits> raw;
    const std::size_t some = std::min<std::size_t>(count - units.size(), kPieceUnits);
    SW_TRY(counted->Grow(some * (sizeof(std::uint32_t) + sizeof(exec::UnitSum))));
    SW_TRY(connection.Receive(std::span(raw).first(4 * some)));
    for (std::size_t i = 0; i < some; ++i) {
      std::uint32_t length = 0;
      for (std::size_t b = 4; b-- > 0;) {
        length = length << 8 | std::to_integer<std::uint32_t>(raw[4 * i + b]);
      }
      units.push_back(length);
    }
  }
  return units;
}

}  // namespace

Result<exec::Digest> ParseDigest(std::string_view word) {
  exec::Digest digest{};
  bool good = word.size() == 2 * digest.size();
  for (std::size_t i = 0; good && i < digest.size(); ++i) {
    const char* at = word.data() + 2 * i;
    const auto [end, error] = std::from_chars(at, at + 2, digest[i], 16);
    good = error == std::errc() && end == at + 2;
  }
  if (good) return digest;
  return Fail(Errc::kBadInput, "a digest of 32 hexadecimal digits expected");
}

Result<std::string> ReceiveAnswer(os::Connection& connection) {
  return os::ReceiveAnswer(connection, "an agent");
}

Status SendText(os::Connection& connection, const std::string& text) {
  SW_TRY(SendAnswer(connection, {}, std::to_string(text.size())));
  return connection.Send(text);
}

Result<std::string> ReceiveText(os::Connection& connection, std::uint64_t bytes, Counted* counted) {
  if (bytes > kAgentTextBytes) {
    return Fail(Errc::kLimit, connection.name(), ": text of ", bytes,
                " bytes exceeds the limit of ", kAgentTextBytes, " bytes");
  }
  std::string text;
  while (text.size() < bytes) {
    // At most double the buffer.
    const std::size_t at = text.size();
    const std::size_t more = std::min<std::size_t>(bytes - at, std::max(at, kPieceBytes));
    if (counted != nullptr) SW_TRY(counted->Grow(more));
    text.resize(at + more);
    SW_TRY(connection.Receive(std::as_writable_bytes(std::span(text).subspan(at))));
  }
  return text;
}

Status SendBlob(os::Connection& connection, const MemoryBlob& blob, Limiter::Job& job) {
  const std::vector<std::uint32_t>& units = blob.unit_bytes();
  SW_TRY(SendAnswer(connection, {},
                    std::to_string(blob.ref().bytes) + " " + std::to_string(units.size())));
  std::vector<std::byte> lengths(4 * units.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    for (std::size_t b = 0; b < 4; ++b) {
      lengths[4 * i + b] = static_cast<std::byte>(units[i] >> (8 * b) & 0xff);
    }
  }
  SW_TRY(connection.Send(lengths));
  for (std::span<const std::byte> rest = blob.bytes(); !rest.empty();) {
    const std::size_t count = std::min<std::size_t>(rest.size(), kSendBytes);
    job.Spend(count);
    SW_TRY(connection.Send(rest.first(count)));
    rest = rest.subspan(count);
  }
  return {};
}

Result<BlobPtr> ReceiveBlob(os::Connection& connection, const BlobRef& expected,
                            const std::shared_ptr<MemoryPool>& pool) {
  const std::string where = connection.name() + ": blob " + exec::Hex(expected.digest);
  SW_TRY_ASSIGN(const std::string head, ReceiveAnswer(connection));
  const std::vector<std::string_view> words = WordsOf(head);
  if (words.size() != 2)
    return Fail(Errc::kBadInput, where, ": size and number of units expected, found \"", head, '"');
  SW_TRY_ASSIGN(const std::uint64_t bytes, ParseNumber(words[0], ~std::uint64_t{0}, where));
  if (bytes != expected.bytes) {
    return Fail(Errc::kBadInput, where, ": ", expected.bytes, " bytes expected, found ", bytes);
  }
  SW_TRY(pool->CheckRoom(bytes, where));
  SW_TRY_ASSIGN(const std::uint64_t count, ParseNumber(words[1], bytes, where + ": units"));
  Counted counted(pool);
  SW_TRY_ASSIGN(std::vector<std::uint32_t> units, ReceiveUnits(connection, count, &counted));
  SW_TRY(CheckUnits(units, expected, where));
  // Pages that are not written use no memory.
  BlobMemory buffer = MakeBlobMemory(bytes);
  if (!buffer) {
    return Fail(Errc::kLimit, where, ": cannot allocate ", FormatBytes(bytes), " of memory");
  }
  std::vector<exec::UnitSum> sums;
  sums.reserve(units.size());
  std::uint64_t at = 0;
  for (const std::uint32_t length : units) {
    const std::span<std::byte> unit(buffer.get() + at, length);
    for (std::span<std::byte> rest = unit; !rest.empty();) {
      const std::span<std::byte> piece = rest.first(std::min(rest.size(), kPieceBytes));
      SW_TRY(counted.Grow(piece.size()));
      SW_TRY(connection.Receive(piece));
      rest = rest.subspan(piece.size());
    }
    sums.push_back(exec::SumOf(unit));
    at += length;
  }
  const BlobRef found = Summarize(sums);
  if (found != expected) {
    return Fail(Errc::kBadInput, where, ": corrupt transfer: found digest ",
                exec::Hex(found.digest));
  }
  return std::make_shared<const MemoryBlob>(std::move(counted), std::move(buffer), found,
                                            std::move(units));
}

}  // namespace shardwright::partial
