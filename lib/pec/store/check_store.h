#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "dialect/rules/patterns.h"

namespace shardwright::pec {

/// What is wrong with a store.
struct StoreCheck {
  std::uint64_t checkpoints = 0;
  std::uint64_t collected = 0;  ///< checkpoints that were collected meanwhile; not in `checkpoints`
  std::uint64_t blobs = 0;      ///< different ones that checkpoints refer to
  std::uint64_t bytes = 0;      ///< of them, plain
  /// One line each, in the order of the checkpoints: the file, what is wrong, what it holds.
  std::vector<std::string> damaged;
};

/// Reads every manifest, catalogue, token record and blob of a store and compares digests. Takes no
/// lock and writes nothing: the store may be read-only. What a collection removes meanwhile is no
/// damage, and checkpoints saved meanwhile are not looked at.
/// \error kNotFound  no store; kBusy  no checkpoint that was listed stayed; damage is no error
/// Collective; blobs are spread over ranks and threads.
Result<StoreCheck> CheckStore(comm::Comm& comm, const std::string& path,
                              const dialect::Patterns& patterns, unsigned threads, Sink& sink);

}  // namespace shardwright::pec
