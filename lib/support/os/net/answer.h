// SPDX-License-Identifier: Apache-2.0
// lib/support/os/net: what our servers and those who ask them have in common.
// A request is one line of words; an answer is "ok ...", perhaps with bytes behind it, or "error
// CODE MESSAGE". What the requests are is each server's own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/os/socket.h"

namespace shardwright::os {

inline constexpr std::size_t kLineBytes = 4096;

/// Words of a line: separated by single spaces, none empty.
std::vector<std::string_view> WordsOf(std::string_view line);

/// \error kBadInput  not a decimal number up to `most`: names `what`
Result<std::uint64_t> ParseNumber(std::string_view word, std::uint64_t most,
                                  const std::string& what);

/// Sends an "ok" line, or the error of `status` in one line.
Status SendAnswer(Connection& connection, const Status& status, std::string_view rest = {});

/// Receives an answer's line.
/// \param who  that should have answered: "an agent"
/// \returns what follows "ok"
/// \error what the other side says, its name before; kIo; kBadInput  no answer
Result<std::string> ReceiveAnswer(Connection& connection, std::string_view who);

}  // namespace shardwright::os
