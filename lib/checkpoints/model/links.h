// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Returns true if a link in `folder` may lead to `file`: the file is inside that folder, or the
/// folder is a snapshot in a Hugging Face cache and the file is a blob of the same model
/// (models--ORG--NAME/snapshots/REVISION to models--ORG--NAME/blobs). Otherwise a hostile
/// checkpoint could choose which files of the user's machine are read.
/// \param folder, file  without links, as os::RealPath returns them
/// Pure.
bool IsLinkAllowed(const std::string& folder, const std::string& file);

/// Resolves all links in a file's path and checks that IsLinkAllowed permits the target. A
/// caller that opens the result with os::Directory::OpenReal opens the file that was checked.
/// \error kBadInput  a forbidden target, which the message names; kNotFound  a broken link
/// Local.
Result<std::string> RealPathInFolder(const std::string& path);

/// Reads a file of at most `cap` bytes after resolving its links as RealPathInFolder does.
/// \error as RealPathInFolder; kNotFound; kLimit
/// Local.
Result<std::string> ReadTextInFolder(const std::string& path, std::uint64_t cap);

}  // namespace shardwright::checkpoints
