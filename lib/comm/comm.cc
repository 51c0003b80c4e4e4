#include "comm/comm.h"

#include <array>
#include <cstdlib>
#include <string_view>

#include "comm/mpi_internal.h"

namespace shardwright::comm {

namespace {

std::string_view Env(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

}  // namespace

bool UnderLauncher() {
  // A launcher that says how many ranks there are and says one: serial does the same for less.
  for (const char* const size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (!Env(size).empty()) return Env(size) != "1";
  }
  if (!Env("PMI_RANK").empty() || !Env("PMIX_RANK").empty()) return true;
  const std::string_view slurm_mpi = Env("SLURM_MPI_TYPE");
  return !Env("SLURM_PROCID").empty() && !slurm_mpi.empty() && slurm_mpi != "none";
}

Result<std::unique_ptr<Comm>> MakeComm(const CommOptions& options) {
  constexpr std::uint64_t kMaxChunk = std::uint64_t{1} << 30;
  if (options.chunk_bytes < 1 || options.chunk_bytes > kMaxChunk) {
    return Fail(Errc::kUsage, "message size: 1 to " + std::to_string(kMaxChunk) + " bytes, found " +
                                  std::to_string(options.chunk_bytes));
  }
  if (UnderLauncher()) return internal::MakeMpiComm(options);
  return MakeSerialComm();
}

}  // namespace shardwright::comm
