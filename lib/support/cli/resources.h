// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace shardwright::cli {

/// Ranks of this job on this machine, as the launcher tells in the environment; 1 without one.
/// Local.
unsigned LocalRankCount();

/// This process's rank as the launcher tells in the environment, before MPI is started; 0 without.
/// Local.
int LauncherRank();

/// First count of SLURM_TASKS_PER_NODE: "4(x2),3" is 4; 0 if the text is something else.
/// Local.
unsigned ParseSlurmTasks(std::string_view text);

/// Threads of a rank when nobody says: the processors it may run on, within its share of the
/// machine and of the control group's quota. At least 1.
/// Local.
unsigned DefaultThreads();

/// Memory of a rank when nobody says: 1 GiB, or its share of a quarter of the machine (or of the
/// control group's limit) when that is less. At least kMemoryMinBytes.
/// Local.
std::uint64_t DefaultMemoryBytes();

/// Largest resident size of this process so far, in bytes.
/// Local.
std::uint64_t PeakMemoryBytes();

}  // namespace shardwright::cli
