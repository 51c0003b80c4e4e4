// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "support/base/result.h"

namespace shardwright::os {

/// Resolves links and dots in a path.
/// \returns an empty text if a component is missing or links form a loop
/// \error kNotFound  the path cannot be looked up for another reason, such as an I/O error
/// Local.
Result<std::string> ResolvePath(const std::string& path);

}  // namespace shardwright::os
