// SPDX-License-Identifier: Apache-2.0
#include "placement/core/dispatch.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>

#include "support/base/checked.h"

namespace shardwright::placement {
namespace {

__extension__ using Wide = unsigned __int128;

Error Homeless(std::uint32_t expert, std::uint64_t tokens) {
  return {Errc::kInfeasible, "expert " + std::to_string(expert) + ": " + std::to_string(tokens) +
                                 " tokens but no replica"};
}

Result<std::uint64_t> Sum(std::span<const std::uint64_t> tokens) {
  std::uint64_t sum = 0;
  for (const std::uint64_t t : tokens) {
    SW_TRY_ASSIGN(sum, CheckedAdd(sum, t));
  }
  return sum;
}

// Tokens of one expert by rank: kept, over capacity, and free capacity for tokens of other ranks.
struct Shares {
  std::vector<std::uint64_t> kept, over, room;
};

Shares SharesOf(std::span<const std::uint32_t> replicas, std::span<const std::uint64_t> tokens,
                std::uint64_t total, std::uint64_t replica_count) {
  Shares shares;
  const std::uint64_t each = total / replica_count;
  std::uint64_t more = total % replica_count;  // replicas that take one more token
  for (std::size_t j = 0; j < replicas.size(); ++j) {
    const std::uint64_t extra = std::min<std::uint64_t>(more, replicas[j]);
    more -= extra;
    const std::uint64_t capacity = each * replicas[j] + extra;
    shares.kept.push_back(std::min(capacity, tokens[j]));
    shares.over.push_back(tokens[j] - shares.kept.back());
    shares.room.push_back(capacity - shares.kept.back());
  }
  return shares;
}

void PourExactly(std::uint32_t expert, Shares* shares, std::vector<Send>* sends) {
  std::uint32_t to = 0;
  for (std::uint32_t from = 0; from < shares->over.size(); ++from) {
    while (shares->over[from] > 0) {
      while (shares->room[to] == 0) ++to;
      const std::uint64_t n = std::min(shares->over[from], shares->room[to]);
      sends->push_back({expert, from, to, n});
      shares->over[from] -= n;
      shares->room[to] -= n;
    }
  }
}

void PourInProportion(std::uint32_t expert, const Shares& shares, std::vector<Send>* sends) {
  const auto room = std::accumulate(shares.room.begin(), shares.room.end(), std::uint64_t{0});
  const auto ranks = static_cast<std::uint32_t>(shares.room.size());
  for (std::uint32_t from = 0; from < ranks; ++from) {
    const std::uint64_t over = shares.over[from];  // if not 0, the rank itself has no capacity
    if (over == 0) continue;
    SW_CHECK(room > 0);  // the total capacity equals the total tokens
    std::vector<std::uint64_t> part(ranks);
    std::vector<std::pair<std::uint64_t, std::uint32_t>> remainder;  // largest first, then by rank
    std::uint64_t left = over;
    for (std::uint32_t to = 0; to < ranks; ++to) {
      const Wide product = Wide{over} * shares.room[to];
      part[to] = static_cast<std::uint64_t>(product / room);
      left -= part[to];
      if (product % room > 0) {
        remainder.emplace_back(~static_cast<std::uint64_t>(product % room), to);
      }
    }
    std::sort(remainder.begin(), remainder.end());
    for (std::size_t i = 0; i < left; ++i) ++part[remainder[i].second];
    for (std::uint32_t to = 0; to < ranks; ++to) {
      if (part[to] > 0) sends->push_back({expert, from, to, part[to]});
    }
  }
}

void InOrder(std::vector<Send>* sends) {
  std::sort(sends->begin(), sends->end(), [](const Send& a, const Send& b) {
    return std::tie(a.expert, a.from, a.to) < std::tie(b.expert, b.from, b.to);
  });
}

}  // namespace

std::vector<Send> DispatchTable::BufferOf(std::uint32_t rank) const {
  std::vector<Send> buffer;
  for (const Send& send : sends) {
    if (send.from == rank) buffer.push_back(send);
  }
  std::stable_sort(buffer.begin(), buffer.end(),
                   [](const Send& a, const Send& b) { return a.to < b.to; });
  return buffer;
}

std::vector<std::uint64_t> DispatchTable::ReceivedBy(std::uint32_t rank) const {
  std::vector<std::uint64_t> received(std::size_t{ranks} * experts, 0);
  for (const Send& send : sends) {
    if (send.to == rank) received[std::size_t{send.from} * experts + send.expert] += send.tokens;
  }
  return received;
}

Result<std::vector<std::int64_t>> DispatchTable::RowsOf(
    std::uint32_t rank, std::span<const std::int64_t> chosen) const {
  // Free runs of rows of each expert, in the order in which its tokens take them.
  struct Run {
    std::int64_t next = 0;
    std::uint64_t left = 0;
  };
  std::vector<std::vector<Run>> runs(experts);
  std::int64_t row = 0;
  for (const Send& send : BufferOf(rank)) {
    runs[send.expert].push_back({row, send.tokens});
    row += static_cast<std::int64_t>(send.tokens);
  }
  std::vector<std::uint64_t> found(experts, 0);
  std::vector<std::size_t> at(experts, 0);
  std::vector<std::int64_t> rows(chosen.size(), kNoRow);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (chosen[i] < 0) continue;
    const auto e = static_cast<std::uint64_t>(chosen[i]);
    if (e >= experts) {
      return Fail(Errc::kMismatch, "expert ", e, " does not exist, there are ", experts);
    }
    ++found[e];
    while (at[e] < runs[e].size() && runs[e][at[e]].left == 0) ++at[e];
    if (at[e] == runs[e].size()) continue;  // reported below with the count
    Run& run = runs[e][at[e]];
    rows[i] = run.next++;
    --run.left;
  }
  std::vector<std::uint64_t> sent(experts, 0);
  for (const Send& send : sends) {
    if (send.from == rank) sent[send.expert] += send.tokens;
  }
  for (std::uint32_t e = 0; e < experts; ++e) {
    if (found[e] == sent[e]) continue;
    return Fail(Errc::kMismatch, "expert ", e, ": rank ", rank, " sends ", sent[e],
                " tokens, found ", found[e]);
  }
  return rows;
}

