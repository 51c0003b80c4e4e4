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

// How modules are read out of a checkpoint of any layout: as files of a plan's target, each a blob.

namespace shardwright::partial {

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

}  // namespace shardwright::partial
