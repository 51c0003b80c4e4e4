// SPDX-License-Identifier: Apache-2.0
#include "support/os/io_threads.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace shardwright::os {
namespace {

/// Descriptors reserved for the rest of the program: output, logs, MPI, file pools.
constexpr rlim_t kOtherDescriptors = 64;

/// Returns the descriptors that the limit of the process leaves for files.
rlim_t FreeDescriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return RLIM_INFINITY;
  return limit.rlim_cur - std::min(limit.rlim_cur, kOtherDescriptors);
}

/// State that the threads of one call share.
struct Loop {
  Loop(std::uint64_t all, const std::function<Status(std::uint64_t)>& body)
      : count(all), act(body) {}

  const std::uint64_t count;
  const std::function<Status(std::uint64_t)>& act;
  std::atomic<std::uint64_t> next = 0;
  FirstError error;
  std::atomic<bool> thrown = false;
  std::mutex mutex;
  std::exception_ptr exception;

  /// Processes indices until none are left. An index starts only after all lower ones have started,
  /// and all that started are completed, so that the lowest failing index is always found.
  void Work() {
    try {
      while (!error.failed() && !thrown) {
        const std::uint64_t index = next.fetch_add(1, std::memory_order_relaxed);
        if (index >= count) return;
        if (Status done = act(index); !done) error.Set(index, std::move(done).error());
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!thrown) exception = std::current_exception();
      thrown = true;
    }
  }
};

}  // namespace

unsigned IoThreadsAllowed(unsigned threads) {
  const rlim_t allowed = std::max<rlim_t>(FreeDescriptors() / kFilesPerIoThread, 1);
  return static_cast<unsigned>(std::min<rlim_t>(threads, allowed));
}

std::size_t OpenFilesAllowed(std::size_t wanted) {
  const rlim_t allowed = std::max<rlim_t>(FreeDescriptors() / 3, 1);
  return static_cast<std::size_t>(std::min<rlim_t>(wanted, allowed));
}

Status ForEachFile(std::uint64_t count, unsigned threads,
                   const std::function<Status(std::uint64_t index)>& act, std::uint64_t* failed) {
  Loop loop(count, act);
  std::vector<std::thread> others;
  const std::uint64_t wanted =
      std::min<std::uint64_t>(count, std::max(1U, IoThreadsAllowed(threads)));
  others.reserve(wanted);
  // The calling thread is one of the threads.
  for (std::uint64_t i = 1; i < wanted; ++i) {
    try {
      others.emplace_back([&loop] { loop.Work(); });
    } catch (const std::system_error&) {
      break;  // thread limit of the user; continue with those started
    }
  }
  loop.Work();
  for (std::thread& other : others) other.join();
  if (loop.exception) std::rethrow_exception(loop.exception);
  if (failed != nullptr && loop.error.failed()) *failed = loop.error.index();
  return loop.error.Take();
}

}  // namespace shardwright::os
