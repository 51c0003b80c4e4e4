// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "partial/agent/memory.h"
#include "partial/agent/throttle/limiter.h"
#include "support/base/result.h"
#include "support/os/net/answer.h"
#include "support/os/socket.h"

// What agents, restores and job scripts say to each other: docs/formats/agent.md. A request is one
// line; an answer is "ok ...", perhaps with bytes behind it, or "error CODE MESSAGE".

namespace shardwright::partial {

inline constexpr std::uint64_t kAgentTextBytes = std::uint64_t{256} << 20;
inline constexpr std::uint64_t kAgentReadBytes = std::uint64_t{1} << 24;  ///< of one "read"

using os::ParseNumber;
using os::SendAnswer;
using os::WordsOf;

/// \error kBadInput  not 32 hexadecimal digits
Result<exec::Digest> ParseDigest(std::string_view word);

/// os::ReceiveAnswer of an agent.
Result<std::string> ReceiveAnswer(os::Connection& connection);

/// Receives so many bytes of text. Memory for it is taken as it comes, whatever was announced.
/// \param counted  where it is counted; null: nowhere
/// \error kLimit  above kAgentTextBytes, or memory; kIo
Result<std::string> ReceiveText(os::Connection& connection, std::uint64_t bytes,
                                Counted* counted = nullptr);

/// Sends "ok BYTES UNITS", the length of every unit as u32, and the bytes.
/// \param job  that they are of
Status SendBlob(os::Connection& connection, const MemoryBlob& blob, Limiter::Job& job);

/// Receives a blob and proves that it is the one that was asked for. It counts as it comes.
/// \error kBadInput  another size, unit lengths that do not add up, another digest: names both
///        sides; kLimit  memory; kIo
Result<BlobPtr> ReceiveBlob(os::Connection& connection, const BlobRef& expected,
                            const std::shared_ptr<MemoryPool>& pool);

}  // namespace shardwright::partial
