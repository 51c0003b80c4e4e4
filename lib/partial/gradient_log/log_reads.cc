// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "partial/gradient_log/log_reader.h"
#include "support/base/text.h"
#include "support/os/file.h"
#include "support/zstd/contexts.h"

namespace shardwright::partial {
namespace {

struct FreeContext {
  void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
};

std::string WhereOf(const LogLink::Piece& piece) {
  return StrCat(*piece.path, ": gradient of ", Quoted(piece.piece->param));
}

/// Calls take(bytes) for the stored bytes [first, last) of a payload in verified parts.
/// \param file  null: the payload is in memory
template <class Take>
Status ForStored(const os::File* file, const LogLink::Piece& piece, std::uint64_t first,
                 std::uint64_t last, const Take& take) {
  const LogPayload& payload = *piece.payload;
  if (file == nullptr) {
    SW_TRY(take(std::span<const std::byte>(payload.stored).subspan(first, last - first)));
    return {};
  }
  std::array<std::byte, kLogSumBytes> room;
  for (std::uint64_t block = first / kLogSumBytes; block * kLogSumBytes < last; ++block) {
    const std::uint64_t begin = block * kLogSumBytes;
    const auto part =
        std::span(room).first(std::min<std::uint64_t>(kLogSumBytes, payload.bytes - begin));
    SW_TRY(file->ReadAt(payload.offset + begin, part));
    if (exec::DigestOf(part) != payload.sums[block]) {
      return BadInput(WhereOf(piece), ": bytes ", payload.offset + begin, " to ",
                      payload.offset + begin + part.size() - 1,
                      " have changed since the log was verified");
    }
    const std::uint64_t from = std::max(first, begin) - begin;
    const std::uint64_t to = std::min<std::uint64_t>(last - begin, part.size());
    SW_TRY_ASSIGN(const bool more, take(std::span<const std::byte>(part).subspan(from, to - from)));
    if (!more) break;
  }
  return {};
}

/// Decompresses the bytes from `skip` on of a piece that is one zstd frame.
Status ReadFrame(const os::File* file, const LogLink::Piece& piece, std::uint64_t skip,
                 std::span<std::byte> out) {
  const std::uint64_t begin = piece.piece->offset - piece.payload->offset;
  const std::unique_ptr<ZSTD_DCtx, FreeContext> context(NewZstdReader());
  // A piece has at most 64 MiB, so a window of 2^27 bytes always suffices.
  ZSTD_DCtx_setParameter(context.get(), ZSTD_d_windowLogMax, 27);
  std::vector<std::byte> room(std::min<std::uint64_t>(ZSTD_DStreamOutSize(), skip));
  SW_TRY(ForStored(
      file, piece, begin, begin + piece.piece->bytes,
      [&](std::span<const std::byte> stored) -> Result<bool> {
        ZSTD_inBuffer in{stored.data(), stored.size(), 0};
        for (bool again = true; again && !(skip == 0 && out.empty());) {
          const auto to =
              skip > 0 ? std::span(room).first(std::min<std::uint64_t>(room.size(), skip)) : out;
          ZSTD_outBuffer plain{to.data(), to.size(), 0};
          const std::size_t rest = ZSTD_decompressStream(context.get(), &plain, &in);
          if (ZstdFailed(rest)) {
            return BadInput(WhereOf(piece), ": invalid zstd frame: ", ZSTD_getErrorName(rest));
          }
          if (skip > 0) {
            skip -= plain.pos;
          } else {
            out = out.subspan(plain.pos);
          }
          again = in.pos < in.size || plain.pos == plain.size;
          if (rest == 0) break;
        }
        return skip > 0 || !out.empty();
      }));
  if (skip == 0 && out.empty()) return {};
  return BadInput(WhereOf(piece), ": the zstd frame ends ", skip + out.size(), " bytes early");
}

}  // namespace

LogReads::LogReads(const GradientLog& log)
    : pool_([&log](std::uint32_t segment) { return os::File::OpenRead(log.segments()[segment]); }) {
}

Status LogReads::Read(const LogLink::Piece& piece, std::uint64_t first, std::span<std::byte> out) {
  std::shared_ptr<const os::File> file;  // null: the payload is in memory
  if (!piece.payload->in_memory) {
    SW_TRY_ASSIGN(file, pool_.Get(piece.segment));
  }
  const std::uint64_t skip = first * ItemSize(piece.piece->dtype);
  if (piece.piece->zstd) {
    bytes_.fetch_add(piece.piece->bytes, std::memory_order_relaxed);
    return ReadFrame(file.get(), piece, skip, out);
  }
  bytes_.fetch_add(out.size(), std::memory_order_relaxed);
  const std::uint64_t begin = piece.piece->offset - piece.payload->offset + skip;
  return ForStored(file.get(), piece, begin, begin + out.size(),
                   [&](std::span<const std::byte> part) -> Result<bool> {
                     std::ranges::copy(part, out.begin());
                     out = out.subspan(part.size());
                     return true;
                   });
}

}  // namespace shardwright::partial
