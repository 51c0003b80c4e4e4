// SPDX-License-Identifier: Apache-2.0
#include "support/zstd/stream.h"

#include <algorithm>
#include <string>

#include "support/zstd/contexts.h"

namespace shardwright::zstd {
namespace {

constexpr std::uint64_t kReadBytes = std::uint64_t{256} << 10;

}  // namespace

Stream::Stream() : context_(NewZstdReader()) {}

void Stream::Free::operator()(ZSTD_DCtx_s* context) const { ZSTD_freeDCtx(context); }

void Stream::Begin(const os::File& file, std::uint64_t first, std::uint64_t bytes) {
  ZSTD_DCtx_reset(context_.get(), ZSTD_reset_session_only);
  file_ = &file;
  next_ = first;
  end_ = first + bytes;
  stored_.clear();
  used_ = 0;
  in_frame_ = false;
  given_ = 0;
}

Status Stream::Refill() {
  stored_.resize(static_cast<std::size_t>(std::min(kReadBytes, end_ - next_)));
  used_ = 0;
  SW_TRY(file_->ReadAt(next_, stored_));
  next_ += stored_.size();
  return {};
}

Result<std::size_t> Stream::Read(std::span<std::byte> out) {
  ZSTD_outBuffer to{out.data(), out.size(), 0};
  const auto damaged = [&](const char* why) {
    return Fail(Errc::kBadInput, file_->path(), ": the zstd stream that ends at byte ", end_,
                " is damaged: ", why);
  };
  while (to.pos < to.size) {
    if (used_ == stored_.size() && next_ < end_) SW_TRY(Refill());
    const bool all_taken = used_ == stored_.size();
    if (all_taken && !in_frame_) break;
    ZSTD_inBuffer from{stored_.data(), stored_.size(), used_};
    const std::size_t before = to.pos;
    const std::size_t left = ZSTD_decompressStream(context_.get(), &to, &from);
    if (ZstdFailed(left)) return damaged(ZSTD_getErrorName(left));
    used_ = from.pos;
    in_frame_ = left != 0;
    // All buffered output of the decoder has been returned too.
    if (all_taken && in_frame_ && to.pos == before) return damaged("it ends within a frame");
  }
  given_ += to.pos;
  return to.pos;
}

}  // namespace shardwright::zstd
