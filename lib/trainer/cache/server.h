// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/socket.h"

namespace shardwright::cache {

/// Limit of simultaneous connections: ranks of trainers, and the other processes of the cache.
inline constexpr std::size_t kSessions = 512;
/// Limit of a description's size in bytes. It is as long as its map.
inline constexpr std::uint64_t kTextBytes = std::uint64_t{1} << 30;

/// Answers requests to a cache on its socket file, also while it loads.
/// Every connection has its own thread. Source: docs/formats/cache.md.
class Server {
 public:
  /// \param secret  authenticates the other processes of the cache
  /// \pre sink outlives it
  Server(os::Listener listener, std::string secret, Sink& sink);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() { End(); }

  /// Sets the entries that "status" returns in addition to the state.
  void Tell(nlohmann::json status);
  /// Reports that loading failed. Waiting clients receive the error.
  void Refuse(Error error);
  /// Registers a process and the descriptor of its memory, -1
  /// if the memory has none. Takes ownership of the descriptor.
  void Hold(std::uint32_t process, int descriptor);
  /// Waits until so many processes are registered. Returns false after the time limit.
  bool Await(std::size_t processes, std::chrono::milliseconds wait);
  /// Lets trainers attach from now on. \param description  the text that they receive
  void Publish(std::string description);

  bool stop_asked() const { return stop_asked_; }
  /// Returns an error if a process of the cache disconnected before the end.
  std::optional<Error> lost() const;
  std::uint64_t attached() const { return attached_; }
  std::uint64_t attaches() const { return attaches_; }

  /// Stops accepting connections, finishes the open ones, and informs the other processes.
  void End();

 private:
  enum class State : std::uint8_t { kLoading, kReady, kFailed };
  struct Session {
    std::thread thread;
    std::atomic<bool> over = false;
    bool attached = false;
    std::optional<std::uint32_t> process;  // process of the cache; empty for a trainer
  };

  void Accept();
  void Reap(bool all);
  void Serve(Session& session, os::Connection connection);
  Status Answer(Session& session, os::Connection& connection, const std::string& line);
  Status Attach(Session& session, os::Connection& connection);
  Status TakeOver(Session& session, os::Connection& connection,
                  const std::vector<std::string_view>& words);
  Status SendMemory(const Session& session, os::Connection& connection, std::string_view process);
  Status SendStatus(os::Connection& connection);

  os::Listener listener_;
  const std::string secret_;
  Sink& sink_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kLoading;  // guarded by mutex_, like all members up to lost_
  Error error_;                    // for kFailed
  nlohmann::json status_ = nlohmann::json::object();
  std::string description_;
  std::map<std::uint32_t, int> descriptors_;  // by process; -1: its memory has no descriptor
  std::optional<Error> lost_;
  std::atomic<bool> over_ = false;
  std::atomic<bool> stop_asked_ = false;
  std::atomic<std::uint64_t> attached_ = 0;
  std::atomic<std::uint64_t> attaches_ = 0;
  std::list<Session> sessions_;  // used by the accepting thread only
  std::thread thread_;
};

}  // namespace shardwright::cache
