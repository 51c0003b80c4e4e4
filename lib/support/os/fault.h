// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::os {

// Fault injection, for tests only. Every system call of lib/support/os calls Hit() first, which
// costs one relaxed load if it is off. The variable SHARDWRIGHT_FAULT, read once, enables it:
//
//   SHARDWRIGHT_FAULT=RULE[,RULE...]   RULE is TARGET:N[+]:ACTION: acts at call N of TARGET (at
//                                      all calls from N on with "+"). The first matching rule acts
//   SHARDWRIGHT_FAULT=count:FILE       append one line "NAME=COUNT ..." to FILE at exit
//
// TARGET  an operation (OpName), "any" (every mutating operation), "every" (also the operations
//         that only read) or a named point with a dot ("commit.rename")
// ACTION  kill (SIGKILL before the call), term (SIGTERM, then the call), hang (SIGSTOP, then the
//         call), short (the call moves half of the bytes), torn (half of the bytes, then SIGKILL),
//         lose (a write reports success without writing), flip (a write changes one bit), or an
//         error: eio enospc edquot enomem eacces erofs emfile estale einval ebusy eperm exdev
//         enotempty eintr
//
// If the value cannot be parsed, every call fails with EINVAL, so that a misspelled rule does not
// pass as a run without faults.

/// Kind of a system call.
enum class Op : std::uint8_t {
  kOpen,
  kCreate,
  kRead,
  kWrite,
  kAllocate,
  kTruncate,
  kSync,
  kRename,
  kExchange,
  kLink,
  kClone,
  kMkdir,
  kChmod,
  kUnlink,
  kRmdir,
  kLock,
  kStat,
  kList,
  kClose,
};
inline constexpr std::size_t kOpCount = 19;

/// Returns the lower-case name of an operation, as in a fault rule.
std::string_view OpName(Op op);

/// Returns whether "any" includes the operation: all but open, read, stat and list.
bool IsMutating(Op op);

/// Effect of a rule on the call that it matches.
enum class FaultAction : std::uint8_t {
  kKill,
  kTerm,
  kHang,
  kShort,
  kTorn,
  kLose,
  kFlip,
  kError,
};

/// A rule: the calls that it matches, and its effect on them.
struct FaultRule {
  std::string target;
  std::uint64_t first = 1;  ///< number of the first matching call, from 1
  bool onward = false;      ///< matches all later calls too
  FaultAction action = FaultAction::kError;
  int error = 0;  ///< errno of kError
};

/// Parses one rule, TARGET:N[+]:ACTION.
/// \error kUsage  names the invalid part
Result<FaultRule> ParseFault(std::string_view spec);

/// Parses rules separated by commas. \error kUsage
Result<std::vector<FaultRule>> ParseFaults(std::string_view specs);

/// Instructions for the caller of Hit: fail with `error`, move fewer bytes, die after the
/// call, report a write that it does not make, or write one bit wrong.
struct Fault {
  int error = 0;
  bool cut = false;
  bool die = false;
  bool lose = false;
  bool flip = false;
};

namespace internal {
enum FaultState : int { kFaultUnread, kFaultOff, kFaultOn };
extern std::atomic<int> fault_state;
Fault HitSlow(Op op);
Status FaultPointSlow(const char* name);
}  // namespace internal

/// Counts one call and returns the fault to apply to it. Thread-safe.
inline Fault Hit(Op op) {
  if (internal::fault_state.load(std::memory_order_relaxed) == internal::kFaultOff) return {};
  return internal::HitSlow(op);
}

/// A named point in a protocol where a rule may stop the process or inject an error.
/// \pre the name contains a dot: "commit.rename"
/// \error kIo if a rule requests it. Thread-safe.
inline Status FaultPoint(const char* name) {
  if (internal::fault_state.load(std::memory_order_relaxed) == internal::kFaultOff) return {};
  return internal::FaultPointSlow(name);
}

/// Ends the process as if it had been killed by another process.
[[noreturn]] void KillSelf();

/// Activates rules (or only counting) for its lifetime, instead of the rules that were active.
/// Scopes may be nested. Do not use it on two threads at the same time.
class ScopedFault {
 public:
  ScopedFault() : ScopedFault(std::vector<FaultRule>()) {}
  explicit ScopedFault(FaultRule rule) : ScopedFault(std::vector<FaultRule>{std::move(rule)}) {}
  explicit ScopedFault(std::vector<FaultRule> rules);
  ScopedFault(const ScopedFault&) = delete;
  ScopedFault& operator=(const ScopedFault&) = delete;
  ~ScopedFault();

  /// Returns true once the rule at `index` has affected a call.
  bool fired(std::size_t index = 0) const;

  /// Returns the number of calls of one operation in this scope.
  std::uint64_t Count(Op op) const;

  /// Returns the number of calls in this scope that "any" includes.
  std::uint64_t CountMutating() const;

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;
};

/// Returns the number of system calls of lib/support/os that this process has completed. Local.
std::uint64_t CallsDone();

/// Returns for how long this process has been in system calls that may take as long as the file
/// system needs for all data of a file: sync, close, rename, truncate, allocate, remove, clone. 0
/// if it is in none. For a watch that must not take a long sync for a file system that hangs.
/// Local.
std::chrono::milliseconds PatientCallTime();

}  // namespace shardwright::os
