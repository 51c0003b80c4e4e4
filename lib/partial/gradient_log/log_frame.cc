// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstring>

#include "partial/gradient_log/log_frame_internal.h"

namespace shardwright::partial::log {
namespace {

constexpr std::string_view kSegmentMagic = "SWGRADS1";
constexpr std::string_view kRecordMagic = "SWGRADR1";
constexpr std::size_t kDigestAt = 48;

template <class T>
void Store(Frame* frame, std::size_t at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    (*frame)[at + i] = static_cast<std::byte>(static_cast<std::uint64_t>(value) >> (8 * i));
  }
}

template <class T>
T Load(std::span<const std::byte> frame, std::size_t at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    value |= std::to_integer<std::uint64_t>(frame[at + i]) << (8 * i);
  }
  return static_cast<T>(value);
}

void StoreDigest(Frame* frame, std::size_t at, const exec::Digest& digest) {
  std::memcpy(frame->data() + at, digest.data(), digest.size());
}

exec::Digest LoadDigest(std::span<const std::byte> frame, std::size_t at) {
  exec::Digest digest;
  std::memcpy(digest.data(), frame.data() + at, digest.size());
  return digest;
}

void Seal(Frame* frame, std::string_view magic) {
  std::memcpy(frame->data(), magic.data(), magic.size());
  StoreDigest(frame, kDigestAt, exec::DigestOf(std::span(*frame).first(kDigestAt)));
}

bool IsSealed(std::span<const std::byte> frame, std::string_view magic) {
  return frame.size() == kFrameBytes &&
         std::memcmp(frame.data(), magic.data(), magic.size()) == 0 &&
         LoadDigest(frame, kDigestAt) == exec::DigestOf(frame.first(kDigestAt));
}

}  // namespace

Frame ToFrame(const SegmentHead& head) {
  Frame frame{};
  Store(&frame, 8, head.version);
  Store(&frame, 12, head.writer);
  Store(&frame, 16, head.number);
  Store(&frame, 24, head.first_index);
  StoreDigest(&frame, 32, head.fingerprint);
  Seal(&frame, kSegmentMagic);
  return frame;
}

Frame ToFrame(const RecordHead& head) {
  Frame frame{};
  Store(&frame, 8, head.index);
  Store(&frame, 16, static_cast<std::uint32_t>(head.kind));
  Store(&frame, 20, head.meta_bytes);
  Store(&frame, 24, head.payload_bytes);
  StoreDigest(&frame, 32, head.previous);
  Seal(&frame, kRecordMagic);
  return frame;
}

std::optional<SegmentHead> SegmentHeadOf(std::span<const std::byte> frame) {
  if (!IsSealed(frame, kSegmentMagic)) return std::nullopt;
  return SegmentHead{Load<std::uint32_t>(frame, 8), Load<std::uint32_t>(frame, 12),
                     Load<std::uint64_t>(frame, 16), Load<std::uint64_t>(frame, 24),
                     LoadDigest(frame, 32)};
}

std::optional<RecordHead> RecordHeadOf(std::span<const std::byte> frame) {
  if (!IsSealed(frame, kRecordMagic)) return std::nullopt;
  return RecordHead{
      Load<std::uint64_t>(frame, 8), static_cast<Kind>(Load<std::uint32_t>(frame, 16)),
      Load<std::uint32_t>(frame, 20), Load<std::uint64_t>(frame, 24), LoadDigest(frame, 32)};
}

std::uint64_t RecordBytes(const RecordHead& head) {
  const std::uint64_t bytes = kFrameBytes + head.meta_bytes + head.payload_bytes + kTrailerBytes;
  return (bytes + kFrameBytes - 1) / kFrameBytes * kFrameBytes;
}

std::string SegmentName(std::uint32_t writer, std::uint64_t number) {
  return std::to_string(writer) + "-" + std::to_string(number) + ".swg";
}

std::optional<SegmentId> SegmentOf(std::string_view name) {
  SegmentId id;
  const auto [dash, error] = std::from_chars(name.data(), name.data() + name.size(), id.writer);
  if (error != std::errc() || dash == name.data() + name.size()) return std::nullopt;
  const auto [dot, second] = std::from_chars(dash + 1, name.data() + name.size(), id.number);
  static_cast<void>(dot);
  if (second != std::errc() || SegmentName(id.writer, id.number) != name) return std::nullopt;
  return id;
}

bool IsRootsName(std::string_view name) {
  return name.starts_with("roots-") && name.ends_with(".swr");
}

}  // namespace shardwright::partial::log
