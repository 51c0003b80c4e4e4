// SPDX-License-Identifier: Apache-2.0
// Doubles of the CUDA runtime and of NCCL, in host memory, for machines without a GPU.
// They have the names and signatures of the real ones, replace them at link time (CUDA) or at
// dlopen (NCCL), and guarantee as little as the real ones do:
//  * Queued work runs as late as possible: when a call asks for its result, and not at the first
//    time. It runs in the calling thread, and only as far as the call requires.
//  * Device memory is mapped without access rights. Only queued work reaches it, through a second
//    mapping. New memory is filled with 0xCB, freed memory with 0xDD.
//  * A copy from or to ordinary memory follows CUDA's rule: the source is read before the call
//    returns, the target of a copy to the host is written before it returns; the rest is late.
//  * Work submitted to a communicator may reach its stream only when a call polls the communicator.
//  * Each call can be made to fail. Violations() reports misuse that only a wrong program commits.
// Several ranks are threads, each a "process" (SetProcess). A process cannot access memory of
// another except through handles. Handles also reach real other processes; NCCL does not.

#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright::cuda_double {

struct Options {
  int devices = 8;
  std::uint64_t device_bytes = std::uint64_t{256} << 20;  ///< memory of each
  bool hang_nccl = false;     ///< communicators form, but their work never ends
  bool hang_streams = false;  ///< no queued work ever ends
  bool told = true;           ///< a rank that aborts or fails shows on the others as an error
};

/// Returns the doubles to the state of a new process. Forgets all remaining objects.
void Reset(const Options& options = {});

/// Sets the process that the calling thread belongs to from now on. The default is process 0.
void SetProcess(int process);

/// Makes call number `call`, from 1, of a process fail. Each call of a process is counted, but a
/// repeated query counts once, and calls for error texts and the last error do not count. A CUDA
/// code for a broken device (cudaErrorECCUncorrectable) stays: every later call returns it, and all
/// queued work is lost.
void FailCall(int process, std::uint64_t call, cudaError_t cuda, ncclResult_t nccl);

/// Makes piece `work` of queued work of a process, from 1, fail when it runs, as a kernel does that
/// reads an invalid address.
void FailWork(int process, std::uint64_t work);

struct Told {
  std::uint64_t calls = 0;  ///< counted calls
  std::uint64_t works = 0;  ///< pieces of work that have run
  std::string failed;       ///< the function that was made to fail
};
Told About(int process);

/// Counts of the objects that exist in all processes and have not been freed.
struct Live {
  std::uint64_t memory = 0;
  std::uint64_t mappings = 0;
  std::uint64_t streams = 0;
  std::uint64_t events = 0;
  std::uint64_t communicators = 0;
  std::uint64_t All() const { return memory + mappings + streams + events + communicators; }
};
Live Count();

/// Returns the misuse that only a wrong program commits: freeing memory under queued work, waiting
/// without a timeout, using handles of destroyed objects, ranks that disagree.
std::vector<std::string> Violations();

}  // namespace shardwright::cuda_double
