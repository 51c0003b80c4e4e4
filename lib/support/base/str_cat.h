// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

namespace shardwright {

template <class T>
concept MessageNumber = (std::integral<T> || std::floating_point<T>)&&!std::same_as<T, bool>;

/// One part of a message: text, one character, or a number in decimal digits. A part refers to its
/// text, and must not outlive it. A floating-point number has the fewest digits that identify it:
/// 0.9, 1e-08. Fixed() and Percent() of text.h format with a given number of digits.
class MessagePart {
 public:
  // NOLINTBEGIN(google-explicit-constructor): callers pass the values themselves.
  MessagePart(std::string_view text) : text_(text) {}
  MessagePart(const std::string& text) : text_(text) {}
  MessagePart(const char* text) : text_(text) {}
  template <MessageNumber T>
  MessagePart(T value) {
    if constexpr (std::same_as<T, char>) {
      buffer_[0] = value;
      size_ = 1;
    } else {
      char* const end = std::to_chars(buffer_, buffer_ + sizeof(buffer_), value).ptr;
      size_ = static_cast<std::size_t>(end - buffer_);
    }
  }
  // NOLINTEND(google-explicit-constructor)

  std::string_view text() const { return size_ == 0 ? text_ : std::string_view(buffer_, size_); }

 private:
  std::string_view text_;
  std::size_t size_ = 0;  ///< bytes used of buffer_; 0: the part is text_
  char buffer_[32];       ///< holds every 64-bit integer and every double
};

namespace internal {
inline std::string JoinParts(std::initializer_list<MessagePart> parts) {
  std::size_t size = 0;
  for (const MessagePart& part : parts) size += part.text().size();
  std::string out;
  out.reserve(size);
  for (const MessagePart& part : parts) out += part.text();
  return out;
}
}  // namespace internal

/// Joins the parts without separators: StrCat(path, ": ", 3, " files").
template <class... Parts>
std::string StrCat(const Parts&... parts) {
  return internal::JoinParts({MessagePart(parts)...});
}

}  // namespace shardwright
