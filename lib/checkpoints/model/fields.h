// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Writes a sequence of numbers and texts that the ranks of a run exchange. A
/// number is encoded as LEB128, a text as its length followed by its bytes.
class FieldWriter {
 public:
  void Number(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
    bytes_ += static_cast<char>(value);
  }
  void Text(std::string_view text) {
    Number(text.size());
    bytes_ += text;
  }
  std::string Take() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads the output of a FieldWriter. The bytes must outlive the reader and the texts it returns.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : rest_(bytes) {}

  /// \error kInternal  the bytes end before the number does
  Result<std::uint64_t> Number() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<std::uint8_t>(rest_.front());
      rest_.remove_prefix(1);
      value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    return Fail(Errc::kInternal, "fields that ranks exchanged end early");
  }
  /// \error as Number
  Result<std::string_view> Text() {
    SW_TRY_ASSIGN(const std::uint64_t bytes, Number());
    if (bytes > rest_.size()) return Fail(Errc::kInternal, "a text of fields ends early");
    const std::string_view text = rest_.substr(0, static_cast<std::size_t>(bytes));
    rest_.remove_prefix(text.size());
    return text;
  }

 private:
  std::string_view rest_;
};

}  // namespace shardwright::checkpoints
