// SPDX-License-Identifier: Apache-2.0
#include "files/read_ahead.h"

#include <algorithm>
#include <utility>

namespace shardwright::files {
namespace {

/// Size of a member's local header with the payload of a scalar after it.
constexpr std::uint64_t kSmall = 512;
/// Parts up to this size are read whole, many of them in one read.
constexpr std::uint64_t kSmallPart = std::uint64_t{64} << 10;
constexpr std::uint64_t kTogether = std::uint64_t{1} << 20;

}  // namespace

const ReadAhead::Block* ReadAhead::Find(std::uint64_t offset, std::uint64_t bytes) const {
  const auto after =
      std::upper_bound(blocks_.begin(), blocks_.end(), offset,
                       [](std::uint64_t at, const Block& block) { return at < block.first; });
  if (after == blocks_.begin()) return nullptr;
  const Block& block = *std::prev(after);
  const std::uint64_t skipped = offset - block.first;
  const bool inside = skipped <= block.bytes.size() && block.bytes.size() - skipped >= bytes;
  return inside ? &block : nullptr;
}

Status ReadAhead::ReadAt(std::uint64_t offset, std::span<std::byte> out) {
  const Block* block = Find(offset, out.size());
  if (block == nullptr) {
    std::uint64_t first = offset;
    std::uint64_t last = offset + out.size();
    const std::uint64_t tail = bytes_ - std::min(bytes_, windows_.tail);
    if (bytes_ <= windows_.whole) {
      first = 0;
      last = bytes_;
    } else if (last <= windows_.head) {
      first = 0;
      last = windows_.head;
    } else if (offset >= tail) {
      first = tail;
      last = bytes_;
    } else if (out.size() <= kSmall) {
      last = std::min(offset + kSmall, bytes_);
    } else {
      return file_.ReadAt(first_ + offset, out);
    }
    Block read{first, std::vector<std::byte>(static_cast<std::size_t>(last - first))};
    SW_TRY(file_.ReadAt(first_ + first, read.bytes));
    const auto at =
        std::upper_bound(blocks_.begin(), blocks_.end(), first,
                         [](std::uint64_t from, const Block& one) { return from < one.first; });
    block = &*blocks_.insert(at, std::move(read));
  }
  const auto from = block->bytes.begin() + static_cast<std::ptrdiff_t>(offset - block->first);
  std::copy_n(from, out.size(), out.begin());
  return {};
}

bool SmallParts::IsSmall(const Range& part) { return part.bytes > 0 && part.bytes <= kSmallPart; }

Result<std::span<const std::byte>> SmallParts::At(std::size_t index) {
  const auto [offset, bytes] = parts_[index];
  if (offset < first_ || offset + bytes > first_ + loaded_.size()) {
    std::uint64_t end = offset + bytes;
    for (std::size_t next = index + 1; next < parts_.size() && IsSmall(parts_[next]); ++next) {
      const std::uint64_t reaches = parts_[next].offset + parts_[next].bytes;
      if (reaches - offset > kTogether) break;
      end = reaches;
    }
    loaded_.resize(static_cast<std::size_t>(end - offset));
    first_ = offset;
    SW_TRY(file_.ReadAt(offset, loaded_));
  }
  return std::span<const std::byte>(loaded_).subspan(static_cast<std::size_t>(offset - first_),
                                                     static_cast<std::size_t>(bytes));
}

}  // namespace shardwright::files
