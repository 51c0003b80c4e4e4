#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace shardwright::exec {

// Texts in JSON that tell whether they are damaged: one of the first fields is the digest of all
// their bytes, with zeros for its own digits. Source: docs/formats/store.md.

/// Name of the field.
inline constexpr const char* kTextSum = "xxh3_128";

/// What the field has while the text is made: 32 zeros.
std::string NoTextSum();

/// Enters the digest of a text that has the field.
/// Pure.
std::string WithTextSum(std::string text);

/// Proves a text that has the field; one without it, of an older release or another program, is
/// taken as it is.
/// \param where  names the text in the message
/// \error kBadInput  the digest is of another text
/// Pure.
Status CheckTextSum(std::string_view text, const std::string& where);

}  // namespace shardwright::exec
