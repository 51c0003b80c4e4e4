#include "exec/exchange.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

namespace shardwright::exec {
namespace {

/// What one rank asks of another, as it travels.
struct Request {
  std::uint64_t member;
  std::uint64_t offset;
  std::uint64_t bytes;
};

}  // namespace

Exchange::Exchange(comm::Comm& comm, const layout::ShardMap& source, ByteSource& local,
                   std::vector<int> file_owner)
    : comm_(comm), source_(source), local_(local), file_owner_(std::move(file_owner)) {}

bool Exchange::Local(std::uint32_t member) const {
  return !sends() || file_owner_[source_.members[member].file] == comm_.rank();
}

bool Exchange::MineFile(std::uint32_t file) const {
  if (sends()) return file_owner_[file] == comm_.rank();
  return file % static_cast<std::uint32_t>(comm_.size()) ==
         static_cast<std::uint32_t>(comm_.rank());
}

bool Exchange::Mine(std::uint32_t member) const {
  if (sends()) return Local(member);
  return member % static_cast<std::uint32_t>(comm_.size()) ==
         static_cast<std::uint32_t>(comm_.rank());
}

std::uint64_t Exchange::RoundUnits(std::uint64_t budget_bytes) const {
  if (!sends()) return std::numeric_limits<std::uint64_t>::max();
  // Each rank may be asked by all the others at once: its share of the memory is cut by their
  // number.
  const auto ranks = static_cast<std::uint64_t>(comm_.size());
  return std::max<std::uint64_t>(1, budget_bytes / (2 * plan::kUnitBytes * 8 * ranks));
}

Status Exchange::Round(const plan::Plan& plan, std::span<const std::uint64_t> units) {
  if (!sends()) return {};
  std::vector<Stretch> wanted;
  plan::Program program;
  for (const std::uint64_t index : units) {
    plan.Fill(plan.unit(index), &program);
    for (const plan::Read& read : program.reads) {
      wanted.push_back({read.member, read.offset, read.bytes});
    }
  }
  return Round(wanted);
}

void Exchange::Holding::Sort() {
  std::sort(index.begin(), index.end(), [](const Held& a, const Held& b) {
    return std::pair(a.stretch.member, a.stretch.offset) <
           std::pair(b.stretch.member, b.stretch.offset);
  });
}

const std::byte* Exchange::Holding::Find(std::uint32_t member, std::uint64_t offset,
                                         std::uint64_t count) const {
  const auto after = std::upper_bound(
      index.begin(), index.end(), std::pair(member, offset), [](const auto& key, const Held& held) {
        return key < std::pair(held.stretch.member, held.stretch.offset);
      });
  // Reads of different units may start at one offset with different lengths; any that is long
  // enough will do.
  for (auto it = after; it != index.begin();) {
    --it;
    const Stretch& stretch = it->stretch;
    if (stretch.member != member) break;
    if (offset + count <= stretch.offset + stretch.bytes) {
      const std::uint64_t from = it->at + (offset - stretch.offset);
      return from + count > bytes[it->rank].size() ? nullptr : bytes[it->rank].data() + from;
    }
    if (stretch.offset + plan::kUnitBytes * 8 < offset) break;
  }
  return nullptr;
}

Status Exchange::Round(std::span<const Stretch> wanted) {
  if (!sends()) return {};
  const auto ranks = static_cast<std::size_t>(comm_.size());
  std::vector<std::vector<Request>> asked(ranks);
  std::vector<std::uint64_t> at(ranks, 0);
  fetched_ = {};
  served_ = {};
  for (const Stretch& stretch : wanted) {
    if (Local(stretch.member)) continue;
    const auto rank = static_cast<std::size_t>(file_owner_[source_.members[stretch.member].file]);
    asked[rank].push_back({stretch.member, stretch.offset, stretch.bytes});
    fetched_.index.push_back({stretch, rank, at[rank]});
    at[rank] += stretch.bytes;
  }
  fetched_.Sort();
  std::vector<std::span<const std::byte>> outgoing;
  outgoing.reserve(ranks);
  for (const auto& list : asked) outgoing.push_back(std::as_bytes(std::span(list)));
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> requests, comm_.AllToAll(outgoing));
  SW_TRY(comm_.Agree(Serve(requests)));
  SW_TRY_ASSIGN(fetched_.bytes, comm_.AllToAll(served_.bytes));
  return {};
}

Status Exchange::Serve(const std::vector<comm::Bytes>& requests) {
  served_.bytes.resize(requests.size());
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>, const Held*> first;
  std::deque<Held> held;  // which stay where they are
  for (std::size_t rank = 0; rank < requests.size(); ++rank) {
    for (std::size_t i = 0; i + sizeof(Request) <= requests[rank].size(); i += sizeof(Request)) {
      Request request;
      std::memcpy(&request, requests[rank].data() + i, sizeof request);
      comm::Bytes& out = served_.bytes[rank];
      const std::size_t end = out.size();
      out.resize(end + request.bytes);
      const auto member = static_cast<std::uint32_t>(request.member);
      const auto [known, is_new] =
          first.try_emplace({request.member, request.offset, request.bytes}, nullptr);
      if (!is_new) {
        const Held& from = *known->second;
        std::memcpy(out.data() + end, served_.bytes[from.rank].data() + from.at, request.bytes);
        continue;
      }
      held.push_back({{member, request.offset, request.bytes}, rank, end});
      known->second = &held.back();
      SW_TRY(local_.Read(member, request.offset, std::span(out).subspan(end)));
    }
  }
  served_.index.assign(held.begin(), held.end());
  served_.Sort();
  return {};
}

Status Exchange::Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) {
  const bool local = Local(member);
  const std::byte* found = (local ? served_ : fetched_).Find(member, offset, out.size());
  if (found != nullptr) {
    if (!out.empty()) std::memcpy(out.data(), found, out.size());
    return {};
  }
  if (local) return local_.Read(member, offset, out);
  return Fail(Errc::kInternal, source_.files[source_.members[member].file] +
                                   ": bytes of another node that were not asked for");
}

Status InRounds(comm::Comm& comm, std::uint64_t count, std::uint64_t most,
                const std::function<Status(std::uint64_t first, std::uint64_t last)>& act) {
  const std::uint64_t mine = count / most + (count % most == 0 ? 0 : 1);
  SW_TRY_ASSIGN(const std::uint64_t rounds, comm.AllReduceMax(mine));
  std::uint64_t first = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    const std::uint64_t last = first + std::min(most, count - first);
    SW_TRY(act(first, last));
    first = last;
  }
  return {};
}

}  // namespace shardwright::exec
