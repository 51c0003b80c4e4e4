// SPDX-License-Identifier: Apache-2.0
#include "partial/store/module_reads.h"

#include <string>
#include <utility>

#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"

namespace shardwright::partial {
namespace {

/// A member of which a save needs only a part is verified if the rest is at most one part
/// in this many. Reading a whole partition for one expert would cost more than the save.
constexpr std::uint64_t kRestShare = 8;

}  // namespace

std::uint32_t AddModuleFile(const layout::ShardMap& source, const Module& module,
                            Component component, plan::TargetBuilder* builder,
                            std::vector<std::uint32_t>* tensors) {
  const std::uint32_t file = builder->AddFile(module.name + " " + std::string(Name(component)));
  for (const ModuleTensor& one : module.part(component).tensors) {
    const layout::LogicalTensor& from = source.tensors[one.tensor];
    if (one.bytes == 0) continue;
    builder->AddWhole(file, one.offset, from.name, from.state, from.dtype, from.shape, from.name);
    tensors->push_back(one.tensor);
  }
  return file;
}

std::uint32_t AddPassedFile(const layout::ShardMap& source,
                            const std::vector<std::uint32_t>& members,
                            plan::TargetBuilder* builder) {
  const std::uint32_t file = builder->AddFile("passed");
  for (const std::uint32_t member : members) {
    builder->AddMember(file, builder->bytes(file), member, source.members[member].bytes);
  }
  return file;
}

std::vector<std::uint64_t> PayloadsOf(const plan::OutputFile& file) {
  std::vector<std::uint64_t> payloads;
  for (const plan::Payload& payload : file.payloads) payloads.push_back(payload.bytes);
  return payloads;
}

Result<exec::MembersVerified> VerifyModules(comm::Comm& comm, const plan::Plan& plan,
                                            const exec::SourceSums& sums, exec::ByteSource& source,
                                            unsigned threads) {
  const auto ranks = static_cast<std::uint32_t>(comm.size());
  const auto rank = static_cast<std::uint32_t>(comm.rank());
  const exec::MembersToVerify which{&source, kRestShare,
                                    [&](std::uint32_t member) { return member % ranks == rank; }};
  tbb::task_arena arena(exec::ArenaThreads(threads));
  SW_TRY_ASSIGN(const exec::MembersVerified mine,
                comm.Agree(exec::VerifyMembers(plan, sums, which, arena)));
  exec::MembersVerified all;
  SW_TRY_ASSIGN(all.verified, comm.AllReduceSum(mine.verified));
  SW_TRY_ASSIGN(all.without_sum, comm.AllReduceSum(mine.without_sum));
  SW_TRY_ASSIGN(all.in_part, comm.AllReduceSum(mine.in_part));
  return all;
}

}  // namespace shardwright::partial
