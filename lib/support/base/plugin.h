// SPDX-License-Identifier: Apache-2.0
// Libraries that are opened while a program runs, so that nothing links what they link.

#pragma once

#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright {

/// Where a plugin lies: in the folder of plugins beside the folder of the programs, or of the
/// shared library that holds this code.
/// \param file  as "shardwright_mpi_mpich.so"
/// \error kNotFound "PATH: no such file"
/// Local.
Result<std::string> FindPlugin(std::string_view file);

/// Why the last dlopen or dlsym of this thread has failed. Local.
std::string WhyNotOpened();

}  // namespace shardwright
