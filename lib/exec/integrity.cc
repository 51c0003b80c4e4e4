#include "exec/integrity.h"

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "format/zip/crc32.h"

namespace shardwright::exec {
namespace {

Digest Canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Digest digest;
  std::memcpy(digest.data(), canonical.digest, digest.size());
  return digest;
}

/// The tensors that lie in a member, for messages: damage is in one of them, or in padding.
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

std::string Hex(const Digest& digest) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

struct DigestStream::State {
  XXH3_state_t* xxh = XXH3_createState();
};

DigestStream::DigestStream() : state_(std::make_unique<State>()) {
  SW_CHECK(state_->xxh != nullptr);
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

Result<bool> VerifyMember(const plan::Plan& plan, const SourceSums& sums, std::uint32_t member,
                          ByteSource& source) {
  const layout::Member& at = plan.source().members[member];
  if (!at.crc32) return false;
  std::uint32_t crc = sums.crc(member);
  std::uint64_t bytes = sums.bytes(member);
  if (bytes < at.bytes) {
    std::vector<std::byte> buffer;
    for (const plan::Plan::Gap& gap : plan.Gaps(member)) {
      for (std::uint64_t done = 0; done < gap.bytes;) {
        const std::uint64_t count = std::min(gap.bytes - done, plan::kUnitBytes);
        buffer.resize(count);
        const std::uint64_t offset = gap.offset + done;
        SW_TRY(source.Read(member, offset, buffer));
        crc ^= zip::Crc32Share(zip::Crc32(buffer), at.bytes - offset - count);
        done += count;
      }
      bytes += gap.bytes;
    }
  }
  SW_CHECK(bytes == at.bytes);
  if (crc != *at.crc32) return tl::unexpected<Error>(WrongChecksum(plan, member, crc));
  return true;
}

}  // namespace shardwright::exec
