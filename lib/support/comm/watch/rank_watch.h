// SPDX-License-Identifier: Apache-2.0
// lib/support/comm/watch: finds ranks that hang or are cut off, for which MPI waits without end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/base/result.h"
#include "support/comm/comm.h"
#include "support/os/socket.h"

namespace shardwright::comm {

/// Watches the ranks of a run over TCP connections of its own, next to MPI. The ranks form a ring:
/// each sends a beat to the next one at least every second, and reports a lost rank along the ring.
/// A rank is lost if its beats end (stopped process, lost node, cut network), or if it has neither
/// used processor time nor moved data while it was not waiting for other ranks (hanging file
/// system). Ranks that cannot be reached over TCP are not watched. A run of one rank is not watched
/// either.
class RankWatch {
 public:
  struct Options {
    /// Time after which a rank counts as lost; 0: no rank is watched.
    std::chrono::milliseconds timeout{0};
    /// Returns a number that changes whenever this rank works, in nanoseconds of processor time.
    /// Threads that run all the time must not count. Called from a thread of the watch.
    std::function<std::int64_t()> work;
    /// Called once, from a thread of the watch, with kStopped, a message and the lost rank. Must
    /// not return in a process that may wait for that rank.
    /// \param found  this rank found the loss, and the others heard of it
    std::function<void(const Error& error, bool found)> lost;
  };

  /// Starts the watch. If this rank cannot listen, the next one does not watch it.
  /// \error as Comm::AllGather
  /// Collective.
  static Result<std::unique_ptr<RankWatch>> Start(Comm& comm, Options options);

  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;
  /// Ends the watch and notifies the next rank of it. Local.
  ~RankWatch();

  /// Returns the Comm for all further calls: only with it the watch knows which ranks wait.
  Comm& comm() { return *comm_; }

 private:
  class Waits;
  /// Address and identity of a rank, as all ranks exchange them.
  struct Peer {
    std::string token;  ///< proves to the rank that a connection comes from its own run
    std::string host;
    std::vector<os::Address> addresses;  ///< empty: does not listen
  };
  /// State of the preceding rank according to its beats.
  struct Heard {
    std::optional<os::Connection> connection;
    bool met = false;     ///< has connected at least once
    bool closed = false;  ///< its process has closed the connection
    bool goodbye = false;
    bool waits = false;
    std::int64_t work = 0;                           ///< as of the last beat
    std::chrono::steady_clock::time_point last{};    ///< last beat
    std::chrono::steady_clock::time_point worked{};  ///< last change of `work`, or wait
  };

  RankWatch(Comm& comm, Options options);
  static Result<Peer> ParsePeer(const Bytes& bytes, int rank);
  Bytes Introduce(const std::optional<os::Listener>& listener);
  void Send();
  void Receive();
  std::optional<os::Connection> Connect();
  Result<bool> Welcome(Heard& heard);
  Status Hear(Heard& heard);
  std::string LossOf(const Heard& heard) const;
  void Report(int rank, const std::string& reason, bool found);
  std::int64_t Work() const;
  bool Over(std::chrono::milliseconds wait);

  const Options options_;
  const int rank_;
  const int before_;
  const int after_;
  std::string token_;
  std::vector<Peer> peers_;
  std::optional<os::Listener> listener_;
  std::atomic<bool> waits_ = false;
  std::unique_ptr<Comm> watched_;
  Comm* comm_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool begun_ = false;  // the first beat was sent, or could not be sent
  bool over_ = false;
  std::string loss_;   // line to pass on; empty: none
  bool told_ = false;  // loss_ was sent, or cannot be sent
  std::thread sender_;
  std::thread receiver_;
};

}  // namespace shardwright::comm
