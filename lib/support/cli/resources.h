// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace shardwright::cli {

/// Returns the number of ranks on this machine from the launcher's variables, 1 without a launcher.
/// Local.
unsigned LocalRankCount();

/// Returns this process's rank from the launcher's variables, before MPI starts; 0 if none.
/// Local.
int LauncherRank();

/// Returns the first count of SLURM_TASKS_PER_NODE: 4 for "4(x2),3"; 0 if the text is malformed.
/// Local.
unsigned ParseSlurmTasks(std::string_view text);

/// Returns the default of --threads: the processors that this rank may use, limited to its
/// share of the machine and of the control group's quota, and by the default of --memory, which
/// has the buffers of all threads. At least 1.
/// Local.
unsigned DefaultThreads();

/// Returns the default of --memory in bytes: 1 GiB, or less if the rank's share of a quarter of
/// the machine's memory (or of the control group's limit) is less. At least kMemoryMinBytes.
/// Local.
std::uint64_t DefaultMemoryBytes();

/// Raises this process's limit of open files as far as the system allows, to 65,536 at most.
/// The usual limit of 1,024 is too low for checkpoints of many files.
/// Local.
void RaiseOpenFileLimit();

/// Returns the largest resident set size of this process so far, in bytes.
/// Local.
std::uint64_t PeakMemoryBytes();

}  // namespace shardwright::cli
