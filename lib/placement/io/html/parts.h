// SPDX-License-Identifier: Apache-2.0
// lib/placement/io/html: what the page of a comparison is made of.
// page.css, page.html and page.js are files beside this header. lib/support/html/embed.cmake makes
// them part of the program, so that a page needs no file at run time; report_page.h puts them
// together.

#pragma once

namespace shardwright::placement {

/// Text of page.css: the styles that this page has beside those of all pages. Ends with 0.
extern const char* const kPageCss;

/// Text of page.html: the body of the page, which the script fills. Ends with 0.
extern const char* const kPageHtml;

/// Text of page.js: reads the figures from the element "data" of the page and draws them. Ends
/// with 0.
extern const char* const kPageJs;

}  // namespace shardwright::placement
