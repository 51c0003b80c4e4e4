#pragma once

namespace shardwright::page {

// page.css, made part of the program by embed.cmake.
extern const char* const kPageCss;

}  // namespace shardwright::page
