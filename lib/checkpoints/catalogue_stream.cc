// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/catalogue_stream_internal.h"

#include <algorithm>
#include <bit>

namespace shardwright::checkpoints::catalogue {
namespace {

constexpr std::uint64_t kCatalogueBytes = std::uint64_t{16} << 30;
constexpr int kLevel = 1;
// Largest zstd window. One metadata has about 200 KiB and resembles
// that of the file 100 files earlier, so the window must cover both.
constexpr int kWindowLog = 27;
constexpr int kWindowLogMin = 17;

}  // namespace

tl::unexpected<Error> Damaged(const std::string& what) {
  return Fail(Errc::kBadInput, "catalogue: ", what);
}

Packer::Packer(std::uint64_t content_bytes) : context_(NewZstdWriter()), buffer_(kPieceBytes) {
  Set(ZSTD_c_compressionLevel, kLevel);
  Set(ZSTD_c_enableLongDistanceMatching, 1);
  Set(ZSTD_c_windowLog,
      std::clamp(static_cast<int>(std::bit_width(content_bytes)), kWindowLogMin, kWindowLog));
  Set(ZSTD_c_checksumFlag, 1);
}

void Packer::Set(ZSTD_cParameter parameter, int value) {
  SW_CHECK(!ZstdFailed(ZSTD_CCtx_setParameter(context_.get(), parameter, value)));
}

void Packer::Compress(std::string_view bytes, ZSTD_EndDirective how) {
  ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
  for (;;) {
    ZSTD_outBuffer to{buffer_.data(), buffer_.size(), 0};
    const std::size_t left = ZSTD_compressStream2(context_.get(), &to, &in, how);
    SW_CHECK(!ZstdFailed(left));
    out_.append(buffer_.data(), to.pos);
    if (how == ZSTD_e_end ? left == 0 : in.pos == in.size) return;
  }
}

Unpacker::Unpacker(std::string_view frame) : context_(NewZstdReader()), buffer_(kPieceBytes) {
  SW_CHECK(!ZstdFailed(ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, kWindowLog)));
  in_ = {frame.data(), frame.size(), 0};
}

Result<std::string> Unpacker::Text() {
  SW_TRY_ASSIGN(std::uint64_t left, Number());
  std::string text;
  while (left > 0) {
    while (at_ == have_) SW_TRY(Refill());
    const auto n = static_cast<std::size_t>(std::min<std::uint64_t>(left, have_ - at_));
    // Doubles the capacity: an exact reserve would copy a long text once per block.
    if (text.capacity() - text.size() < n) {
      text.reserve(std::max(text.size() + n, text.capacity() * 2));
    }
    text.append(buffer_.data() + at_, n);
    at_ += n;
    left -= n;
  }
  text.shrink_to_fit();
  return text;
}

Status Unpacker::Done() {
  while (!ended_) {
    SW_TRY(Refill());
    if (at_ != have_) return Damaged("unexpected bytes after its end");
  }
  if (at_ != have_ || in_.pos != in_.size) return Damaged("unexpected bytes after its end");
  return {};
}

Status Unpacker::Refill() {
  if (ended_) return Damaged("it ends early");
  ZSTD_outBuffer to{buffer_.data(), buffer_.size(), 0};
  const std::size_t before = in_.pos;
  const std::size_t hint = ZSTD_decompressStream(context_.get(), &to, &in_);
  if (ZstdFailed(hint)) return Damaged(ZSTD_getErrorName(hint));
  if (hint == 0) ended_ = true;
  if (!ended_ && to.pos == 0 && in_.pos == before) return Damaged("it ends early");
  at_ = 0;
  have_ = to.pos;
  total_ += to.pos;
  if (total_ > kCatalogueBytes) {
    return Fail(Errc::kLimit, "catalogue: more than ", kCatalogueBytes, " bytes when unpacked");
  }
  return {};
}

}  // namespace shardwright::checkpoints::catalogue
