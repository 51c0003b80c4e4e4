// SPDX-License-Identifier: Apache-2.0
#include "support/os/fault.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "support/base/checked.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {

namespace internal {

struct ActiveRule {
  FaultRule rule;
  std::uint64_t hits = 0;  // calls of the rule's target
  bool fired = false;
};

struct FaultTable {
  std::vector<ActiveRule> rules;
  bool malformed = false;
  std::array<std::uint64_t, kOpCount> counts{};
  std::map<std::string, std::uint64_t, std::less<>> points;
};

}  // namespace internal

namespace {

using internal::ActiveRule;
using State = internal::FaultTable;

constexpr std::array<std::string_view, kOpCount> kNames = {
    "open",   "create",   "read", "write", "allocate", "truncate", "sync",
    "rename", "exchange", "link", "clone", "mkdir",    "chmod",    "unlink",
    "rmdir",  "lock",     "stat", "list",  "close"};

constexpr std::array<std::pair<std::string_view, int>, 14> kErrors = {{{"eio", EIO},
                                                                       {"enospc", ENOSPC},
                                                                       {"edquot", EDQUOT},
                                                                       {"enomem", ENOMEM},
                                                                       {"eacces", EACCES},
                                                                       {"erofs", EROFS},
                                                                       {"emfile", EMFILE},
                                                                       {"estale", ESTALE},
                                                                       {"einval", EINVAL},
                                                                       {"ebusy", EBUSY},
                                                                       {"eperm", EPERM},
                                                                       {"exdev", EXDEV},
                                                                       {"enotempty", ENOTEMPTY},
                                                                       {"eintr", EINTR}}};

// State of the fault hook. It is global, because a process has one set of system calls,
// and all of its threads share one hook.
std::mutex& Mutex() {
  static std::mutex mutex;
  return mutex;
}

State& Current() {
  static State* state = new State;  // outlives exit handlers
  return *state;
}

std::string& CountFile() {
  static std::string* path = new std::string;
  return *path;
}

bool Aims(std::string_view target, Op op) {
  return target == "every" || target == OpName(op) || (target == "any" && IsMutating(op));
}

std::uint64_t Sum(const State& state, std::string_view target) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < kOpCount; ++i) {
    if (Aims(target, static_cast<Op>(i))) sum += state.counts[i];
  }
  return sum;
}

void WriteCounts() {
  const std::lock_guard lock(Mutex());
  const State& state = Current();
  std::string line =
      "any=" + std::to_string(Sum(state, "any")) + " every=" + std::to_string(Sum(state, "every"));
  for (std::size_t i = 0; i < kOpCount; ++i) {
    line += " " + std::string(kNames[i]) + "=" + std::to_string(state.counts[i]);
  }
  for (const auto& [name, count] : state.points) line += " " + name + "=" + std::to_string(count);
  line += "\n";
  // Appends with one write, so that lines of several ranks do not mix.
  const int fd = ::open(CountFile().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  [[maybe_unused]] const ssize_t written = ::write(fd, line.data(), line.size());
  ::close(fd);
}

std::vector<ActiveRule> Activate(std::vector<FaultRule> rules) {
  std::vector<ActiveRule> active;
  active.reserve(rules.size());
  for (FaultRule& rule : rules) active.push_back({std::move(rule)});
  return active;
}

void ReadEnvironment() {
  const std::lock_guard lock(Mutex());
  if (internal::fault_state.load(std::memory_order_relaxed) != internal::kFaultUnread) return;
  const char* value = std::getenv("SHARDWRIGHT_FAULT");
  const std::string_view spec = value == nullptr ? "" : value;
  if (spec.empty()) {
    internal::fault_state.store(internal::kFaultOff, std::memory_order_relaxed);
    return;
  }
  constexpr std::string_view kCount = "count:";
  if (spec.substr(0, kCount.size()) == kCount && spec.size() > kCount.size()) {
    CountFile() = std::string(spec.substr(kCount.size()));
    std::atexit(WriteCounts);
  } else if (auto rules = ParseFaults(spec)) {
    Current().rules = Activate(*std::move(rules));
  } else {
    Current().malformed = true;
  }
  internal::fault_state.store(internal::kFaultOn, std::memory_order_relaxed);
}

// Counts a call in every matching rule and returns the first due rule. The caller locks the mutex.
template <class Aims>
std::optional<FaultRule> Strike(State& state, Aims&& aims) {
  std::optional<FaultRule> struck;
  for (ActiveRule& active : state.rules) {
    if (!aims(active.rule.target)) continue;
    const std::uint64_t hit = ++active.hits;
    const bool due = hit == active.rule.first || (hit > active.rule.first && active.rule.onward);
    if (!due || struck) continue;
    active.fired = true;
    struck = active.rule;
  }
  return struck;
}

Fault Act(const FaultRule& rule) {
  switch (rule.action) {
    case FaultAction::kKill:
      KillSelf();
    case FaultAction::kTerm:
      ::kill(::getpid(), SIGTERM);
      return {};
    case FaultAction::kHang:
      ::kill(::getpid(), SIGSTOP);
      return {};
    case FaultAction::kShort:
      return {.cut = true};
    case FaultAction::kTorn:
      return {.cut = true, .die = true};
    case FaultAction::kLose:
      return {.lose = true};
    case FaultAction::kFlip:
      return {.flip = true};
    case FaultAction::kError:
      return {.error = rule.error};
  }
  return {};
}

Result<FaultRule> ParseAction(FaultRule rule, std::string_view name, std::string_view spec) {
  const auto wrong = [&](const std::string& why) {
    return Fail(Errc::kUsage, "fault \"", spec, "\": ", why);
  };
  const bool moves_bytes = rule.target == "read" || rule.target == "write";
  if (name == "kill") {
    rule.action = FaultAction::kKill;
  } else if (name == "term") {
    rule.action = FaultAction::kTerm;
  } else if (name == "hang") {
    rule.action = FaultAction::kHang;
  } else if (name == "short" || name == "torn") {
    if (!moves_bytes) return wrong(std::string(name) + " needs read or write as target");
    rule.action = name == "short" ? FaultAction::kShort : FaultAction::kTorn;
  } else if (name == "lose" || name == "flip") {
    if (rule.target != "write") return wrong(std::string(name) + " needs write as target");
    rule.action = name == "lose" ? FaultAction::kLose : FaultAction::kFlip;
  } else {
    rule.action = FaultAction::kError;
    for (const auto& [text, error] : kErrors) {
      if (name == text) rule.error = error;
    }
    if (rule.error == 0) return wrong("unknown action \"" + std::string(name) + "\"");
    if (rule.error == EINTR && rule.onward) return wrong("eintr for every call would never end");
  }
  return rule;
}

}  // namespace

