#pragma once

#include <string>

#include "base/result.h"

namespace shardwright::dialect {

/// Refuses a file that is a link out of its folder: whoever made the checkpoint must not choose
/// which files of this machine are read. A link that leads nowhere passes, for opening it says so.
/// Local.
/// \error kBadInput, with where it leads
Status StaysInFolder(const std::string& path);

}  // namespace shardwright::dialect
