// SPDX-License-Identifier: Apache-2.0
// lib/support/text: formats text for terminals.
// Widths, line breaks and tables, and escaping of names from files.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright::text {

/// Returns the terminal columns of valid UTF-8 `text`, one per code point.
/// Local.
std::size_t DisplayWidth(std::string_view text);

/// Cuts `text` to at most `width` columns. A cut text ends with an ellipsis.
/// \pre width > 0
/// Local.
std::string Truncate(std::string_view text, std::size_t width);

/// Escapes control characters, invisible formatting characters (some of which
/// reverse the text direction) and invalid UTF-8 in `text` as \xNN, so that names
/// from a file cannot control a terminal or look like other names. Tabs and line
/// ends are escaped too.
/// Local.
std::string Printable(std::string_view text);

/// Escapes control and formatting characters beyond ASCII in `text` as \xNN. For HTML
/// pages, where line ends are white space.
/// Local.
std::string VisibleText(std::string_view text);

/// Breaks a text at spaces into lines of at most `width` columns. Longer words get their own line.
/// Local.
std::vector<std::string> Wrap(std::string_view text, std::size_t width);

/// Formats ranks as "rank 3" or "ranks 0-3,7".
/// \pre sorted, without repeats, not empty
/// Local.
std::string RankList(std::span<const int> ranks);

/// Formats numbers in ascending order as "0, 3-5"; "none" if there are none.
/// Pure.
std::string Ranges(std::vector<std::uint32_t> ids);

/// Returns the candidate with the fewest edits (insert, drop, replace, swap of adjacent
/// characters) from `word`, or "" if none is close enough to be a typing error.
/// Local.
std::string Nearest(std::string_view word, std::span<const std::string> candidates);

/// Formats a duration: "0.42 s", "2.1 s", "95 s", "4 min 5 s", "3 h 12 min".
/// Local.
std::string FormatSeconds(double seconds);

}  // namespace shardwright::text
