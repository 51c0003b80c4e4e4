// SPDX-License-Identifier: Apache-2.0
// Finds and opens the MPI library that matches the launcher of this process.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/comm/mpi_calls_internal.h"

namespace shardwright::comm::internal {

/// Families of MPI libraries. Programs run with any library of their family. MPICH's
/// family includes Intel MPI, Cray MPICH and MVAPICH.
enum class MpiFamily : std::uint8_t { kOpenMpi, kMpich };

/// Returns the value of an environment variable, empty if it is not set.
using Environment = std::function<std::string_view(const char* name)>;

/// Variable that selects the MPI: a family, a path, or "none" for a process that works
/// alone although a launcher has started several.
constexpr const char* kSetting = "SHARDWRIGHT_MPI";
constexpr std::string_view kAlone = "none";

/// Reads the environment of this process.
std::string_view ProcessEnvironment(const char* name);

/// Libraries to try, in order.
struct MpiChoice {
  std::vector<MpiFamily> families;
  std::string path;  // the one library to open, of any family; empty for the usual names
};

/// Selects the MPI from the launcher's variables and SHARDWRIGHT_MPI. Local.
/// \error kUsage if SHARDWRIGHT_MPI is not openmpi, mpich, none or a path
Result<MpiChoice> ChooseMpi(const Environment& env);

/// Returns the number of ranks from the launcher's variables, nullopt if they have none. Local.
std::optional<std::uint64_t> LauncherSize(const Environment& env);

/// An MPI library and the functions of its plugin. Both stay loaded until the process ends.
struct MpiLibrary {
  const MpiCalls* calls = nullptr;
  std::string path;  // of the library
};

/// Opens the launcher's MPI without starting it. Searches for the library first in the launcher's
/// own installation, then in the search path of the dynamic linker. Local.
/// \error kUsage as ChooseMpi, and if the file named there is not an MPI library; kNotFound
///        if there is no library, or no plugin for it
Result<MpiLibrary> OpenLaunchersMpi();

/// Checks that MPI has connected this process to the other processes of the launcher.
/// With a library of another family, each process would be rank 0 of 1 and do all
/// of the work. Local.
/// \error kUsage if MPI reports `size` = 1 although the launcher has `started` more ranks
Status CheckMetOthers(const MpiLibrary& library, std::uint64_t started, int size);

}  // namespace shardwright::comm::internal
