// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/integrity.h"

#include <algorithm>
#include <cstring>
#include <new>

#include <xxhash.h>
#ifdef SW_XXHASH_DISPATCHES
#include <xxh_x86dispatch.h>
#endif

#include "support/base/crc32.h"
#include "support/base/text.h"

namespace shardwright::exec {
namespace {

Digest Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Digest digest;
  std::memcpy(digest.data(), canonical.digest, digest.size());
  return digest;
}

/// Describes the tensors in a member for messages: one of them, or padding, is damaged.
std::string TensorsIn(const layout::ShardMap& map, std::uint32_t member) {
  std::string first;
  std::size_t count = 0;
  for (const layout::LogicalTensor& tensor : map.tensors) {
    const bool here = std::any_of(
        tensor.fragments.begin(), tensor.fragments.end(), [&](const layout::Fragment& fragment) {
          const auto& regions = map.arrays[fragment.at.array].regions;
          return std::any_of(regions.begin(), regions.end(),
                             [&](const auto& region) { return region.member == member; });
        });
    if (here && count++ == 0) first = "\"" + tensor.name + "\" " + tensor.state;
  }
  if (count == 0) return "";
  if (count == 1) return " (tensor " + first + ")";
  return " (part of " + std::to_string(count) + " tensors, the first is " + first + ")";
}

constexpr std::size_t kPackedBytes = 12;

}  // namespace

Digest DigestOf(std::span<const std::byte> data) {
  return Canonical(XXH3_128bits(data.data(), data.size()));
}

std::string Hex(const Digest& digest) { return shardwright::Hex(std::as_bytes(std::span(digest))); }

UnitSum SumOf(std::span<const std::byte> unit) {
  return {Crc32(unit), DigestOf(unit), static_cast<std::uint32_t>(unit.size())};
}

std::uint32_t CombinedCrc32(std::span<const UnitSum> units) {
  std::uint64_t after = 0;
  for (const UnitSum& unit : units) after += unit.bytes;
  std::uint32_t crc = 0;
  for (const UnitSum& unit : units) {
    after -= unit.bytes;
    crc ^= Crc32Share(unit.crc32, after);
  }
  return crc;
}

struct DigestStream::State {
  State() : xxh(XXH3_createState()) {
    if (xxh == nullptr) throw std::bad_alloc();
  }

  XXH3_state_t* const xxh;
};

DigestStream::DigestStream() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(state_->xxh);
}

DigestStream::~DigestStream() { XXH3_freeState(state_->xxh); }

void DigestStream::Add(std::span<const std::byte> data) {
  XXH3_128bits_update(state_->xxh, data.data(), data.size());
}

Digest DigestStream::Finish() const { return Canonical(XXH3_128bits_digest(state_->xxh)); }

SourceSums::SourceSums(std::size_t members) : crc_(members), bytes_(members) {}

void SourceSums::Add(std::span<const Share> shares) {
  for (const Share& share : shares) {
    crc_[share.member].fetch_xor(share.crc_share, std::memory_order_relaxed);
    bytes_[share.member].fetch_add(share.bytes, std::memory_order_relaxed);
  }
}

std::vector<std::byte> SourceSums::Pack() const {
  std::vector<std::byte> packed(crc_.size() * kPackedBytes);
  for (std::size_t m = 0; m < crc_.size(); ++m) {
    const std::uint32_t crc = crc_[m].load(std::memory_order_relaxed);
    const std::uint64_t bytes = bytes_[m].load(std::memory_order_relaxed);
    std::memcpy(packed.data() + m * kPackedBytes, &crc, sizeof crc);
    std::memcpy(packed.data() + m * kPackedBytes + sizeof crc, &bytes, sizeof bytes);
  }
  return packed;
}

void SourceSums::Combine(std::span<const std::byte> packed) {
  SW_CHECK(packed.size() == crc_.size() * kPackedBytes);
  for (std::size_t m = 0; m < crc_.size(); ++m) {
    Share share;
    share.member = static_cast<std::uint32_t>(m);
    std::memcpy(&share.crc_share, packed.data() + m * kPackedBytes, sizeof share.crc_share);
    std::memcpy(&share.bytes, packed.data() + m * kPackedBytes + sizeof share.crc_share,
                sizeof share.bytes);
    Add({&share, 1});
  }
}

Error WrongChecksum(const plan::Plan& plan, std::uint32_t member, std::uint32_t found) {
  const layout::Member& at = plan.source().members[member];
  char text[64];
  std::snprintf(text, sizeof text, "CRC-32 %08x expected, %08x found", *at.crc32, found);
  return {Errc::kBadInput,
          plan.source().files[at.file] + ": " + at.name + TensorsIn(plan.source(), member) + ": " +
              text,
          0, -1};
}

}  // namespace shardwright::exec
