// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/plan.h"
#include "support/base/result.h"

namespace shardwright::exec {

/// XXH3-128, big-endian (canonical) bytes.
using Digest = std::array<std::uint8_t, 16>;

Digest DigestOf(std::span<const std::byte> data);
std::string Hex(const Digest& digest);

/// Digest of a sequence fed piece by piece.
class DigestStream {
 public:
  DigestStream();
  ~DigestStream();
  DigestStream(const DigestStream&) = delete;
  DigestStream& operator=(const DigestStream&) = delete;
  void Add(std::span<const std::byte> data);
  Digest Finish() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Sums of a unit's bytes.
struct UnitSum {
  std::uint32_t crc32 = 0;
  Digest digest{};
  std::uint32_t bytes = 0;
};
UnitSum SumOf(std::span<const std::byte> unit);

/// CRC-32 of what consecutive units make up together.
std::uint32_t CombinedCrc32(std::span<const UnitSum> units);

/// A piece of a source member on its way through a unit.
struct Share {
  std::uint32_t member = 0;
  std::uint32_t crc_share = 0;  ///< Crc32Share of the piece
  std::uint64_t bytes = 0;
};

/// What a unit leaves behind: kept in the journal, and combined into the checksums of payloads and
/// files.
struct UnitRecord {
  UnitSum sum;
  std::vector<Share> shares;
};

/// Collects pieces of source members from all threads, in any order, until whole members can be
/// compared with the checksum that their file carries. Thread-safe. Source: docs/formats/pt.md,
/// "Checksums".
class SourceSums {
 public:
  explicit SourceSums(std::size_t members);

  void Add(std::span<const Share> shares);

  /// Bytes form for combining ranks, and the other direction.
  std::vector<std::byte> Pack() const;
  void Combine(std::span<const std::byte> packed);

  std::uint32_t crc(std::uint32_t member) const {
    return crc_[member].load(std::memory_order_relaxed);
  }
  std::uint64_t bytes(std::uint32_t member) const {
    return bytes_[member].load(std::memory_order_relaxed);
  }

 private:
  std::vector<std::atomic<std::uint32_t>> crc_;
  std::vector<std::atomic<std::uint64_t>> bytes_;
};

/// The error for a member whose bytes do not have their checksum.
Error WrongChecksum(const plan::Plan& plan, std::uint32_t member, std::uint32_t found);

}  // namespace shardwright::exec
