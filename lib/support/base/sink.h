// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright {

/// Receives progress and messages of the library. A command displays them, a test records them. Any
/// thread of a rank may call the methods. They never wait for another rank and never fail.
/// Local.
class Sink {
 public:
  Sink() = default;
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  virtual ~Sink() = default;

  /// Starts the pass `name` (lower case, one or two words) and ends the one before it. Passes with
  /// the same name are added together in the report. Call it from one thread of the rank.
  virtual void Pass(std::string_view name) = 0;

  /// Reports the bytes of the current pass that are done, and their total, which is 0 while it
  /// is unknown. Both are of this rank and replace the numbers reported before.
  virtual void Progress(std::uint64_t bytes_done, std::uint64_t bytes_total) = 0;

  /// Reports the files of the current pass that are done, and their total, which is 0 while it
  /// is unknown. Both are of this rank and replace the numbers reported before.
  virtual void Files(std::uint64_t /*done*/, std::uint64_t /*total*/) {}

  /// Adds to the read counters of this rank: payload and metadata bytes, and files opened.
  virtual void AddRead(std::uint64_t bytes, std::uint64_t files) = 0;

  /// Adds to the write counters of this rank: bytes, and finished files.
  virtual void AddWritten(std::uint64_t bytes, std::uint64_t files) = 0;

  /// Warns about a problem that does not stop the run. The text is lower case without a full
  /// stop. Equal texts, from one rank or several, are shown once.
  virtual void Warn(std::string message) = 0;

  /// Reports optional information. Level 0 is shown unless -q is given, 1 with -v, 2 with -vv.
  virtual void Note(std::string message, int level) = 0;

  /// Reports at once, from any rank, what the run is waiting for. Shown unless -q is given.
  virtual void Waits(std::string /*message*/) {}  // NOLINT(performance-unnecessary-value-param)

  /// True once the user has asked this rank to stop. The caller then finishes its unit, keeps the
  /// journal, agrees with the other ranks and returns kStopped. Cheap enough for every unit.
  virtual bool stop_requested() const = 0;

  /// Sets the text that is printed if a second signal ends the process at once; empty: none.
  virtual void SetLastWords(std::string_view) {}

  /// Begin and end work that has written nothing yet; see Interruptible.
  virtual void BeginInterruptible() {}
  virtual void EndInterruptible() {}
};

/// Marks work of this rank, such as reading or planning, that has not written anything
/// yet and has no open connection. While such an object exists, the sink may end the
/// process soon after a stop was requested, because the work cannot always check
/// stop_requested() in time. Objects may be nested.
/// Local.
class Interruptible {
 public:
  /// \pre the sink outlives this object
  explicit Interruptible(Sink& sink) : sink_(sink) { sink_.BeginInterruptible(); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;
  ~Interruptible() { sink_.EndInterruptible(); }

 private:
  Sink& sink_;
};

/// A sink that ignores everything and never asks to stop. Derived classes override what they need.
class NullSink : public Sink {
 public:
  void Pass(std::string_view) override {}
  void Progress(std::uint64_t, std::uint64_t) override {}
  void AddRead(std::uint64_t, std::uint64_t) override {}
  void AddWritten(std::uint64_t, std::uint64_t) override {}
  void Warn(std::string) override {}
  void Note(std::string, int) override {}
  bool stop_requested() const override { return false; }
};

}  // namespace shardwright
