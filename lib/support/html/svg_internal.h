// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace shardwright::html {

using Attribute = std::pair<const char*, std::string>;

/// Formats a coordinate.
std::string At(double value);
/// \param content  markup; if it is empty, the element has no content
std::string Element(const char* name, const std::vector<Attribute>& attributes,
                    const std::string& content = "");
std::string Text(double x, double y, const char* anchor, const std::string& text,
                 const char* style = "");
std::string Line(double x1, double y1, double x2, double y2, const std::string& style);

}  // namespace shardwright::html
