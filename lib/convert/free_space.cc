// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "convert/convert.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::convert {

Result<os::FreeSpace> FreeSpaceFor(comm::Comm& comm, const std::string& output) {
  const auto look = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const os::ParentName split, os::SplitOutput(output));
    SW_TRY_ASSIGN(const os::FreeSpace free, os::FreeSpaceAt(split.parent));
    return free.bytes ? StrCat(*free.bytes, " ", free.bytes_quota) : std::string();
  };
  SW_TRY_ASSIGN(const std::string text, comm.OnRootText(look));
  os::FreeSpace free;
  if (text.empty()) return free;
  free.bytes = std::stoull(text);
  free.bytes_quota = text.substr(text.find(' ') + 1);
  return free;
}

}  // namespace shardwright::convert
