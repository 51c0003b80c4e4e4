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

/// Decides which failed handshakes are reported: of each host one a minute at most. Hosts beyond a
/// number share one count. It keeps nobody out: before a handshake nothing distinguishes a process
/// that has the key from one on the same host that has not. Thread-safe.
class FailedHandshakes {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kHosts = 1024;
  static constexpr std::chrono::seconds kQuiet{60};

  /// Counts a failure.
  /// \returns failures of the host since the last report, this one included, if it is to be
  ///          reported
  std::optional<std::uint64_t> Report(const std::string& host,
                                      Clock::time_point now = Clock::now());

 private:
  struct Host {
    std::uint64_t failures = 0;  // since the report
    Clock::time_point reported{};
  };

  std::mutex mutex_;
  std::map<std::string, Host> hosts_;  // "" is all others
};

}  // namespace shardwright::partial
