// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/exchange.h"

#include <algorithm>
#include <compare>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <utility>

namespace shardwright::exec {
namespace {

/// One request of a rank for bytes of another, as it is sent.
struct Request {
  std::uint64_t member;
  std::uint64_t offset;
  std::uint64_t bytes;

  auto operator<=>(const Request&) const = default;
};

std::vector<Request> Unpack(const comm::Bytes& bytes) {
  std::vector<Request> out(bytes.size() / sizeof(Request));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(Request));
  return out;
}

/// Units of a round through shared memory. All rounds reuse the same few pages, because
/// allocating a page is slower than copying it, and small rounds stay in the processor caches.
constexpr std::uint64_t kSharedUnits = 32;

}  // namespace

Exchange::Exchange(comm::Comm& comm, const layout::ShardMap& source, ByteSource& local,
                   std::vector<int> file_owner)
    : comm_(comm), source_(source), local_(local), file_owner_(std::move(file_owner)) {}

/// \pre sends()
int Exchange::OwnerOf(std::uint32_t member) const {
  return member_owner_.empty() ? file_owner_[source_.members[member].file] : member_owner_[member];
}

bool Exchange::Local(std::uint32_t member) const {
  return !sends() || OwnerOf(member) == comm_.rank();
}

bool Exchange::MineFile(std::uint32_t file) const {
  SW_CHECK(member_owner_.empty());
  if (sends()) return file_owner_[file] == comm_.rank();
  return file % static_cast<std::uint32_t>(comm_.size()) ==
         static_cast<std::uint32_t>(comm_.rank());
}

bool Exchange::Mine(std::uint32_t member) const {
  if (sends()) return Local(member);
  return member % static_cast<std::uint32_t>(comm_.size()) ==
         static_cast<std::uint32_t>(comm_.rank());
}

std::uint64_t Exchange::RoundUnits(std::uint64_t budget_bytes, std::uint64_t read_bytes) const {
  if (!sends()) return std::numeric_limits<std::uint64_t>::max();
  // All other ranks may send requests to one rank at
  // once, so divide the budget by the number of ranks.
  const auto ranks = static_cast<std::uint64_t>(comm_.size());
  const std::uint64_t units = std::max<std::uint64_t>(
      1, budget_bytes / (2 * std::max<std::uint64_t>(1, read_bytes) * ranks));
  return windows_ == nullptr ? units : std::min(units, kSharedUnits);
}

Status Exchange::ShareMemory(std::uint64_t budget_bytes, std::uint64_t read_bytes) {
  if (!sends()) return {};
  const std::uint64_t units = std::min(RoundUnits(budget_bytes, read_bytes), kSharedUnits);
  const auto others = static_cast<std::uint64_t>(comm_.size() - 1);
  SW_TRY_ASSIGN(windows_, device::Windows::Open(comm_, units * read_bytes * others));
  return {};
}

Status Exchange::Round(const plan::Plan& plan, std::span<const std::uint64_t> units) {
  if (!sends()) return {};
  std::vector<ByteRange> wanted;
  plan::Program program;
  for (const std::uint64_t index : units) {
    plan.Fill(plan.unit(index), &program);
    for (const plan::Read& read : program.reads) {
      wanted.push_back({read.member, read.offset, read.bytes});
    }
  }
  return Round(wanted);
}

Result<std::vector<bool>> Exchange::RoundsThatSend(const plan::Plan& plan,
                                                   std::span<const std::uint64_t> units,
                                                   std::uint64_t most) {
  std::vector<std::uint8_t> mine(units.size() / most + (units.size() % most == 0 ? 0 : 1));
  plan::Program program;
  for (std::size_t i = 0; sends() && i < units.size(); ++i) {
    if (mine[i / most] != 0) continue;
    plan.Fill(plan.unit(units[i]), &program);
    mine[i / most] = std::any_of(program.reads.begin(), program.reads.end(),
                                 [&](const plan::Read& read) { return !Local(read.member); });
  }
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> all,
                comm_.AllGather(std::as_bytes(std::span(mine))));
  std::vector<bool> out;
  for (const comm::Bytes& rounds : all) {
    out.resize(std::max(out.size(), rounds.size()));
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      if (rounds[i] != std::byte{0}) out[i] = true;
    }
  }
  return out;
}

void Exchange::Holding::Sort() {
  std::sort(index.begin(), index.end(), [](const BufferedRange& a, const BufferedRange& b) {
    return std::pair(a.stretch.member, a.stretch.offset) <
           std::pair(b.stretch.member, b.stretch.offset);
  });
}

