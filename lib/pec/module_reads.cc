#include "pec/module_reads.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "exec/first_error.h"
#include "layout/cut.h"

namespace shardwright::pec {
namespace {

/// A member is verified although a save needs a part of it only, if the rest is at most one part in
/// this many: reading a whole partition for one expert would cost more than the save.
constexpr std::uint64_t kGapShare = 8;

plan::OutputFile EmptyFile(std::string path) {
  plan::OutputFile file;
  file.path = std::move(path);
  file.frame = [](std::span<const std::uint32_t>) -> Result<std::vector<plan::FramePiece>> {
    return std::vector<plan::FramePiece>();
  };
  return file;
}

std::uint32_t AddFile(plan::OutputFile file, plan::Target* target) {
  target->map.files.push_back(file.path);
  target->files.push_back(std::move(file));
  return static_cast<std::uint32_t>(target->files.size() - 1);
}

}  // namespace

std::uint32_t AddModuleFile(const layout::ShardMap& source, const Module& module,
                            Component component, plan::Target* target,
                            std::vector<std::uint32_t>* tensors) {
  const ModulePart& part = module.part(component);
  const auto index = static_cast<std::uint32_t>(target->files.size());
  plan::OutputFile file = EmptyFile(module.name + " " + std::string(Name(component)));
  for (const ModuleTensor& one : part.tensors) {
    const layout::LogicalTensor& from = source.tensors[one.tensor];
    if (one.bytes == 0) continue;
    plan::Payload payload;
    payload.offset = one.offset;
    payload.bytes = one.bytes;
    payload.array = static_cast<std::uint32_t>(target->map.arrays.size());
    const auto member = static_cast<std::uint32_t>(target->map.members.size());
    target->map.members.push_back({index, one.offset, one.bytes, std::nullopt, from.name});
    target->map.arrays.push_back({from.dtype, {{member, 0, Elems(from.shape)}}});
    layout::LogicalTensor tensor{from.name, from.state, from.dtype, from.shape, {}};
    layout::Fragment whole;
    whole.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(from.shape));
    whole.at.array = payload.array;
    tensor.fragments.push_back(std::move(whole));
    target->map.tensors.push_back(std::move(tensor));
    tensors->push_back(one.tensor);
    file.payloads.push_back(std::move(payload));
  }
  file.bytes = part.bytes;
  return AddFile(std::move(file), target);
}

std::uint32_t AddPassedFile(const layout::ShardMap& source,
                            const std::vector<std::uint32_t>& members, plan::Target* target) {
  plan::OutputFile file = EmptyFile("passed");
  for (const std::uint32_t member : members) {
    plan::Payload payload;
    payload.kind = plan::Payload::Kind::kMember;
    payload.offset = file.bytes;
    payload.bytes = source.members[member].bytes;
    payload.member = member;
    file.bytes += payload.bytes;
    file.payloads.push_back(std::move(payload));
  }
  return AddFile(std::move(file), target);
}

std::vector<std::uint64_t> PayloadsOf(const plan::OutputFile& file) {
  std::vector<std::uint64_t> payloads;
  for (const plan::Payload& payload : file.payloads) payloads.push_back(payload.bytes);
  return payloads;
}

Result<VerifiedMembers> VerifyMembers(comm::Comm& comm, const plan::Plan& plan,
                                      const exec::SourceSums& sums, exec::ByteSource& source,
                                      unsigned threads) {
  std::atomic<std::uint64_t> verified = 0;
  std::atomic<std::uint64_t> in_part = 0;
  exec::FirstError error;
  const std::vector<layout::Member>& members = plan.source().members;
  tbb::task_arena arena(static_cast<int>(threads));
  arena.execute([&] {
    tbb::parallel_for(std::size_t{0}, members.size(), [&](std::size_t m) {
      const auto member = static_cast<std::uint32_t>(m);
      const std::uint64_t used = plan.primary_bytes(member);
      const std::uint64_t bytes = members[m].bytes;
      const bool mine =
          m % static_cast<std::size_t>(comm.size()) == static_cast<std::size_t>(comm.rank());
      if (!mine || used == 0 || error.failed()) return;
      if ((bytes - used) > bytes / kGapShare) {
        in_part.fetch_add(1, std::memory_order_relaxed);
        return;
      }
      const Result<bool> ok = exec::VerifyMember(plan, sums, member, source);
      if (!ok) return error.Set(m, ok.error());
      if (*ok) verified.fetch_add(1, std::memory_order_relaxed);
    });
  });
  SW_TRY(comm.Agree(error.Take()));
  VerifiedMembers all;
  SW_TRY_ASSIGN(all.verified, comm.AllReduceSum(verified.load()));
  SW_TRY_ASSIGN(all.in_part, comm.AllReduceSum(in_part.load()));
  return all;
}

}  // namespace shardwright::pec
