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

// What was read, compared with the checksums that its files carry.

namespace shardwright::exec {

/// Adds to the sums of this rank those of all others. Collective.
Status CombineSums(comm::Comm& comm, SourceSums* sums);

/// Which of the members that units have read are compared with their checksums.
struct MembersToVerify {
  /// Reads what no unit needed of them. Null: members that were read in part are left out.
  ByteSource* source = nullptr;
  /// A member is left out, too, if more than one part in this many was not needed.
  std::uint64_t rest_share = 1;
  std::function<bool(std::uint32_t member)> mine{};  ///< thread-safe; empty: all
};

/// Members that one rank has looked at.
struct MembersVerified {
  std::uint64_t verified = 0;
  std::uint64_t without_sum = 0;  ///< their files carry no checksum
  std::uint64_t in_part = 0;      ///< left out, so that their checksum tells nothing
};

/// Compares members that units have read with their checksums.
/// \param sums  of all ranks
/// \error kBadInput  names file, member and a tensor in it; what the source returns
/// Local: ranks agree on the outcome.
Result<MembersVerified> VerifyMembers(const plan::Plan& plan, const SourceSums& sums,
                                      const MembersToVerify& which, tbb::task_arena& arena);

/// CRC-32 of every payload of an output file, in order, from the sums of its units.
/// \param units    of the file, all of them, in order
/// \param compare  compare payloads that are copies of members with their checksums: these count
///        towards no SourceSums
/// \error kBadInput  as VerifyMembers
/// Pure.
Result<std::vector<std::uint32_t>> SumPayloads(const plan::Plan& plan, std::uint32_t file,
                                               std::span<const UnitSum> units, bool compare);

}  // namespace shardwright::exec
