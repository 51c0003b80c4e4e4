// SPDX-License-Identifier: Apache-2.0
#include "files/utf8.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shardwright {

namespace {

bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

// Returns the length of the sequence at the start of `text`, or 0 if it is malformed.
std::size_t SequenceLength(std::string_view text, Surrogates surrogates) {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!IsContinuation(text[i])) return 0;
  }
  const auto second = static_cast<unsigned char>(text[1]);
  if (lead == 0xE0 && second < 0xA0) return 0;
  if (lead == 0xED && second >= 0xA0 && surrogates == Surrogates::kRefuse) return 0;
  if (lead == 0xF0 && second < 0x90) return 0;
  if (lead == 0xF4 && second > 0x8F) return 0;
  return length;
}

}  // namespace

std::size_t AsciiBytes(std::string_view text) {
  std::size_t at = 0;
  for (; text.size() - at >= 8; at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, text.data() + at, 8);
    if ((word & 0x8080808080808080U) != 0) break;
  }
  while (at < text.size() && static_cast<unsigned char>(text[at]) < 0x80) ++at;
  return at;
}

bool IsUtf8(std::string_view text, Surrogates surrogates) {
  text.remove_prefix(AsciiBytes(text));
  while (!text.empty()) {
    const std::size_t length = SequenceLength(text, surrogates);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

}  // namespace shardwright
