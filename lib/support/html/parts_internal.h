// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace shardwright::html {

// Contents of page.css, compiled in by embed.cmake.
extern const char* const kPageCss;

}  // namespace shardwright::html
