// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/failed_handshakes.h"

#include <utility>

namespace shardwright::partial {

std::optional<std::uint64_t> FailedHandshakes::Report(const std::string& host,
                                                      Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  auto found = hosts_.find(host);
  if (found == hosts_.end()) {
    if (hosts_.size() >= kHosts) {
      std::erase_if(hosts_, [&](const auto& one) { return now - one.second.reported >= kQuiet; });
    }
    const auto [at, fresh] = hosts_.try_emplace(hosts_.size() >= kHosts ? "" : host);
    if (fresh) {
      at->second.reported = now;
      return 1;
    }
    found = at;
  }
  Host& one = found->second;
  ++one.failures;
  if (now - one.reported < kQuiet) return std::nullopt;
  one.reported = now;
  return std::exchange(one.failures, 0);
}

}  // namespace shardwright::partial
