#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "comm/comm.h"
#include "exec/byte_source.h"
#include "exec/integrity.h"
#include "exec/verify.h"
#include "layout/shard_map.h"
#include "pec/store/modules.h"
#include "plan/plan.h"
#include "plan/target_builder.h"

// How modules are read out of a checkpoint of any layout: as files of a plan's target, each a blob.

namespace shardwright::pec {

/// Adds the blob of a module's component to a target, and to `tensors` the source tensors that its
/// tensors are (plan::KnownSource).
/// \returns its file
/// Pure.
std::uint32_t AddModuleFile(const layout::ShardMap& source, const Module& module,
                            Component component, plan::TargetBuilder* builder,
                            std::vector<std::uint32_t>* tensors);

/// Adds the blob of the members that are passed through (PassedMembers).
/// \pre not empty
/// \returns its file
/// Pure.
std::uint32_t AddPassedFile(const layout::ShardMap& source,
                            const std::vector<std::uint32_t>& members,
                            plan::TargetBuilder* builder);

/// Bytes of the tensors of a blob, in order: the payloads that its digest is over.
std::vector<std::uint64_t> PayloadsOf(const plan::OutputFile& file);

/// Compares the members that a plan has read with their checksums, unless much of one was not
/// needed.
/// \param sums  of all ranks
/// \returns what all ranks have done
/// \error as exec::VerifyMembers
/// Collective; every rank looks at its share.
Result<exec::MembersVerified> VerifyModules(comm::Comm& comm, const plan::Plan& plan,
                                            const exec::SourceSums& sums, exec::ByteSource& source,
                                            unsigned threads);

}  // namespace shardwright::pec
