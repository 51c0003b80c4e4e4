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

/// Connections at once: ranks of trainers, and the other processes of the load.
inline constexpr std::size_t kSessions = 512;
/// Bytes of a description, which is as long as its map.
inline constexpr std::uint64_t kTextBytes = std::uint64_t{1} << 30;

/// Answers for a load on its socket file, also while it is under way; every connection has its
/// thread. Source: docs/formats/resident.md.
class Server {
 public:
  /// \param secret  that the other processes of the load know
  /// \pre sink outlives it
  Server(os::Listener listener, std::string secret, Sink& sink);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  ~Server() { End(); }

  /// What "status" says beside the state.
  void Tell(nlohmann::json status);
  /// The load has failed: whoever waits for it hears so.
  void Refuse(Error error);
  /// Has a descriptor of a process's memory; that of a process that hands it over by itself is not
  /// given here. Takes it over.
  void Hold(std::uint32_t process, int descriptor);
  /// Whether so many processes have handed over what they have to, within the time.
  bool Await(std::size_t processes, std::chrono::milliseconds wait);
  /// From now on trainers attach. \param description  that they get
  void Publish(std::string description);

  bool stop_asked() const { return stop_asked_; }
  /// A process of the load that went before the end.
  std::optional<Error> lost() const;
  std::uint64_t attached() const { return attached_; }
  std::uint64_t attaches() const { return attaches_; }

  /// Cuts what is under way, and tells the other processes that it is over.
  void End();

 private:
  enum class State : std::uint8_t { kLoading, kReady, kFailed };
  struct Session {
    std::thread thread;
    std::atomic<bool> over = false;
    bool attached = false;
    std::optional<std::uint32_t> process;  // of the load, not of a trainer
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
  State state_ = State::kLoading;  // under the mutex, as all until the flags
  Error error_;                    // kFailed
  nlohmann::json status_ = nlohmann::json::object();
  std::string description_;
  std::map<std::uint32_t, int> descriptors_;  // by process; -1: there is none to hand over
  std::optional<Error> lost_;
  std::atomic<bool> over_ = false;
  std::atomic<bool> stop_asked_ = false;
  std::atomic<std::uint64_t> attached_ = 0;
  std::atomic<std::uint64_t> attaches_ = 0;
  std::list<Session> sessions_;  // touched by the accepting thread only
  std::thread thread_;
};

}  // namespace shardwright::cache
