// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "partial/agent/memory/memory.h"
#include "partial/agent/throttle/limiter.h"
#include "support/base/result.h"
#include "support/os/net/answer.h"
#include "support/os/socket.h"

// Messages between agents, restores and job scripts: docs/formats/agent.md. A request is one
// line. An answer is "ok ...", followed by bytes for some requests, or "error CODE MESSAGE".

namespace shardwright::partial {

inline constexpr std::uint64_t kAgentTextBytes = std::uint64_t{256} << 20;
/// The answer after "ok" of agents that can replay gradients in copies.
inline constexpr std::string_view kReplaysGradients = "replays";
inline constexpr std::uint64_t kAgentReadBytes = std::uint64_t{1} << 24;  ///< per "read" request

using os::ParseNumber;
using os::SendAnswer;
using os::WordsOf;

/// \error kBadInput  not 32 hexadecimal digits
Result<exec::Digest> ParseDigest(std::string_view word);

/// Receives an answer of an agent with os::ReceiveAnswer.
Result<std::string> ReceiveAnswer(os::Connection& connection);

/// Sends "ok BYTES" and a text of that length.
Status SendText(os::Connection& connection, const std::string& text);

/// Receives a text of the given length. Allocates memory as bytes arrive, not as announced.
/// \param counted  accounts for the memory of the text; null: not counted
/// \error kLimit  above kAgentTextBytes, or memory limit; kIo
Result<std::string> ReceiveText(os::Connection& connection, std::uint64_t bytes,
                                Counted* counted = nullptr);

/// Sends "ok BYTES UNITS", the length of every unit as u32, and the bytes.
/// \param job  job of the limiter that the bytes belong to
Status SendBlob(os::Connection& connection, const MemoryBlob& blob, Limiter::Job& job);

/// Receives a blob and verifies its digest against `expected`. Counts memory as it arrives.
/// \error kBadInput  wrong size, unit lengths that do not add up to it,
///        or wrong digest (the message names both); kLimit  memory; kIo
Result<BlobPtr> ReceiveBlob(os::Connection& connection, const BlobRef& expected,
                            const std::shared_ptr<MemoryPool>& pool);

}  // namespace shardwright::partial
