#include "pec/agent/limiter.h"

#include <algorithm>
#include <thread>

namespace shardwright::pec {

void Limiter::Spend(std::uint64_t bytes) {
  if (rate_ == 0) return;
  Clock::time_point start;
  {
    const std::lock_guard lock(mutex_);
    start = std::max(free_at_, Clock::now());
    const std::chrono::duration<double> time(static_cast<double>(bytes) /
                                             static_cast<double>(rate_));
    free_at_ = start + std::chrono::duration_cast<Clock::duration>(time);
    start = free_at_;
  }
  std::this_thread::sleep_until(start);
}

}  // namespace shardwright::pec
