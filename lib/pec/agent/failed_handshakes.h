#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace shardwright::pec {

/// Counts handshakes that failed, by the host that they came from: after some of them it may try
/// once a second. Hosts beyond a number share one count. Thread-safe.
class FailedHandshakes {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t kHosts = 1024;

  /// \param most  failures that a host may have at once; one is forgotten each second
  explicit FailedHandshakes(std::size_t most) : most_(most) {}

  /// Whether a host may try.
  bool Admits(const std::string& host, Clock::time_point now = Clock::now());

  /// What a failure is told as.
  enum class News {
    kNone,
    kFirst,  ///< the host had none
    kLast,   ///< it has to wait from here on
  };
  News Failed(const std::string& host, Clock::time_point now = Clock::now());

 private:
  struct Host {
    double failures = 0;
    Clock::time_point since{};
  };
  Host* Find(const std::string& host, Clock::time_point now);

  const std::size_t most_;
  std::mutex mutex_;
  std::map<std::string, Host> hosts_;  // those with failures; "" is all others
};

}  // namespace shardwright::pec
