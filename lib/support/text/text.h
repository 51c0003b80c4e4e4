// SPDX-License-Identifier: Apache-2.0
// lib/support/text: text for terminals.
// Widths, line breaks, tables, and the escaping of names out of files.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright::text {

/// Columns that valid UTF-8 `text` takes on a terminal, one per code point.
/// Local.
std::size_t DisplayWidth(std::string_view text);

/// `text` cut to at most `width` columns, the last one an ellipsis when something was cut.
/// \pre width > 0
/// Local.
std::string Truncate(std::string_view text, std::size_t width);

/// `text` with control characters, invisible formatting characters (some of which turn the
/// direction of the text around them) and bytes that are not UTF-8 written as \xNN, so that names
/// out of a file cannot steer a terminal or show as other names. Tabs and line ends are control
/// characters too.
/// Local.
std::string Printable(std::string_view text);

/// `text` with only the control and formatting characters beyond ASCII written as \xNN: for pages,
/// where line ends are white space.
/// Local.
std::string VisibleText(std::string_view text);

/// Lines of at most `width` columns broken at spaces; a longer word keeps a line of its own.
/// Local.
std::vector<std::string> Wrap(std::string_view text, std::size_t width);

/// Ranks as "rank 3" or "ranks 0-3,7".
/// \pre sorted, without repeats, not empty
/// Local.
std::string RankList(std::span<const int> ranks);

/// Numbers in ascending order as "0, 3-5"; of none "none".
/// Pure.
std::string Ranges(std::vector<std::uint32_t> ids);

/// The candidate nearest to `word` by edits (insert, drop, replace, swap of neighbours), or "" when
/// none is near enough to be a slip of the fingers.
/// Local.
std::string Nearest(std::string_view word, std::span<const std::string> candidates);

/// Duration for people: "0.42 s", "2.1 s", "95 s", "4 min 5 s", "3 h 12 min".
/// Local.
std::string FormatSeconds(double seconds);

}  // namespace shardwright::text
