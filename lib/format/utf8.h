#pragma once

#include <cstddef>
#include <string_view>

namespace shardwright {

enum class Surrogates : unsigned char { kRefuse, kAllow };

/// True if `text` is well-formed UTF-8. Python's pickles may carry lone surrogates: kAllow lets
/// those pass.
/// Local.
bool IsUtf8(std::string_view text, Surrogates surrogates);

/// Length of the longest prefix that is ASCII.
/// Local.
std::size_t AsciiBytes(std::string_view text);

}  // namespace shardwright
