// SPDX-License-Identifier: Apache-2.0
#include "support/comm/mpi_library_internal.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <span>
#include <utility>

#include "support/base/checked.h"
#include "support/base/plugin.h"
#include "support/base/system.h"

namespace shardwright::comm::internal {

namespace {

struct FamilyNames {
  std::string_view word;               // in SHARDWRIGHT_MPI and in the plugin's name
  std::string_view name;               // for messages
  const char* symbol;                  // symbol that only this family has
  std::span<const char* const> files;  // file names of the library; uses the first found
};

constexpr std::array kOpenMpiFiles = {"libmpi.so.40"};
// The names in MPICH's ABI, in Debian, and on Cray systems.
constexpr std::array kMpichFiles = {"libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12"};

const FamilyNames& NamesOf(MpiFamily family) {
  static constexpr FamilyNames kOpenMpi = {"openmpi", "Open MPI", "ompi_mpi_comm_world",
                                           kOpenMpiFiles};
  static constexpr FamilyNames kMpich = {"mpich", "MPICH", "MPI_Init_thread", kMpichFiles};
  return family == MpiFamily::kOpenMpi ? kOpenMpi : kMpich;
}

/// Opens a library with symbols visible to plugins. Never closes it, as MPI has its own threads.
void* OpenLibrary(const std::string& path) { return dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL); }

std::string PathOf(const void* symbol, const std::string& otherwise) {
  Dl_info info = {};
  if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return otherwise;
  return info.dli_fname;
}

std::optional<MpiFamily> FamilyOf(void* library) {
  for (const MpiFamily family : {MpiFamily::kOpenMpi, MpiFamily::kMpich}) {
    if (dlsym(library, NamesOf(family).symbol) != nullptr) return family;
  }
  return std::nullopt;
}

/// Opens the plugin of a family.
Result<MpiLibrary> WithPlugin(MpiFamily family, void* library, const std::string& file) {
  const FamilyNames& names = NamesOf(family);
  const auto path = FindPlugin("shardwright_mpi_" + std::string(names.word) + ".so");
  if (!path) {
    return Within(StrCat("built or installed without support for ", names.name), path.error());
  }
  void* const plugin = dlopen(path->c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) return Fail(Errc::kNotFound, WhyNotOpened());
  const auto get = reinterpret_cast<MpiPlugin*>(dlsym(plugin, kMpiPluginSymbol));
  const MpiCalls* const calls = get == nullptr ? nullptr : get();
  if (calls == nullptr || calls->form != kMpiCallsForm) {
    return Fail(Errc::kNotFound, *path, ": belongs to another release of Shardwright");
  }
  return MpiLibrary{calls, PathOf(dlsym(library, "MPI_Init_thread"), file)};
}

Result<MpiLibrary> OpenPath(const std::string& path) {
  void* const library = OpenLibrary(path);
  if (library == nullptr) {
    return Fail(Errc::kNotFound, kSetting, ": ", WhyNotOpened());
  }
  const std::optional<MpiFamily> family = FamilyOf(library);
  if (!family) return Fail(Errc::kUsage, kSetting, ": ", path, " is not an MPI library");
  return WithPlugin(*family, library, path);
}

}  // namespace

std::string_view ProcessEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

Result<MpiChoice> ChooseMpi(const Environment& env) {
  using enum MpiFamily;
  const std::string_view asked = env(kSetting);
  if (asked.find('/') != std::string_view::npos) return MpiChoice{{}, std::string(asked)};
  for (const MpiFamily family : {kOpenMpi, kMpich}) {
    if (asked == NamesOf(family).word) return MpiChoice{{family}, {}};
  }
  if (!asked.empty()) {
    return Fail(Errc::kUsage, kSetting,
                ": openmpi, mpich, none or the path of a library expected, found '", asked, "'");
  }
  // Variables of mpirun of Open MPI, then of the MPICH, Intel MPI and MVAPICH launchers.
  if (!env("OMPI_COMM_WORLD_SIZE").empty()) return MpiChoice{{kOpenMpi}, {}};
  if (!env("HYDI_CONTROL_FD").empty() || !env("MPI_LOCALNRANKS").empty()) {
    return MpiChoice{{kMpich}, {}};
  }
  // srun and similar launchers: Open MPI uses PMIx, MPICH uses PMI-1 and PMI-2.
  if (!env("PMI_RANK").empty() || !env("PMI_SIZE").empty() ||
      env("SLURM_MPI_TYPE").starts_with("cray")) {
    return MpiChoice{{kMpich, kOpenMpi}, {}};
  }
  return MpiChoice{{kOpenMpi, kMpich}, {}};
}

std::optional<std::uint64_t> LauncherSize(const Environment& env) {
  for (const char* const name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    if (const auto size = NumberIn<std::uint64_t>(env(name))) return size;
  }
  // A rank above 0 implies several ranks.
  for (const char* const name : {"PMI_RANK", "PMIX_RANK"}) {
    if (const auto rank = NumberIn<std::uint64_t>(env(name)); rank && *rank > 0) return *rank + 1;
  }
  return std::nullopt;
}

Result<MpiLibrary> OpenLaunchersMpi() {
  SW_TRY_ASSIGN(const MpiChoice choice, ChooseMpi(ProcessEnvironment));
  if (!choice.path.empty()) return OpenPath(choice.path);
  // First the library of the launcher, which is the parent process unless a shell is between.
  const std::string launcher = FolderOfProgram(getppid());
  std::string tried;
  for (const MpiFamily family : choice.families) {
    for (const char* const file : NamesOf(family).files) {
      for (const std::string& path : {launcher + "/../lib/" + file, std::string(file)}) {
        if (path[0] == '/' && (launcher.empty() || access(path.c_str(), F_OK) != 0)) continue;
        if (void* const library = OpenLibrary(path)) return WithPlugin(family, library, path);
      }
      tried += (tried.empty() ? "" : ", ") + std::string(file);
    }
  }
  return Fail(Errc::kNotFound,
              "an MPI launcher has started this process, but no MPI library was found (tried ",
              tried, "): load the launcher's module, or set ", kSetting,
              " to the path of the library");
}

Status CheckMetOthers(const MpiLibrary& library, std::uint64_t started, int size) {
  if (size > 1 || started <= 1) return {};
  std::array<char, 256> version = {};
  library.calls->library(version.data(), version.size());
  return Fail(Errc::kUsage, "the launcher has started ", started, " processes or more, but with ",
              version.data(), " (", library.path, ") each runs alone: set ", kSetting,
              " to the launcher's own MPI library");
}

}  // namespace shardwright::comm::internal