namespace internal {

std::atomic<int> fault_state{kFaultUnread};

Fault HitSlow(Op op) {
  if (fault_state.load(std::memory_order_relaxed) == kFaultUnread) ReadEnvironment();
  std::optional<FaultRule> struck;
  {
    const std::lock_guard lock(Mutex());
    State& state = Current();
    if (state.malformed) return {.error = EINVAL};
    ++state.counts[static_cast<std::size_t>(op)];
    struck = Strike(state, [&](const std::string& target) { return Aims(target, op); });
  }
  return struck ? Act(*struck) : Fault{};
}

Status FaultPointSlow(const char* name) {
  if (fault_state.load(std::memory_order_relaxed) == kFaultUnread) ReadEnvironment();
  std::optional<FaultRule> struck;
  {
    const std::lock_guard lock(Mutex());
    State& state = Current();
    ++state.points[name];
    struck = Strike(state, [&](const std::string& target) { return target == name; });
  }
  if (!struck) return {};
  const Fault fault = Act(*struck);
  if (fault.error != 0) return SysFail(Errc::kIo, name, "fault point", fault.error);
  return {};
}

}  // namespace internal

std::string_view OpName(Op op) { return kNames[static_cast<std::size_t>(op)]; }

bool IsMutating(Op op) {
  return op != Op::kOpen && op != Op::kRead && op != Op::kStat && op != Op::kList;
}

Result<FaultRule> ParseFault(std::string_view spec) {
  const auto wrong = [&](const std::string& why) {
    return Fail(Errc::kUsage, "fault \"", spec, "\": ", why);
  };
  const std::size_t first_colon = spec.find(':');
  const std::size_t last_colon = spec.rfind(':');
  if (first_colon == std::string_view::npos || first_colon == last_colon) {
    return wrong("TARGET:N:ACTION expected");
  }
  FaultRule rule;
  rule.target = std::string(spec.substr(0, first_colon));
  bool known =
      rule.target == "any" || rule.target == "every" || rule.target.find('.') != std::string::npos;
  for (const std::string_view name : kNames) known = known || name == rule.target;
  if (!known) return wrong("unknown target \"" + rule.target + "\"");

  std::string_view number = spec.substr(first_colon + 1, last_colon - first_colon - 1);
  if (!number.empty() && number.back() == '+') {
    rule.onward = true;
    number.remove_suffix(1);
  }
  rule.first = NumberIn<decltype(rule.first)>(number).value_or(0);
  if (rule.first == 0) {
    return wrong("\"" + std::string(number) + "\" is not a call number (the first is 1)");
  }
  return ParseAction(std::move(rule), spec.substr(last_colon + 1), spec);
}

Result<std::vector<FaultRule>> ParseFaults(std::string_view specs) {
  std::vector<FaultRule> rules;
  for (;;) {
    const std::size_t comma = specs.find(',');
    SW_TRY_ASSIGN(FaultRule rule, ParseFault(specs.substr(0, comma)));
    rules.push_back(std::move(rule));
    if (comma == std::string_view::npos) return rules;
    specs.remove_prefix(comma + 1);
  }
}

void KillSelf() {
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

struct ScopedFault::Saved {
  internal::FaultTable state;
  int mode = internal::kFaultOff;
};

ScopedFault::ScopedFault(std::vector<FaultRule> rules) : saved_(std::make_unique<Saved>()) {
  if (internal::fault_state.load(std::memory_order_relaxed) == internal::kFaultUnread) {
    ReadEnvironment();
  }
  const std::lock_guard lock(Mutex());
  saved_->mode = internal::fault_state.load(std::memory_order_relaxed);
  saved_->state = std::exchange(Current(), State{});
  Current().rules = Activate(std::move(rules));
  internal::fault_state.store(internal::kFaultOn, std::memory_order_relaxed);
}

ScopedFault::~ScopedFault() {
  const std::lock_guard lock(Mutex());
  Current() = std::move(saved_->state);
  internal::fault_state.store(saved_->mode, std::memory_order_relaxed);
}

bool ScopedFault::fired(std::size_t index) const {
  const std::lock_guard lock(Mutex());
  return index < Current().rules.size() && Current().rules[index].fired;
}

std::uint64_t ScopedFault::Count(Op op) const {
  const std::lock_guard lock(Mutex());
  return Current().counts[static_cast<std::size_t>(op)];
}

std::uint64_t ScopedFault::CountMutating() const {
  const std::lock_guard lock(Mutex());
  return Sum(Current(), "any");
}

}  // namespace shardwright::os
