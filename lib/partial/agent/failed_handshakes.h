// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>

namespace shardwright::partial {

/// Decides which failed handshakes to report: at most one per minute and host. Hosts
/// beyond kHosts share one counter. It blocks no connections, because before a handshake
/// a process with the key looks like any other process of that host. Thread-safe.
class FailedHandshakes {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kHosts = 1024;
  static constexpr std::chrono::seconds kQuiet{60};

  /// Counts a failure.
  /// \returns number of failures of the host since the last report, including
  ///          this one, if the caller should report it; nullopt otherwise
  std::optional<std::uint64_t> Report(const std::string& host,
                                      Clock::time_point now = Clock::now());

 private:
  struct Host {
    std::uint64_t failures = 0;  // since the last report
    Clock::time_point reported{};
  };

  std::mutex mutex_;
  std::map<std::string, Host> hosts_;  // key "" counts all other hosts
};

}  // namespace shardwright::partial
