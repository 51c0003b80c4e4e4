// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shardwright {

/// Where the library says how far it is; a command shows it, a test records it. Every method may be
/// called from any thread of a rank, never blocks on another rank and never fails.
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

  /// Bytes of the current pass that are done, and how many there are; 0 when not known yet. The
  /// numbers are this rank's and replace the ones told before.
  virtual void Progress(std::uint64_t bytes_done, std::uint64_t bytes_total) = 0;

  /// Adds to what this rank has read: payload and metadata bytes, and files opened for it.
  virtual void AddRead(std::uint64_t bytes, std::uint64_t files) = 0;

  /// Adds to what this rank has written: bytes, and files finished.
  virtual void AddWritten(std::uint64_t bytes, std::uint64_t files) = 0;

  /// Something the user should look at although the run goes on. Lower case, no full stop. Equal
  /// texts, of one rank or of many, are shown once.
  virtual void Warn(std::string message) = 0;

  /// Something a user may like to know: level 0 is shown unless -q is given, 1 with -v, 2 with -vv.
  virtual void Note(std::string message, int level) = 0;

  /// True once the user has asked this rank to stop: finish the current unit, keep the journal,
  /// agree with the other ranks and return kStopped. Cheap enough for every unit.
  virtual bool stop_requested() const = 0;

  /// Begin and end work that has written nothing yet; see Interruptible.
  virtual void BeginInterruptible() {}
  virtual void EndInterruptible() {}
};

/// Marks work of this rank, such as reading or planning, that has written nothing yet and holds no
/// connection.
/// While one exists, the sink may end the process soon after a stop was requested, because such
/// work cannot always look at stop_requested(). May be nested.
/// Local.
class Interruptible {
 public:
  /// \pre the sink outlives it
  explicit Interruptible(Sink& sink) : sink_(sink) { sink_.BeginInterruptible(); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;
  ~Interruptible() { sink_.EndInterruptible(); }

 private:
  Sink& sink_;
};

/// A sink that keeps nothing and never asks to stop; others listen to what they care for.
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
