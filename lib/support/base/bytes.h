// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright {

/// Parses a size: a decimal number, then an optional unit. KiB MiB GiB TiB are powers of 1024; K KB
/// M MB G GB T TB powers of 1000; B or nothing means bytes. A fraction is rounded to whole bytes.
/// \error kUsage  the text is negative, has an exponent or an unknown unit, a fraction of single
///        bytes or with more than 18 digits, or does not fit in 64 bits
/// Local.
Result<std::uint64_t> ParseBytes(std::string_view text);

/// Parses a bandwidth in bytes per second: a size, then an optional "/s".
/// \error kUsage  as ParseBytes
/// Local.
Result<std::uint64_t> ParseBandwidth(std::string_view text);

/// Formats a size with three significant digits and a binary unit: "4.36 GiB", "512 B".
/// Local.
std::string FormatBytes(std::uint64_t bytes);

}  // namespace shardwright
