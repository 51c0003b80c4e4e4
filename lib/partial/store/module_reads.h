// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/exec/integrity.h"
#include "engine/exec/verify.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/plan.h"
#include "engine/plan/target_builder.h"
#include "partial/store/modules.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

// Reads modules from a checkpoint in any layout: each blob is a file of the plan's target.

namespace shardwright::partial {

/// Adds the blob of a module's component to a target, and appends the
/// source tensor of each of its tensors to `tensors` (plan::KnownSource).
/// \returns the index of its file in the target
/// Pure.
std::uint32_t AddModuleFile(const layout::ShardMap& source, const Module& module,
                            Component component, plan::TargetBuilder* builder,
                            std::vector<std::uint32_t>* tensors);

/// Adds the blob of the members that are copied without interpretation (PassedMembers).
/// \pre not empty
/// \returns the index of its file in the target
/// Pure.
std::uint32_t AddPassedFile(const layout::ShardMap& source,
                            const std::vector<std::uint32_t>& members,
                            plan::TargetBuilder* builder);

/// Returns the sizes of a blob's tensors, in order: the payloads that its digest covers.
std::vector<std::uint64_t> PayloadsOf(const plan::OutputFile& file);

/// Compares the checksums of the members that a plan has
/// read. Skips members of which a large part was not needed.
/// \param sums  checksums from all ranks
/// \returns the total of all ranks
/// \error as exec::VerifyMembers
/// Collective; every rank verifies its share.
Result<exec::MembersVerified> VerifyModules(comm::Comm& comm, const plan::Plan& plan,
                                            const exec::SourceSums& sums, exec::ByteSource& source,
                                            unsigned threads);

}  // namespace shardwright::partial
