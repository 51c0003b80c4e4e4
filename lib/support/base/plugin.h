// SPDX-License-Identifier: Apache-2.0
// Opens shared libraries at run time, so that the programs do not link their dependencies.

#pragma once

#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright {

/// Returns the path of a plugin in the plugin folder. This folder is a sibling of the folder
/// that has the running program, or the shared library that contains this code.
/// \param file  file name, such as "shardwright_mpi_mpich.so"
/// \error kNotFound "PATH: no such file"
/// Local.
Result<std::string> FindPlugin(std::string_view file);

/// Returns why the last dlopen or dlsym in this thread failed. Local.
std::string WhyNotOpened();

}  // namespace shardwright
