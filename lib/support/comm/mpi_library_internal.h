// SPDX-License-Identifier: Apache-2.0
// Which MPI the launcher of this process speaks, and opening it.

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

/// MPIs whose programs can be run with each other's libraries. MPICH's is also that of Intel MPI,
/// Cray MPICH and MVAPICH.
enum class MpiFamily : std::uint8_t { kOpenMpi, kMpich };

/// The value of an environment variable, empty if there is none.
using Environment = std::function<std::string_view(const char* name)>;

/// Variable that chooses the MPI: a family, a path, or "none" for a process that is alone although
/// a launcher has started it with others.
constexpr const char* kSetting = "SHARDWRIGHT_MPI";
constexpr std::string_view kAlone = "none";

/// Those of this process.
std::string_view ProcessEnvironment(const char* name);

/// Which libraries to try, in order.
struct MpiChoice {
  std::vector<MpiFamily> families;
  std::string path;  // of the one library to open, whatever its family; empty for the usual names
};

/// What the launcher's variables and SHARDWRIGHT_MPI ask for. Local.
/// \error kUsage if SHARDWRIGHT_MPI is neither openmpi, mpich, none nor a path
Result<MpiChoice> ChooseMpi(const Environment& env);

/// How many ranks the launcher says that it has started; nullopt if it says nothing. Local.
std::optional<std::uint64_t> LauncherSize(const Environment& env);

/// An MPI library and the calls of the plugin that was made for it; both stay open for good.
struct MpiLibrary {
  const MpiCalls* calls = nullptr;
  std::string path;  // of the library
};

/// Opens the MPI that the launcher speaks. Looks for its library where the launcher itself lies,
/// then where the dynamic linker looks. Does not start it. Local.
/// \error kUsage as ChooseMpi, and if the file named there is no MPI; kNotFound if there is no
///        library, or no plugin for it
Result<MpiLibrary> OpenLaunchersMpi();

/// That MPI has brought this process together with the others that the launcher has started. With
/// the library of another family each of them would believe to be alone and do all of the work.
/// Local.
/// \error kUsage if MPI sees `size` = 1 rank though the launcher has `started` more
Status CheckMetOthers(const MpiLibrary& library, std::uint64_t started, int size);

}  // namespace shardwright::comm::internal
