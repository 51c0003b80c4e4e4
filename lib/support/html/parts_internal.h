// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace shardwright::html {

// page.css, made part of the program by embed.cmake.
extern const char* const kPageCss;

}  // namespace shardwright::html
