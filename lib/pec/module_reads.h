#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "comm/comm.h"
#include "exec/byte_source.h"
#include "exec/integrity.h"
#include "layout/shard_map.h"
#include "pec/modules.h"
#include "plan/plan.h"
#include "plan/target.h"

// How modules are read out of a checkpoint of any layout: as files of a plan's target, each a blob.

namespace shardwright::pec {

/// Adds the blob of a module's component to a target, and to `tensors` the source tensors that its
/// tensors are (plan::KnownSource). \returns its file
/// Pure.
std::uint32_t AddModuleFile(const layout::ShardMap& source, const Module& module,
                            Component component, plan::Target* target,
                            std::vector<std::uint32_t>* tensors);

/// Adds the blob of the members that are passed through (PassedMembers). \pre not empty
/// \returns its file
/// Pure.
std::uint32_t AddPassedFile(const layout::ShardMap& source,
                            const std::vector<std::uint32_t>& members, plan::Target* target);

/// Bytes of the tensors of a blob, in order: the payloads that its digest is over.
std::vector<std::uint64_t> PayloadsOf(const plan::OutputFile& file);

/// How many members were compared with their checksums.
struct VerifiedMembers {
  std::uint64_t verified = 0;
  std::uint64_t in_part = 0;  ///< read in part, so that their checksum tells nothing
};

/// Compares the members that a plan has read with their checksums, unless much of one was not
/// needed. \param sums  of all ranks
/// \error kBadInput  a member has not its checksum: names file, member and a tensor in it
/// Collective; every rank looks at its share.
Result<VerifiedMembers> VerifyMembers(comm::Comm& comm, const plan::Plan& plan,
                                      const exec::SourceSums& sums, exec::ByteSource& source,
                                      unsigned threads);

}  // namespace shardwright::pec
