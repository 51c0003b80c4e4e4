// SPDX-License-Identifier: Apache-2.0
// lib/support/os/net: the protocol between our servers and their clients.
// A request is one line of words. The answer is "ok ...", which may be followed by bytes,
// or "error CODE MESSAGE". Each server defines its own requests.

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

/// Splits a line into words, which are separated by single spaces and not empty.
std::vector<std::string_view> WordsOf(std::string_view line);

/// Parses a number. \error kBadInput not a decimal number up to `most`: names `what`
Result<std::uint64_t> ParseNumber(std::string_view word, std::uint64_t most,
                                  const std::string& what);

/// Sends a line: "ok" and `rest`, or the error of `status`.
Status SendAnswer(Connection& connection, const Status& status, std::string_view rest = {});

/// Receives the line of an answer.
/// \param who  name of the server for messages: "an agent"
/// \returns the text after "ok"
/// \error the server's error with `who` as prefix; kIo; kBadInput  not an answer
Result<std::string> ReceiveAnswer(Connection& connection, std::string_view who);

}  // namespace shardwright::os
