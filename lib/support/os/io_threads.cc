// SPDX-License-Identifier: Apache-2.0
#include "support/os/io_threads.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
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

/// Watches the calls of a loop and reports the slow ones.
class SlowWatch {
 public:
  explicit SlowWatch(const SlowCalls& slow) : slow_(slow) {
    try {
      thread_ = std::thread([this] { Watch(); });
    } catch (const std::system_error&) {
      // Thread limit of the user: the loop runs without reports.
    }
  }
  SlowWatch(const SlowWatch&) = delete;
  SlowWatch& operator=(const SlowWatch&) = delete;
  ~SlowWatch() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  void Begin(std::uint64_t index) {
    const std::lock_guard lock(mutex_);
    began_.emplace(index, Clock::now());
  }

  void End(std::uint64_t index) {
    const std::lock_guard lock(mutex_);
    began_.erase(index);
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Wakes up only when a report may be due: the time of this thread counts as work of the process,
  // and a process without work is lost (RankWatch).
  void Watch() {
    const auto limit =
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(slow_.seconds));
    std::unique_lock lock(mutex_);
    Clock::time_point due = Clock::now() + limit;
    Clock::duration next = limit;  // duration of the reported call at which it is reported next
    std::uint64_t reported = 0;
    while (!wake_.wait_until(lock, due, [this] { return ended_; })) {
      const Clock::time_point now = Clock::now();
      const auto oldest =
          std::min_element(began_.begin(), began_.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
      if (oldest == began_.end()) {
        due = now + limit;
        continue;
      }
      const auto [first, start] = *oldest;
      if (first != reported) next = limit;
      due = std::max(start + next, now + limit / 4);
      if (now < start + next) continue;
      const auto slow = static_cast<std::size_t>(
          std::count_if(began_.begin(), began_.end(),
                        [&](const auto& call) { return now - call.second >= limit; }));
      reported = first;
      next = 2 * (now - start);
      due = std::max(start + next, now + limit);
      const double seconds = std::chrono::duration<double>(now - start).count();
      lock.unlock();
      slow_.tell(first, seconds, slow - 1);
      lock.lock();
    }
  }

  const SlowCalls& slow_;
  std::mutex mutex_;  // protects everything below
  std::condition_variable wake_;
  std::map<std::uint64_t, Clock::time_point> began_;  // calls that have not ended
  bool ended_ = false;
  std::thread thread_;
};

/// State that the threads of one call share.
struct Loop {
  Loop(std::uint64_t all, const std::function<Status(std::uint64_t)>& body, SlowWatch* watch)
      : count(all), act(body), slow(watch) {}

  const std::uint64_t count;
  const std::function<Status(std::uint64_t)>& act;
  SlowWatch* const slow;  // null: calls are not watched
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
        if (slow != nullptr) slow->Begin(index);
        Status done = act(index);
        if (slow != nullptr) slow->End(index);
        if (!done) error.Set(index, std::move(done).error());
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
                   const std::function<Status(std::uint64_t index)>& act, std::uint64_t* failed,
                   const SlowCalls* slow) {
  std::optional<SlowWatch> watch;
  if (slow != nullptr && count > 0) watch.emplace(*slow);
  Loop loop(count, act, watch ? &*watch : nullptr);
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
