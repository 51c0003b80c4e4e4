// SPDX-License-Identifier: Apache-2.0
#include "support/base/plugin.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include "support/base/system.h"

namespace shardwright {

namespace {

/// Returns the folder of the program or the shared library that contains this code,
/// empty if it is unknown.
std::string OwnFolder() {
  static constexpr char kHere = 0;  // an address that is not a function's
  Dl_info info = {};
  link_map* object = nullptr;
  if (dladdr1(&kHere, &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0) return {};
  if (object->l_name != nullptr && *object->l_name != '\0') return FolderOf(object->l_name);
  // For a program, l_name is empty, and argv[0] is not a path if the shell searched PATH.
  return FolderOfProgram(getpid());
}

}  // namespace

Result<std::string> FindPlugin(std::string_view file) {
  const std::string folder = OwnFolder();
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
