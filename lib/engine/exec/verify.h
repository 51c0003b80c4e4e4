// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include <tbb/task_arena.h>

#include "engine/exec/byte_source.h"
#include "engine/exec/integrity.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

// Compares the bytes that were read with the checksums in their files.

namespace shardwright::exec {

/// Adds the checksums of all other ranks to this rank's. Collective.
Status CombineSums(comm::Comm& comm, SourceSums* sums);

/// Selects the members to compare, among those that units have read.
struct MembersToVerify {
  /// Reads the bytes of a member that no unit needed. If null, members read in part are skipped.
  ByteSource* source = nullptr;
  /// Skips a member if its unneeded part is larger than its size divided by this number.
  std::uint64_t rest_share = 1;
  std::function<bool(std::uint32_t member)> mine{};  ///< thread-safe; empty: all
};

/// Number of members that one rank has processed.
struct MembersVerified {
  std::uint64_t verified = 0;
  std::uint64_t without_sum = 0;  ///< their files carry no checksum
  std::uint64_t in_part = 0;      ///< skipped, because their checksum covers unread bytes
};

/// Compares members that units have read with their checksums.
/// \param sums  combined over all ranks
/// \error kBadInput  names the file, the member and a tensor in it; errors of the source
/// Local: callers agree on the result.
Result<MembersVerified> VerifyMembers(const plan::Plan& plan, const SourceSums& sums,
                                      const MembersToVerify& which, tbb::task_arena& arena);

/// Computes the CRC-32 of every payload of an output file, in order, from its units' checksums.
/// \param units    all units of the file, in order
/// \param compare  also compare payloads that copy members with the
///        checksums of these members, which are not in SourceSums
/// \error kBadInput  as VerifyMembers
/// Pure.
Result<std::vector<std::uint32_t>> SumPayloads(const plan::Plan& plan, std::uint32_t file,
                                               std::span<const UnitSum> units, bool compare);

}  // namespace shardwright::exec
