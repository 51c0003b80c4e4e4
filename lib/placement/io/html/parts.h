// SPDX-License-Identifier: Apache-2.0
// lib/placement/io/html: the parts of the HTML report of a comparison.
// page.css, page.html, page.js and page.costs.js are in the same folder as this header.
// lib/support/html/embed.cmake compiles them into the program, so that the report needs no file
// at run time. report_page.h combines them.

#pragma once

namespace shardwright::placement {

/// Text of page.css: the styles of this report in addition to the common ones. Ends with 0.
extern const char* const kPageCss;

/// Text of page.html: the body of the report, which the script fills. Ends with 0.
extern const char* const kPageHtml;

/// Text of page.js: reads the figures from the element "data" of the report and draws them.
/// Ends with 0.
extern const char* const kPageJs;

/// Text of page.costs.js: draws times and memory. Must precede page.js in the script. Ends with 0.
extern const char* const kPageCostsJs;

}  // namespace shardwright::placement
