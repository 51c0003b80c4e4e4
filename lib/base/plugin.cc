#include "base/plugin.h"

#include <dlfcn.h>
#include <unistd.h>

namespace shardwright {

Result<std::string> FindPlugin(std::string_view file) {
  // Where this code lies is told by anything in it that is no function.
  static constexpr char kHere = 0;
  Dl_info info = {};
  const bool told = dladdr(&kHere, &info) != 0 && info.dli_fname != nullptr;
  const std::string_view own = told ? info.dli_fname : "";
  const std::size_t slash = own.rfind('/');
  const std::string folder(slash == std::string_view::npos ? "" : own.substr(0, slash));
  std::string why;
  for (const char* const plugins : {SW_PLUGINS_FROM_PROGRAMS, SW_PLUGINS_FROM_LIBRARIES}) {
    std::string path = folder + "/" + plugins;
    path += "/" + std::string(file);
    if (access(path.c_str(), F_OK) == 0) return path;
    if (why.empty()) why = path + ": no such file";
  }
  return Fail(Errc::kNotFound, why);
}

std::string WhyNotOpened() {
  const char* const why = dlerror();
  return why == nullptr ? "cannot be opened" : why;
}

}  // namespace shardwright
