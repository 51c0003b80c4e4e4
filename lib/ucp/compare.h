#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "dialect/core/checkpoint.h"
#include "exec/byte_source.h"
#include "plan/plan.h"

namespace shardwright::ucp {

/// How a comparison works; the fields are the shared flags.
struct CompareOptions {
  unsigned threads = 1;
  /// Bytes that a rank may hold of what others send it, where files are not visible on all.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// One of two sources to compare; all outlive the comparison.
struct Compared {
  const layout::ShardMap& map;
  exec::ByteSource& bytes;
  const std::vector<int>& file_owner;  ///< as exec::Exchange takes it
};

/// Sees a unit as both sides have it. Thread-safe.
using OnUnit =
    std::function<void(std::uint64_t index, const plan::Unit& unit, std::span<const std::byte> of_a,
                       std::span<const std::byte> of_b)>;

/// Gathers every unit of a target, which is never written, from both sources, unit by unit in
/// bounded memory, and compares every source member read with its checksum.
/// \returns  bytes of the target
/// \error kBadInput, kNotFound  a source; kStopped
/// Collective; units are spread over ranks and threads, each rank has consecutive ones.
Result<std::uint64_t> CompareSources(comm::Comm& comm, const Compared& a, const Compared& b,
                                     const plan::Target& target, const CompareOptions& options,
                                     const OnUnit& on_unit, Sink& sink);

/// Proves what a reader had to infer: a parameter's master weights, rounded to the type of its
/// weight, are its weight, every element of them. Nothing to do where nothing was inferred.
/// \param bytes       reads the checkpoint's map
/// \param file_owner  as exec::Exchange takes it
/// \error kUnsupported  a parameter's masters lie elsewhere, or cannot be compared; names it, the
///        files and both values
/// \error kBadInput  its masters lie there but for some elements, the first of which the message
///        shows; a file is damaged, as its checksum tells
/// Collective.
Status ProveInferred(comm::Comm& comm, const dialect::Checkpoint& checkpoint,
                     exec::ByteSource& bytes, const std::vector<int>& file_owner,
                     const CompareOptions& options, Sink& sink);

}  // namespace shardwright::ucp
