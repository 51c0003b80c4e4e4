#include "exec/verify.h"

#include <atomic>

#include <tbb/parallel_for.h>

#include "exec/first_error.h"

namespace shardwright::exec {

Status CombineSums(comm::Comm& comm, SourceSums* sums) {
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> packed, comm.AllGather(sums->Pack()));
  for (std::size_t rank = 0; rank < packed.size(); ++rank) {
    if (rank != static_cast<std::size_t>(comm.rank())) sums->Combine(packed[rank]);
  }
  return {};
}

Result<MembersVerified> VerifyMembers(comm::Comm& comm, const plan::Plan& plan,
                                      const SourceSums& sums,
                                      const std::set<std::uint32_t>& left_out, Exchange& source,
                                      tbb::task_arena& arena) {
  std::atomic<std::uint64_t> verified = 0;
  std::atomic<std::uint64_t> without = 0;
  FirstError error;
  arena.execute([&] {
    tbb::parallel_for(std::size_t{0}, plan.source().members.size(), [&](std::size_t m) {
      const auto member = static_cast<std::uint32_t>(m);
      if (!source.Mine(member) || plan.primary_bytes(member) == 0 || error.failed()) return;
      if (left_out.contains(plan.source().members[m].file)) return;
      Result<bool> ok = VerifyMember(plan, sums, member, source);
      if (!ok) return error.Set(m, std::move(ok).error());
      (*ok ? verified : without).fetch_add(1, std::memory_order_relaxed);
    });
  });
  SW_TRY(comm.Agree(error.Take()));
  return MembersVerified{verified.load(), without.load()};
}

}  // namespace shardwright::exec