std::vector<std::int64_t> DispatchTable::ArrangementOf(std::uint32_t rank) const {
  const std::vector<std::uint64_t> received = ReceivedBy(rank);
  std::vector<std::int64_t> first(received.size(), 0);  // [from][expert]
  std::int64_t row = 0;
  for (std::uint32_t e = 0; e < experts; ++e) {
    for (std::uint32_t from = 0; from < ranks; ++from) {
      const std::size_t at = std::size_t{from} * experts + e;
      first[at] = row;
      row += static_cast<std::int64_t>(received[at]);
    }
  }
  std::vector<std::int64_t> rows;
  rows.reserve(static_cast<std::size_t>(row));
  for (std::size_t at = 0; at < received.size(); ++at) {
    for (std::uint64_t i = 0; i < received[at]; ++i) {
      rows.push_back(first[at] + static_cast<std::int64_t>(i));
    }
  }
  return rows;
}

Result<DispatchTable> DispatchByCapacity(std::span<const std::uint32_t> replicas,
                                         std::span<const std::uint64_t> tokens,
                                         std::uint32_t experts, std::uint32_t ranks, Split split) {
  DispatchTable table{experts, ranks, {}};
  for (std::uint32_t e = 0; e < experts; ++e) {
    const auto mine = tokens.subspan(std::size_t{e} * ranks, ranks);
    const auto copies = replicas.subspan(std::size_t{e} * ranks, ranks);
    SW_TRY_ASSIGN(const std::uint64_t total, Sum(mine));
    const auto count = std::accumulate(copies.begin(), copies.end(), std::uint64_t{0});
    if (total == 0) continue;
    if (count == 0) return tl::unexpected(Homeless(e, total));
    Shares shares = SharesOf(copies, mine, total, count);
    for (std::uint32_t i = 0; i < ranks; ++i) {
      if (shares.kept[i] > 0) table.sends.push_back({e, i, i, shares.kept[i]});
    }
    if (split == Split::kExact) {
      PourExactly(e, &shares, &table.sends);
    } else {
      PourInProportion(e, shares, &table.sends);
    }
  }
  InOrder(&table.sends);
  return table;
}

Result<DispatchTable> DispatchByTopology(const std::vector<std::vector<std::uint32_t>>& holders,
                                         std::span<const std::uint64_t> tokens,
                                         std::span<const std::uint32_t> node) {
  const auto ranks = static_cast<std::uint32_t>(node.size());
  DispatchTable table{static_cast<std::uint32_t>(holders.size()), ranks, {}};
  std::vector<std::uint32_t> near;
  for (std::uint32_t e = 0; e < table.experts; ++e) {
    const auto mine = tokens.subspan(std::size_t{e} * ranks, ranks);
    for (std::uint32_t s = 0; s < ranks; ++s) {
      if (mine[s] == 0) continue;
      if (holders[e].empty()) return tl::unexpected(Homeless(e, mine[s]));
      near.clear();
      if (std::binary_search(holders[e].begin(), holders[e].end(), s)) {
        near.push_back(s);
      } else {
        std::copy_if(holders[e].begin(), holders[e].end(), std::back_inserter(near),
                     [&](std::uint32_t d) { return node[d] == node[s]; });
        if (near.empty()) near = holders[e];
      }
      const std::uint64_t q = near.size();
      const std::uint64_t first = (std::uint64_t{s} + e) % q;
      for (std::uint64_t i = 0; i < q; ++i) {
        const bool more = (i + q - first) % q < mine[s] % q;
        const std::uint64_t n = mine[s] / q + (more ? 1 : 0);
        if (n > 0) table.sends.push_back({e, s, near[i], n});
      }
    }
  }
  InOrder(&table.sends);
  return table;
}

}  // namespace shardwright::placement
