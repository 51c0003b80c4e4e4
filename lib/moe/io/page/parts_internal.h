// lib/moe/io/page: what the page of a comparison is made of.
// page.css, page.html and page.js, made part of the program by lib/page/embed.cmake.

#pragma once

namespace shardwright::moe {

// page.css, page.html and page.js, made part of the program by lib/page/embed.cmake.
extern const char* const kPageCss;
extern const char* const kPageHtml;
extern const char* const kPageJs;

}  // namespace shardwright::moe
