// SPDX-License-Identifier: Apache-2.0
#include "support/comm/comm.h"

#include <string_view>

#include "support/comm/mpi_internal.h"
#include "support/comm/mpi_library_internal.h"

namespace shardwright::comm {

namespace {

/// Returns whether the user has set SHARDWRIGHT_MPI to "none".
bool IsAlone() { return internal::ProcessEnvironment(internal::kSetting) == internal::kAlone; }

}  // namespace

bool UnderLauncher() {
  using internal::ProcessEnvironment;
  if (IsAlone()) return false;
  // If a launcher has started exactly one rank, serial gives the same result faster.
  for (const char* const size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (!ProcessEnvironment(size).empty()) return ProcessEnvironment(size) != "1";
  }
  // srun sets the step's number of tasks. If another launcher runs within a step of one
  // task, its PMIx namespace has a name of its own.
  const std::string_view names = ProcessEnvironment("PMIX_NAMESPACE");
  const bool of_step = names.empty() || names.starts_with("slurm.");
  if (of_step && ProcessEnvironment("SLURM_STEP_NUM_TASKS") == "1") return false;
  if (!ProcessEnvironment("PMI_RANK").empty() || !ProcessEnvironment("PMIX_RANK").empty())
    return true;
  const std::string_view slurm_mpi = ProcessEnvironment("SLURM_MPI_TYPE");
  return !ProcessEnvironment("SLURM_PROCID").empty() && !slurm_mpi.empty() && slurm_mpi != "none";
}

std::uint64_t TasksApart() {
  if (IsAlone() || UnderLauncher()) return 1;
  return internal::LauncherSize(internal::ProcessEnvironment).value_or(1);
}

Result<std::unique_ptr<Comm>> MakeComm(const CommOptions& options) {
  constexpr std::uint64_t kMaxChunk = std::uint64_t{1} << 30;
  if (options.chunk_bytes < 1 || options.chunk_bytes > kMaxChunk) {
    return Fail(Errc::kUsage, "message size: 1 to ", kMaxChunk, " bytes, found ",
                options.chunk_bytes);
  }
  if (UnderLauncher()) return internal::MakeMpiComm(options);
  return MakeSerialComm();
}

}  // namespace shardwright::comm