const std::byte* Exchange::Holding::Find(std::uint32_t member, std::uint64_t offset,
                                         std::uint64_t count) const {
  const auto after =
      std::upper_bound(index.begin(), index.end(), std::pair(member, offset),
                       [](const auto& key, const BufferedRange& held) {
                         return key < std::pair(held.stretch.member, held.stretch.offset);
                       });
  // Reads of different units may start at the same offset
  // with different lengths; use any that is long enough.
  for (auto it = after; it != index.begin();) {
    --it;
    const ByteRange& stretch = it->stretch;
    if (stretch.member != member) break;
    if (offset + count <= stretch.offset + stretch.bytes) {
      const std::uint64_t from = it->at + (offset - stretch.offset);
      return from + count > views[it->rank].size() ? nullptr : views[it->rank].data() + from;
    }
    if (stretch.offset + plan::kUnitBytes * 8 < offset) break;
  }
  return nullptr;
}

Status Exchange::Round(std::span<const ByteRange> wanted) {
  if (!sends()) return {};
  const auto ranks = static_cast<std::size_t>(comm_.size());
  std::vector<std::vector<Request>> asked(ranks);
  std::vector<std::uint64_t> at(ranks, 0);
  fetched_ = {};
  served_ = {};
  for (const ByteRange& stretch : wanted) {
    if (Local(stretch.member)) continue;
    const auto rank = static_cast<std::size_t>(OwnerOf(stretch.member));
    asked[rank].push_back({stretch.member, stretch.offset, stretch.bytes});
    fetched_.index.push_back({stretch, rank, at[rank]});
    at[rank] += stretch.bytes;
  }
  std::vector<std::span<const std::byte>> outgoing;
  outgoing.reserve(ranks);
  for (const auto& list : asked) outgoing.push_back(std::as_bytes(std::span(list)));
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> requests, comm_.AllToAll(outgoing));
  if (windows_ != nullptr) return FetchShared(requests);
  SW_TRY(comm_.Agree(Serve(requests)));
  SW_TRY_ASSIGN(fetched_.bytes, comm_.AllToAll(served_.bytes));
  fetched_.View();
  fetched_.Sort();
  return {};
}

Status Exchange::FetchShared(const std::vector<comm::Bytes>& requests) {
  std::vector<comm::Bytes> places(requests.size());
  SW_TRY(comm_.Agree(ServeShared(requests, &places)));
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> at, comm_.AllToAll(places));
  std::vector<std::size_t> next(at.size(), 0);
  for (BufferedRange& held : fetched_.index) {  // in the order of the requests
    std::memcpy(&held.at, at[held.rank].data() + next[held.rank], sizeof held.at);
    next[held.rank] += sizeof held.at;
  }
  for (int rank = 0; rank < comm_.size(); ++rank) fetched_.views.push_back(windows_->of(rank));
  fetched_.Sort();
  return {};
}

Status Exchange::ServeShared(const std::vector<comm::Bytes>& requests,
                             std::vector<comm::Bytes>* places) {
  const std::span<std::byte> window = windows_->mine();
  std::map<Request, std::uint64_t> known;
  std::uint64_t end = 0;
  for (std::size_t rank = 0; rank < requests.size(); ++rank) {
    for (const Request& request : Unpack(requests[rank])) {
      const auto [found, is_new] = known.try_emplace(request, end);
      const auto place = std::as_bytes(std::span(&found->second, 1));
      (*places)[rank].insert((*places)[rank].end(), place.begin(), place.end());
      if (!is_new) continue;
      if (request.bytes > window.size() - end) {
        return Fail(Errc::kInternal, "a round requests more bytes than its ranks have agreed on");
      }
      const auto member = static_cast<std::uint32_t>(request.member);
      SW_TRY(local_.Read(member, request.offset, window.subspan(end, request.bytes)));
      served_.index.push_back({{member, request.offset, request.bytes}, 0, end});
      end += request.bytes;
    }
  }
  served_.views = {window};
  served_.Sort();
  return {};
}

Status Exchange::Serve(const std::vector<comm::Bytes>& requests) {
  served_.bytes.resize(requests.size());
  std::map<Request, const BufferedRange*> first;
  std::deque<BufferedRange> held;  // deque: keeps addresses stable
  for (std::size_t rank = 0; rank < requests.size(); ++rank) {
    for (const Request& request : Unpack(requests[rank])) {
      comm::Bytes& out = served_.bytes[rank];
      const std::size_t end = out.size();
      out.resize(end + request.bytes);
      const auto member = static_cast<std::uint32_t>(request.member);
      const auto [known, is_new] = first.try_emplace(request, nullptr);
      if (!is_new) {
        const BufferedRange& from = *known->second;
        std::memcpy(out.data() + end, served_.bytes[from.rank].data() + from.at, request.bytes);
        continue;
      }
      held.push_back({{member, request.offset, request.bytes}, rank, end});
      known->second = &held.back();
      SW_TRY(local_.Read(member, request.offset, std::span(out).subspan(end)));
    }
  }
  served_.index.assign(held.begin(), held.end());
  served_.View();
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
  return Fail(Errc::kInternal, source_.files[source_.members[member].file],
              ": bytes of another node were not requested before they were read");
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
