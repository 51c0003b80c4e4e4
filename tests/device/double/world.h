// SPDX-License-Identifier: Apache-2.0
// State of the doubles. One mutex guards all of it.

#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "device/double/double.h"

namespace shardwright::cuda_double {

enum class Memory { kUnknown, kPinned, kDevice };

struct Allocation {
  Memory kind = Memory::kUnknown;
  std::byte* address = nullptr;  // address that programs see
  std::byte* alias = nullptr;    // address through which the doubles access it
  std::uint64_t bytes = 0;
  int process = 0;
  int device = 0;
  int file = -1;  // behind device memory
  std::uint64_t id = 0;
  bool mapped = false;  // another process's
};

/// A byte range that work reads or writes.
struct Touch {
  const void* at = nullptr;
  std::uint64_t bytes = 0;
};

struct Stream;
struct Batch;

struct Work {
  std::vector<Touch> touches;
  std::function<bool()> run;     // false: it accessed an invalid address; none: nothing to do
  std::shared_ptr<Batch> batch;  // of a communicator
};

struct Stream {
  int process = 0;
  int device = 0;
  std::deque<Work> queue;
  std::uint64_t ended = 0;  // works before the queue's first
  unsigned asked = 0;
  bool driving = false;
  bool destroyed = false;

  std::uint64_t queued() const { return ended + queue.size(); }
};

struct Event {
  int process = 0;
  std::shared_ptr<Stream> stream;
  std::uint64_t count = 0;
  unsigned asked = 0;
};

struct Process {
  int device = 0;
  cudaError_t last = cudaSuccess;
  cudaError_t broken = cudaSuccess;
  std::uint64_t calls = 0;
  std::uint64_t works = 0;
  std::uint64_t fail_call = 0;
  std::uint64_t fail_work = 0;
  cudaError_t fail_cuda = cudaSuccess;
  ncclResult_t fail_nccl = ncclSuccess;
  std::string failed;
  std::set<std::pair<std::string, const void*>> questions;  // since the last other call
};

struct World {
  std::mutex mutex;
  Options options;
  std::map<std::uintptr_t, Allocation> memory;  // by address
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::vector<std::shared_ptr<Stream>> orphans;  // destroyed with work
  std::map<void*, std::unique_ptr<Event>> events;
  std::map<int, Process> processes;
  std::vector<std::string> violations;
  std::uint64_t ids = 0;
};

World& TheWorld();
int ThisProcess();
Process& Mine();

/// Number of times a query answers "not yet" before it answers truthfully.
inline constexpr unsigned kPatience = 2;

void Violate(const std::string& what);

/// Counts a call.
/// \param question  object of a query that a program repeats, e.g. the event that it polls
/// \returns true if the call must fail
bool Fails(const char* function, const void* question = nullptr);

/// Begins a call of the runtime. \param breaks  whether a failure can only mean a broken device
cudaError_t Begin(const char* function, bool breaks = false, const void* question = nullptr);
/// Ends one: keeps a failure as the last error.
cudaError_t End(cudaError_t code);

/// Returns the allocation of this process that contains a whole byte range, or nullptr.
Allocation* Find(int process, const void* at, std::uint64_t bytes);
/// Returns the doubles' address of device memory; nullptr if `process` may not access it.
std::byte* Reach(int process, const void* at, std::uint64_t bytes);

/// Puts work on a stream.
void Push(Stream& stream, Work work);
/// Runs the work of a stream until `count` have ended, and of others what these wait for.
/// \returns whether they have
bool Drive(const std::shared_ptr<Stream>& stream, std::uint64_t count);
std::shared_ptr<Stream> FindStream(cudaStream_t stream);

/// Returns true if all parts of a batch have met their counterparts. Moves their bytes.
bool Meet(Batch& batch);
/// Memory that work under way on a communicator touches is in its Work; nothing else to reset.
void ResetNccl();
std::uint64_t LiveCommunicators();
/// Breaks the communicators of a process after its device broke.
void BreakNccl(int process);

}  // namespace shardwright::cuda_double
