#include "dialect/core/links.h"

#include "os/dir.h"

namespace shardwright::dialect {

Status StaysInFolder(const std::string& path) {
  const std::string real = os::RealPath(path);
  const std::string folder = os::RealPath(path.substr(0, path.rfind('/')));
  if (real.empty() || real.starts_with(folder + "/")) return {};
  return Fail(Errc::kBadInput, path + ": a link that leads out of the folder, to " + real +
                                   ": put the file itself there");
}

}  // namespace shardwright::dialect
