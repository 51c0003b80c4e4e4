// SPDX-License-Identifier: Apache-2.0
// lib/support/html: pages to look at.
// One HTML file each that needs nothing else, no network and no foreign script. page.h makes the
// file, chart.h draws curves, timeline.h what happened when. What is on a page is the business of
// the module that reports: partial/planner/forecast/simulate_page.h, partial/report/sends_page.h,
// placement/io/report_page.h.

#pragma once

#include <string>
#include <string_view>

namespace shardwright::html {

/// Text as the content of an element or of a quoted attribute: none of it is markup.
/// \pre UTF-8 without control characters
/// Pure.
std::string Escape(std::string_view text);

/// JSON as the content of a script element: nothing in it can end the element.
/// Pure.
std::string ScriptSafe(std::string_view json);

/// One page.
struct Document {
  std::string title;  ///< plain text
  std::string css;    ///< beside the styles that all pages have
  std::string body;   ///< markup
  std::string script;
};

/// The whole file. The page itself forbids the browser to reach for anything, and to run scripts if
/// it has none. It follows the reader's choice of light or dark, and is light on paper.
/// Pure.
std::string Render(const Document& document);

}  // namespace shardwright::html
