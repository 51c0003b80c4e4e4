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

/// Computes the digest of bytes that arrive in several pieces.
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

/// Checksums of a unit's bytes.
struct UnitSum {
  std::uint32_t crc32 = 0;
  Digest digest{};
  std::uint32_t bytes = 0;
};
UnitSum SumOf(std::span<const std::byte> unit);

/// Returns the CRC-32 of the concatenated units.
std::uint32_t CombinedCrc32(std::span<const UnitSum> units);

/// A piece of a source member that a unit has read.
struct Share {
  std::uint32_t member = 0;
  std::uint32_t crc_share = 0;  ///< Crc32Share of the piece
  std::uint64_t bytes = 0;
};

/// Checksums of a unit and of the pieces that it read. The journal stores
/// them, and runs combine them into the checksums of payloads and files.
struct UnitRecord {
  UnitSum sum;
  std::vector<Share> shares;
};

/// Combines the checksums of pieces of source members from all threads, in any
/// order, to compare whole members with the checksums in their files. Thread-safe.
/// Source: docs/formats/pt.md, "Checksums".
class SourceSums {
 public:
  explicit SourceSums(std::size_t members);

  void Add(std::span<const Share> shares);

  /// Serializes the checksums to send them to other ranks; Combine adds those of another rank.
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

/// Makes the error for a member that does not match its checksum.
Error WrongChecksum(const plan::Plan& plan, std::uint32_t member, std::uint32_t found);

}  // namespace shardwright::exec
