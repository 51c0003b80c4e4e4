// SPDX-License-Identifier: Apache-2.0
// Doubles of the CUDA runtime and of NCCL, in host memory, for machines without a GPU.
// They have the names and signatures of the real ones, are linked (CUDA) and opened (NCCL) in their
// place, and promise as little as the real ones do:
//  * Queued work runs as late as it may: when somebody asks for it, and then not at the first time.
//    It runs in the thread that asks, and only as far as what was asked for needs.
//  * Device memory is mapped without any right: only queued work reaches it, by way of a second
//    mapping. New memory is filled with 0xCB, memory given back with 0xDD.
//  * A copy from or to ordinary memory follows CUDA's rule: the source is read before the call
//    returns, the target of a copy to the host is written before it returns; the rest is late.
//  * What is put on a communicator may reach its stream only when the communicator was asked.
//  * Each call can be made to fail. What only a wrong program does is a violation, see Violations.
// Several ranks are threads, each a "process" (SetProcess): memory of one is nothing to another,
// but through handles. Handles also reach real other processes; NCCL does not.

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

/// As a process that has just begun. What is still there of before is forgotten.
void Reset(const Options& options = {});

/// The process that the calling thread belongs to from now on; 0 unless told.
void SetProcess(int process);

/// Makes call number `call`, from 1, of a process fail. Calls of a process are counted, the same
/// question asked again not; questions for texts and for the last error not at all. A code of CUDA
/// that means a broken device (cudaErrorECCUncorrectable) stays: every later call has it, and what
/// is queued is lost.
void FailCall(int process, std::uint64_t call, cudaError_t cuda, ncclResult_t nccl);

/// Makes piece `work` of queued work of a process, from 1, fail when it runs, as a kernel that
/// reads what it must not.
void FailWork(int process, std::uint64_t work);

struct Told {
  std::uint64_t calls = 0;  ///< counted calls
  std::uint64_t works = 0;  ///< pieces of work that have run
  std::string failed;       ///< the function that was made to fail
};
Told About(int process);

/// What is there and has not been given back, in all processes.
struct Live {
  std::uint64_t memory = 0;
  std::uint64_t mappings = 0;
  std::uint64_t streams = 0;
  std::uint64_t events = 0;
  std::uint64_t communicators = 0;
  std::uint64_t All() const { return memory + mappings + streams + events + communicators; }
};
Live Count();

/// What only a wrong program does: memory given back under queued work, waits without a bound,
/// handles of things that are gone, ranks that disagree.
std::vector<std::string> Violations();

}  // namespace shardwright::cuda_double
