// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

namespace shardwright {

/// One part of a message: text, one character, or an integer in decimal digits. A part refers to
/// its text, and must not outlive it. Other types do not convert: format numbers with a fraction
/// with Fixed() or Percent() of text.h.
class MessagePart {
 public:
  // NOLINTBEGIN(google-explicit-constructor): callers pass the values themselves.
  MessagePart(std::string_view text) : text_(text) {}
  MessagePart(const std::string& text) : text_(text) {}
  MessagePart(const char* text) : text_(text) {}
  template <std::integral T>
  requires(!std::same_as<T, bool>) MessagePart(T value) {
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
  char buffer_[20];       ///< holds every 64-bit integer with its sign
};

/// Joins the parts without separators: StrCat(path, ": ", 3, " files").
inline std::string StrCat(std::initializer_list<MessagePart> parts) {
  std::size_t size = 0;
  for (const MessagePart& part : parts) size += part.text().size();
  std::string out;
  out.reserve(size);
  for (const MessagePart& part : parts) out += part.text();
  return out;
}

template <class... Parts>
requires(sizeof...(Parts) > 0 && (std::convertible_to<const Parts&, MessagePart> &&
                                  ...)) std::string StrCat(const Parts&... parts) {
  return StrCat({MessagePart(parts)...});
}

}  // namespace shardwright
