// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/verify.h"

#include <algorithm>
#include <atomic>

#include "engine/exec/for_each.h"
#include "support/base/checked.h"
#include "support/base/crc32.h"

namespace shardwright::exec {
namespace {

/// Compares the checksum of a member, after reading the parts that no unit needed.
/// \returns false if the file has no checksum for it
Result<bool> VerifyMember(const plan::Plan& plan, const SourceSums& sums, std::uint32_t member,
                          ByteSource* source) {
  const layout::Member& at = plan.source().members[member];
  if (!at.crc32) return false;
  std::uint32_t crc = sums.crc(member);
  std::uint64_t bytes = sums.bytes(member);
  if (bytes < at.bytes) {
    std::vector<std::byte> buffer;
    for (const plan::Plan::Gap& gap : plan.Gaps(member)) {
      for (std::uint64_t done = 0; done < gap.bytes;) {
        const std::uint64_t count = std::min(gap.bytes - done, plan::kUnitBytes);
        buffer.resize(count);
        const std::uint64_t offset = gap.offset + done;
        SW_TRY(source->Read(member, offset, buffer));
        crc ^= Crc32Share(Crc32(buffer), at.bytes - offset - count);
        done += count;
      }
      bytes += gap.bytes;
    }
  }
  if (crc == *at.crc32) return true;
  // The checksum of a storage is made from those of its tensors and of the gaps between them. A
  // storage that is copied as a whole has only a gap.
  std::uint64_t covered = at.bytes;
  for (const plan::Plan::Gap& gap : plan.Gaps(member)) covered -= gap.bytes;
  if (covered > 0 && covered < plan.primary_bytes(member)) {
    return Fail(
        Errc::kUnsupported, plan.source().files[at.file], ": ", at.name,
        ": several tensors are views of the same elements; clone them before the checkpoint "
        "is saved, or pass --verify=none");
  }
  SW_CHECK(bytes == at.bytes);
  return tl::unexpected<Error>(WrongChecksum(plan, member, crc));
}

}  // namespace

Status CombineSums(comm::Comm& comm, SourceSums* sums) {
  if (comm.size() == 1) return {};
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> packed, comm.AllGather(sums->Pack()));
  for (std::size_t rank = 0; rank < packed.size(); ++rank) {
    if (rank != static_cast<std::size_t>(comm.rank())) sums->Combine(packed[rank]);
  }
  return {};
}

Result<MembersVerified> VerifyMembers(const plan::Plan& plan, const SourceSums& sums,
                                      const MembersToVerify& which, tbb::task_arena& arena) {
  std::atomic<std::uint64_t> verified = 0;
  std::atomic<std::uint64_t> without_sum = 0;
  std::atomic<std::uint64_t> in_part = 0;
  const std::vector<layout::Member>& members = plan.source().members;
  SW_TRY(ForEach(arena, members.size(), [&](std::uint64_t m) -> Status {
    const auto member = static_cast<std::uint32_t>(m);
    const std::uint64_t used = plan.primary_bytes(member);
    if (used == 0 || (which.mine && !which.mine(member))) return {};
    const std::uint64_t rest = members[m].bytes - used;
    const bool affordable = which.source != nullptr && rest <= members[m].bytes / which.rest_share;
    if (rest > 0 && !affordable) {
      in_part.fetch_add(1, std::memory_order_relaxed);
      return {};
    }
    SW_TRY_ASSIGN(const bool has_sum, VerifyMember(plan, sums, member, which.source));
    (has_sum ? verified : without_sum).fetch_add(1, std::memory_order_relaxed);
    return {};
  }));
  return MembersVerified{verified.load(), without_sum.load(), in_part.load()};
}

Result<std::vector<std::uint32_t>> SumPayloads(const plan::Plan& plan, std::uint32_t file,
                                               std::span<const UnitSum> units, bool compare) {
  std::vector<std::uint32_t> crcs;
  for (const plan::Payload& payload : plan.target().files[file].payloads) {
    const auto count = static_cast<std::size_t>(CeilDiv(payload.bytes, plan::kUnitBytes));
    const std::uint32_t crc = CombinedCrc32(units.first(count));
    units = units.subspan(count);
    if (compare && payload.kind == plan::Payload::Kind::kMember) {
      const auto& expected = plan.source().members[payload.member].crc32;
      if (expected && *expected != crc) {
        return tl::unexpected<Error>(WrongChecksum(plan, payload.member, crc));
      }
    }
    crcs.push_back(crc);
  }
  return crcs;
}

}  // namespace shardwright::exec
