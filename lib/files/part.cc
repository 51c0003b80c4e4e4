// SPDX-License-Identifier: Apache-2.0
#include "files/part.h"

#include <algorithm>

namespace shardwright::files {

Result<std::uint64_t> Part::Bytes() const {
  if (!loaded_.empty() || ahead_ != nullptr) return *bytes_;
  SW_TRY_ASSIGN(const os::Identity identity, file_.Stat());
  if (!bytes_) return identity.bytes;
  if (first_ > identity.bytes || *bytes_ > identity.bytes - first_) {
    return Fail(Errc::kBadInput, path(), ": ", *bytes_, " bytes expected at offset ", first_,
                ", the file ends at ", identity.bytes);
  }
  return *bytes_;
}

Status Part::ReadAt(std::uint64_t offset, std::span<std::byte> out) const {
  if (bytes_ && (offset > *bytes_ || out.size() > *bytes_ - offset)) {
    return Fail(Errc::kBadInput, path(), ": ", out.size(), " bytes expected at offset ", offset,
                " of a container that ends at ", *bytes_);
  }
  if (ahead_ != nullptr) return ahead_->ReadAt(offset, out);
  if (loaded_.empty()) return file_.ReadAt(first_ + offset, out);
  const std::uint64_t tail_first = *bytes_ - tail_.size();
  if (offset + out.size() <= loaded_.size()) {
    std::copy_n(loaded_.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
  } else if (offset >= tail_first) {
    std::copy_n(tail_.begin() + static_cast<std::ptrdiff_t>(offset - tail_first), out.size(),
                out.begin());
  } else {
    return Fail(Errc::kUnsupported, path(),
                ": a compressed item with headers that are neither in its first ", loaded_.size(),
                " bytes nor in its last ", tail_.size());
  }
  return {};
}

}  // namespace shardwright::files
