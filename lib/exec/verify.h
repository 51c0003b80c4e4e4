#pragma once

#include <cstdint>
#include <set>

#include <tbb/task_arena.h>

#include "base/result.h"
#include "comm/comm.h"
#include "exec/exchange.h"
#include "exec/integrity.h"

namespace shardwright::exec {

/// Adds to the sums of this rank those of all others. Collective.
Status CombineSums(comm::Comm& comm, SourceSums* sums);

/// Members that one rank has looked at.
struct MembersVerified {
  std::uint64_t verified = 0;
  std::uint64_t without_sum = 0;  ///< their files carry no checksum
};

/// Compares every member that units have read with its checksum, each on the rank whose it is
/// (Exchange::Mine).
/// \param sums  of all ranks
/// \param left_out  source files of which nothing was read: they were cloned or linked
/// \returns what this rank has done
/// \error as VerifyMember
/// Collective.
Result<MembersVerified> VerifyMembers(comm::Comm& comm, const plan::Plan& plan,
                                      const SourceSums& sums,
                                      const std::set<std::uint32_t>& left_out, Exchange& source,
                                      tbb::task_arena& arena);

}  // namespace shardwright::exec
