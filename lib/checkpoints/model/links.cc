// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/model/links.h"

#include <string_view>

#include "support/os/directory.h"
#include "support/os/real_path.h"

namespace shardwright::checkpoints {
namespace {

/// Returns "/cache/models--org--name" for a folder
/// "/cache/models--org--name/snapshots/revision"; empty for other folders.
std::string_view CachedModelOf(std::string_view folder) {
  constexpr std::string_view kSnapshots = "/snapshots/";
  const std::size_t at = folder.find(kSnapshots);
  if (at == std::string_view::npos) return {};
  const std::string_view model = folder.substr(0, at);
  return model.substr(model.rfind('/') + 1).starts_with("models--") ? model : std::string_view();
}

}  // namespace

bool IsLinkAllowed(const std::string& folder, const std::string& file) {
  if (file.starts_with(folder + "/")) return true;
  const std::string model(CachedModelOf(folder));
  return !model.empty() && file.starts_with(model + "/blobs/");
}

Result<std::string> RealPathInFolder(const std::string& path) {
  SW_TRY_ASSIGN(std::string real, os::ResolvePath(path));
  if (real.empty()) {
    // Opening the file reports the reason.
    SW_TRY(os::File::OpenRead(path));
    return Fail(Errc::kNotFound, path, ": cannot be resolved");
  }
  const std::size_t slash = path.rfind('/');
  SW_TRY_ASSIGN(const std::string folder,
                os::ResolvePath(slash == std::string::npos ? "." : path.substr(0, slash + 1)));
  if (IsLinkAllowed(folder, real)) return real;
  return Fail(Errc::kBadInput, path, ": the link leads out of the folder, to ", real,
              ": replace it with the file itself");
}

Result<std::string> ReadTextInFolder(const std::string& path, std::uint64_t cap) {
  SW_TRY_ASSIGN(const std::string real, RealPathInFolder(path));
  SW_TRY_ASSIGN(const os::File file, os::Directory::OpenReal(real, path));
  return os::ReadWholeText(file, cap);
}

}  // namespace shardwright::checkpoints
