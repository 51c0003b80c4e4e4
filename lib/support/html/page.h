// SPDX-License-Identifier: Apache-2.0
// lib/support/html: writes HTML reports.
// Each report is one HTML file without external resources or foreign scripts. page.h
// makes the file, chart.h draws curves, timeline.h draws events over time. The
// contents are in the modules that report: partial/planner/forecast/simulate_page.h,
// partial/report/sends_page.h and placement/io/report_page.h.

#pragma once

#include <string>
#include <string_view>

namespace shardwright::html {

/// Escapes a text for an element or a quoted attribute, so that none of it is markup.
/// \pre UTF-8 without control characters
/// Pure.
std::string Escape(std::string_view text);

/// Escapes JSON for a script element, so that nothing in it can end the element.
/// Pure.
std::string ScriptSafe(std::string_view json);

/// Returns the markup of one tile: a number that a report shows first. The body of a page puts
/// tiles into <div class="tiles">.
/// \param name, value, note  plain text
/// Pure.
std::string Tile(std::string_view name, std::string_view value, std::string_view note);

/// Contents of one HTML file.
struct Document {
  std::string title;  ///< plain text
  std::string css;    ///< in addition to the common styles
  std::string body;   ///< markup
  std::string script;
};

/// Returns the whole HTML file. Its content security policy forbids network access, and scripts if
/// it has none. It follows the reader's choice of a light or dark theme, and prints light.
/// Pure.
std::string Render(const Document& document);

}  // namespace shardwright::html
