#include "pec/agent/failed_handshakes.h"

#include <algorithm>

namespace shardwright::pec {

/// What is counted for a host, without what is forgotten by now; null: nothing.
FailedHandshakes::Host* FailedHandshakes::Find(const std::string& host, Clock::time_point now) {
  auto found = hosts_.find(host);
  if (found == hosts_.end() && hosts_.size() >= kHosts) found = hosts_.find("");
  if (found == hosts_.end()) return nullptr;
  Host& one = found->second;
  one.failures -= std::chrono::duration<double>(now - one.since).count();
  one.since = now;
  if (one.failures > 0) return &one;
  hosts_.erase(found);
  return nullptr;
}

bool FailedHandshakes::Admits(const std::string& host, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  const Host* one = Find(host, now);
  return one == nullptr || one->failures + 1 <= static_cast<double>(most_);
}

FailedHandshakes::News FailedHandshakes::Failed(const std::string& host, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  Host* one = Find(host, now);
  const bool first = one == nullptr;
  if (first) {
    // Those that have nothing left make room.
    if (hosts_.size() >= kHosts) {
      std::erase_if(hosts_, [&](const auto& other) {
        return other.second.failures <=
               std::chrono::duration<double>(now - other.second.since).count();
      });
    }
    one = &hosts_[hosts_.size() >= kHosts ? "" : host];
    one->since = now;
  }
  const auto most = static_cast<double>(most_);
  const bool free = one->failures + 1 <= most;
  one->failures = std::min(one->failures + 1, most + 1);
  if (free && one->failures + 1 > most) return News::kLast;
  return first ? News::kFirst : News::kNone;
}

}  // namespace shardwright::pec
