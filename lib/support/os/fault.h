// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::os {

// Fault injection, for tests only. Every system call of lib/support/os passes Hit() first. Unset it
// costs one relaxed load. A process is told by the variable SHARDWRIGHT_FAULT, read once:
//
//   SHARDWRIGHT_FAULT=RULE[,RULE...]   RULE is TARGET:N[+]:ACTION: at the Nth call of TARGET (from
//                                      the Nth on with "+"); the first rule that hits a call acts
//   SHARDWRIGHT_FAULT=count:FILE       append one line "NAME=COUNT ..." to FILE at exit
//
// TARGET  an operation (OpName), "any" (every mutating operation), "every" (those that only read
//         too) or a named point with a dot ("commit.rename")
// ACTION  kill (SIGKILL before the call), term (SIGTERM, then the call), hang (SIGSTOP, then the
//         call), short (the call moves half of the bytes), torn (half of the bytes, then SIGKILL),
//         lose (a write says that it has written and has not), flip (one bit of what it writes
//         differs), or an error: eio enospc edquot enomem eacces erofs emfile estale einval ebusy
//         eperm exdev enotempty eintr
//
// A value that cannot be parsed makes every call fail with EINVAL: a typo never passes as a run
// without faults.

/// Kind of system call.
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

/// Lower-case name of an operation, as in a fault rule.
std::string_view OpName(Op op);

/// True if "any" counts the operation: all but open, read, stat and list.
bool IsMutating(Op op);

/// What happens to a call that a rule hits.
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

/// When and how a call fails.
struct FaultRule {
  std::string target;
  std::uint64_t first = 1;  ///< the first call is 1
  bool onward = false;      ///< every later call too
  FaultAction action = FaultAction::kError;
  int error = 0;  ///< errno of kError
};

/// Parses TARGET:N[+]:ACTION.
/// \error kUsage, with the part that is wrong
Result<FaultRule> ParseFault(std::string_view spec);

/// Parses rules separated by commas. \error kUsage
Result<std::vector<FaultRule>> ParseFaults(std::string_view specs);

/// What the caller of Hit has to do: fail with `error`, move fewer bytes, die afterwards, write
/// nothing and say it had, write one bit wrong.
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

/// Counts one call and says what to do to it. Thread-safe.
inline Fault Hit(Op op) {
  if (internal::fault_state.load(std::memory_order_relaxed) == internal::kFaultOff) return {};
  return internal::HitSlow(op);
}

/// A named place in a protocol where a rule may stop the process or inject an error.
/// \pre the name holds a dot: "commit.rename"
/// \error kIo, if a rule says so Thread-safe.
inline Status FaultPoint(const char* name) {
  if (internal::fault_state.load(std::memory_order_relaxed) == internal::kFaultOff) return {};
  return internal::FaultPointSlow(name);
}

/// Ends the process as if it had been killed from outside.
[[noreturn]] void KillSelf();

/// Puts rules (or only counting) in force for its lifetime, in place of what was there.
/// Scopes nest; not for use on two threads at once.
class ScopedFault {
 public:
  ScopedFault() : ScopedFault(std::vector<FaultRule>()) {}
  explicit ScopedFault(FaultRule rule) : ScopedFault(std::vector<FaultRule>{std::move(rule)}) {}
  explicit ScopedFault(std::vector<FaultRule> rules);
  ScopedFault(const ScopedFault&) = delete;
  ScopedFault& operator=(const ScopedFault&) = delete;
  ~ScopedFault();

  /// True once the rule at `index` has hit a call.
  bool fired(std::size_t index = 0) const;

  /// Calls of one operation in this scope.
  std::uint64_t Count(Op op) const;

  /// Calls that "any" counts in this scope.
  std::uint64_t CountMutating() const;

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;
};

}  // namespace shardwright::os
