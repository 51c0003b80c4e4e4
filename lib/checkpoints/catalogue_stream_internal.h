// SPDX-License-Identifier: Apache-2.0
// Compressed stream of numbers and texts: the content of a fragment catalogue (catalogue.cc).
// Numbers are LEB128, and a text is its length and its bytes, all in one zstd frame.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"
#include "support/zstd/contexts.h"

namespace shardwright::checkpoints::catalogue {

// Bytes per call of zstd, small enough that malloc does not request them from the system each time.
inline constexpr std::size_t kPieceBytes = std::size_t{1} << 16;

/// Returns the error for a damaged catalogue.
tl::unexpected<Error> Damaged(const std::string& what);

/// Compresses the bytes that are written to it.
class Packer {
 public:
  /// \param content_bytes  approximate size of the content; limits the size of the window
  explicit Packer(std::uint64_t content_bytes);

  // Buffers small pieces, because a call of zstd costs more than a copy.
  void Bytes(std::string_view bytes) {
    if (bytes.size() < kPieceBytes) {
      gathered_.append(bytes);
      if (gathered_.size() >= kPieceBytes) Flush();
      return;
    }
    Flush();
    Compress(bytes, ZSTD_e_continue);
  }

  void Number(std::uint64_t value) {
    std::array<char, 10> bytes{};
    std::size_t count = 0;
    do {
      bytes[count++] = static_cast<char>((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
      value >>= 7;
    } while (value != 0);
    Bytes(std::string_view(bytes.data(), count));
  }

  void Text(std::string_view text) {
    Number(text.size());
    Bytes(text);
  }

  std::string Finish() {
    Flush();
    Compress({}, ZSTD_e_end);
    return std::move(out_);
  }

 private:
  struct Free {
    void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
  };

  void Set(ZSTD_cParameter parameter, int value);

  void Flush() {
    Compress(gathered_, ZSTD_e_continue);
    gathered_.clear();
  }

  void Compress(std::string_view bytes, ZSTD_EndDirective how);

  std::unique_ptr<ZSTD_CCtx, Free> context_;
  std::vector<char> buffer_;
  std::string gathered_;
  std::string out_;
};

/// Decompresses a frame in pieces. Allocates only for bytes that exist, whatever a length claims.
class Unpacker {
 public:
  explicit Unpacker(std::string_view frame);

  Result<std::uint8_t> Byte() {
    while (at_ == have_) SW_TRY(Refill());
    return static_cast<std::uint8_t>(buffer_[at_++]);
  }

  Result<std::uint64_t> Number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      SW_TRY_ASSIGN(const std::uint8_t byte, Byte());
      const std::uint64_t bits = byte & 0x7f;
      if (shift == 63 && bits > 1) break;
      value |= bits << shift;
      if (byte < 0x80) return value;
    }
    return Damaged("a number has more than 64 bits");
  }

  Result<std::string> Text();

  /// Reads the frame to its end. Fails if anything follows it.
  Status Done();

 private:
  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };

  Status Refill();

  std::unique_ptr<ZSTD_DCtx, Free> context_;
  std::vector<char> buffer_;
  ZSTD_inBuffer in_{};
  std::size_t at_ = 0;
  std::size_t have_ = 0;
  std::uint64_t total_ = 0;
  bool ended_ = false;
};

}  // namespace shardwright::checkpoints::catalogue
