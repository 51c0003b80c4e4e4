// SPDX-License-Identifier: Apache-2.0
// lib/support/base: results, errors and helpers that every other module uses.
// Functions of lib/ do not throw; those that can fail return a Result. The message of an Error
// names the place, the expected and the actual value, and its code is the exit code of the command.
// Numbers from files pass checked.h and limits.h before memory is allocated for them. text.h
// formats values for messages. The library never prints: warnings and progress go to a Sink.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include <tl/expected.hpp>

#include "support/base/str_cat.h"

namespace shardwright {

/// Kind of an error, in the order of the exit-code table (docs/commands.md). The value
/// is the exit code of the command.
enum class Errc : std::uint8_t {
  kInternal = 1,
  kUsage = 2,
  kNotFound = 3,
  kBadInput = 4,
  kMismatch = 5,
  kBusy = 6,
  kIo = 7,
  kLimit = 8,
  kUnsupported = 9,
  kInfeasible = 10,
  kStopped = 75,
};

/// An error with all the information that a user needs to fix it.
struct Error {
  Errc code = Errc::kInternal;
  std::string message;  ///< lower case, no full stop: "<where>: <what>: <expected vs found>"
  int sys = 0;          ///< errno, 0 if none
  int rank = -1;        ///< failing rank, set by Comm::Agree; -1 if unknown
};

template <class T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
 public:
  using tl::expected<T, Error>::expected;
};

using Status = Result<void>;

/// Makes a failed Result. The message is the joined parts (see str_cat.h).
/// Local.
template <class... Parts>
tl::unexpected<Error> Fail(Errc code, const Parts&... parts) {
  return tl::unexpected<Error>(Error{code, StrCat(parts...), 0, -1});
}

/// Makes the error of a failed system call, with its errno.
/// Local.
template <class... Parts>
tl::unexpected<Error> FailErrno(Errc code, int sys, const Parts&... parts) {
  return tl::unexpected<Error>(Error{code, StrCat(parts...), sys, -1});
}

/// Makes the error for a file that is damaged, contradicts itself, or has the wrong format.
/// Local.
template <class... Parts>
tl::unexpected<Error> BadInput(const Parts&... parts) {
  return Fail(Errc::kBadInput, parts...);
}

/// Prepends "<where>: " to an error's message.
/// Local.
inline tl::unexpected<Error> Within(std::string_view where, Error error) {
  error.message = std::string(where) + ": " + error.message;
  return tl::unexpected<Error>(std::move(error));
}

namespace internal {
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line);
}  // namespace internal

}  // namespace shardwright

/// Returns the error of `expr` (a Result) from the enclosing function.
#define SW_TRY(expr) SW_TRY_IMPL(SW_CONCAT(sw_status_, __COUNTER__), expr)
#define SW_TRY_IMPL(status, expr)                                               \
  do {                                                                          \
    if (auto status = (expr); !status) [[unlikely]] {                           \
      return ::tl::unexpected<::shardwright::Error>(std::move(status).error()); \
    }                                                                           \
  } while (false)

#define SW_CONCAT_INNER(a, b) a##b
#define SW_CONCAT(a, b) SW_CONCAT_INNER(a, b)

/// Binds the value of `expr` (a Result) to `declaration`, or returns its error.
#define SW_TRY_ASSIGN(declaration, expr) \
  SW_TRY_ASSIGN_IMPL(SW_CONCAT(sw_result_, __COUNTER__), declaration, expr)
#define SW_TRY_ASSIGN_IMPL(result, declaration, expr)                         \
  auto result = (expr);                                                       \
  if (!result) [[unlikely]] {                                                 \
    return ::tl::unexpected<::shardwright::Error>(std::move(result).error()); \
  }                                                                           \
  declaration = *std::move(result)

/// Ends the process after a programming error, also in release builds. Data from a file,
/// a flag or another rank must never cause it to fail.
#define SW_CHECK(condition)                                                 \
  do {                                                                      \
    if (!(condition)) [[unlikely]] {                                        \
      ::shardwright::internal::CheckFailed(#condition, __FILE__, __LINE__); \
    }                                                                       \
  } while (false)
