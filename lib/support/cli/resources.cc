// SPDX-License-Identifier: Apache-2.0
#include "support/cli/resources.h"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

#include "support/cli/flags.h"

namespace shardwright::cli {
namespace {

std::optional<std::uint64_t> EnvironmentCount(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return std::nullopt;
  const Result<std::uint64_t> count = ParseCount(text, 0, 1'000'000'000);
  if (!count) return std::nullopt;
  return *count;
}

unsigned AffinityCount() {
  // The kernel rejects a mask smaller than its own, so the loop doubles the size until it fits.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(cpus));
    if (set == nullptr) break;
    const std::size_t size = CPU_ALLOC_SIZE(static_cast<std::size_t>(cpus));
    const int failed = sched_getaffinity(0, size, set);
    const int count = failed == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (failed == 0) return static_cast<unsigned>(std::max(count, 1));
  }
  return 1;
}

/// Returns the control group's quota in whole processors, rounded up; nullopt without a quota.
std::optional<std::uint64_t> QuotaProcessors() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::uint64_t quota = 0;
  std::uint64_t period = 0;
  if (!(file >> quota >> period) || quota == 0 || period == 0) return std::nullopt;
  return (quota - 1) / period + 1;
}

std::uint64_t MachineMemoryBytes() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGESIZE);
  std::uint64_t bytes = std::uint64_t{4} << 30;
  if (pages > 0 && page_bytes > 0) {
    bytes = static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page_bytes);
  }
  std::ifstream file("/sys/fs/cgroup/memory.max");
  std::uint64_t limit = 0;
  if (file >> limit && limit > 0) bytes = std::min(bytes, limit);
  return bytes;
}

}  // namespace

unsigned ParseSlurmTasks(std::string_view text) {
  unsigned count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc()) return 0;
  const std::string_view rest = text.substr(static_cast<std::size_t>(end - text.data()));
  return rest.empty() || rest[0] == '(' || rest[0] == ',' ? count : 0;
}

unsigned LocalRankCount() {
  for (const char* name :
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"}) {
    if (const auto count = EnvironmentCount(name); count && *count > 0) {
      return static_cast<unsigned>(std::min<std::uint64_t>(*count, kThreadsMax));
    }
  }
  // A batch script's shell also has a task count but is not a rank. Only srun sets SLURM_STEP_*.
  const char* tasks = std::getenv("SLURM_STEP_TASKS_PER_NODE");
  if (tasks != nullptr) {
    return std::clamp(ParseSlurmTasks(tasks), 1U, kThreadsMax);
  }
  return 1;
}

int LauncherRank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"}) {
    if (const auto rank = EnvironmentCount(name)) return static_cast<int>(*rank);
  }
  return 0;
}

unsigned DefaultThreads() {
  // Each thread has buffers, at most in ucp-load --check: 18 MiB.
  constexpr std::uint64_t kThreadBytes = std::uint64_t{20} << 20;
  // If a launcher has bound the rank, its mask is its share already, and the division has no
  // effect. If not, the division prevents the ranks from starting too many threads together.
  std::uint64_t machine = static_cast<std::uint64_t>(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L));
  if (const auto quota = QuotaProcessors()) machine = std::min(machine, *quota);
  const std::uint64_t share = std::max<std::uint64_t>(machine / LocalRankCount(), 1);
  const std::uint64_t fit = std::max<std::uint64_t>(DefaultMemoryBytes() / kThreadBytes, 1);
  return static_cast<unsigned>(std::min<std::uint64_t>({share, AffinityCount(), kThreadsMax, fit}));
}

std::uint64_t DefaultMemoryBytes() {
  const std::uint64_t share = MachineMemoryBytes() / 4 / LocalRankCount();
  return std::clamp(share, kMemoryMinBytes, std::uint64_t{1} << 30);
}

void RaiseOpenFileLimit() {
  constexpr rlim_t kEnough = 65'536;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t raised = std::min(limit.rlim_max, kEnough);
  if (limit.rlim_cur >= raised) return;
  limit.rlim_cur = raised;
  // The old limit is enough to run with.
  [[maybe_unused]] const int rc = ::setrlimit(RLIMIT_NOFILE, &limit);
}

std::uint64_t PeakMemoryBytes() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<std::uint64_t>(std::max(usage.ru_maxrss, 0L)) * 1024;  // Linux counts KiB
}

}  // namespace shardwright::cli
