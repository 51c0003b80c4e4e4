// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "support/comm/comm.h"

namespace shardwright::comm {

// Checks that hold for every Comm: run by all ranks of threads, of MPI, or alone. They return
// the first error.

/// Returns bytes that differ for every pair of ranks.
inline Bytes Pattern(std::size_t bytes, int from, int to) {
  Bytes out(bytes);
  const auto seed = static_cast<std::uint64_t>(from) * 1000 + static_cast<std::uint64_t>(to) + 1;
  for (std::size_t i = 0; i < bytes; ++i) {
    out[i] = static_cast<std::byte>((i * 31 + seed * 7919 + (i >> 8)) & 0xff);
  }
  return out;
}

inline Status Expect(bool ok, const std::string& what) {
  if (ok) return {};
  return Fail(Errc::kMismatch, what);
}

/// A length for a pair of ranks: some empty, some longer than a chunk of 1000.
inline std::size_t PairBytes(int from, int to) {
  return static_cast<std::size_t>((from * 7 + to * 3) % 5) * 777;
}

inline Status CheckBcast(Comm& comm, std::size_t bytes) {
  for (int root = 0; root < comm.size(); ++root) {
    Bytes data = Pattern(comm.rank() == root ? bytes : 5, comm.rank(), 0);
    SW_TRY(comm.Bcast(data, root));
    SW_TRY(Expect(data == Pattern(bytes, root, 0), "bcast of " + std::to_string(bytes)));
  }
  return {};
}

inline Status CheckGathers(Comm& comm) {
  const Bytes mine = Pattern(PairBytes(comm.rank(), 1), comm.rank(), 1);
  const auto whole = [&](const std::vector<Bytes>& all) {
    bool ok = all.size() == static_cast<std::size_t>(comm.size());
    for (int r = 0; ok && r < comm.size(); ++r) {
      ok = all[static_cast<std::size_t>(r)] == Pattern(PairBytes(r, 1), r, 1);
    }
    return ok;
  };
  for (int root = 0; root < comm.size(); ++root) {
    SW_TRY_ASSIGN(const std::vector<Bytes> all, comm.Gather(mine, root));
    SW_TRY(Expect(comm.rank() == root ? whole(all) : all.empty(), "gather"));
  }
  SW_TRY_ASSIGN(const std::vector<Bytes> all, comm.AllGather(mine));
  return Expect(whole(all), "all-gather");
}

inline Status CheckAllToAll(Comm& comm) {
  std::vector<Bytes> pieces;
  pieces.reserve(static_cast<std::size_t>(comm.size()));
  for (int to = 0; to < comm.size(); ++to) {
    pieces.push_back(Pattern(PairBytes(comm.rank(), to), comm.rank(), to));
  }
  SW_TRY_ASSIGN(const std::vector<Bytes> received, comm.AllToAll(pieces));
  bool ok = received.size() == pieces.size();
  for (int from = 0; ok && from < comm.size(); ++from) {
    ok = received[static_cast<std::size_t>(from)] ==
         Pattern(PairBytes(from, comm.rank()), from, comm.rank());
  }
  return Expect(ok, "all-to-all");
}

inline Status CheckReduce(Comm& comm) {
  const auto rank = static_cast<std::uint64_t>(comm.rank());
  const auto size = static_cast<std::uint64_t>(comm.size());
  constexpr std::uint64_t kHigh = std::uint64_t{1} << 63;
  SW_TRY_ASSIGN(const std::uint64_t sum, comm.AllReduceSum(rank + 1));
  SW_TRY(Expect(sum == size * (size + 1) / 2, "sum"));
  SW_TRY_ASSIGN(const std::uint64_t max, comm.AllReduceMax(kHigh + rank));
  SW_TRY(Expect(max == kHigh + size - 1, "max"));
  SW_TRY_ASSIGN(const std::uint64_t bits, comm.AllReduceOr(std::uint64_t{1} << rank));
  return Expect(bits == (std::uint64_t{1} << size) - 1, "or");
}

inline Status CheckCollectives(Comm& comm) {
  SW_TRY(Expect(comm.rank() >= 0 && comm.rank() < comm.size(), "rank"));
  for (int round = 0; round < 3; ++round) {
    SW_TRY(comm.Barrier());
    for (const std::size_t bytes :
         std::initializer_list<std::size_t>{0, 1, 999, 1000, 1001, 100'000}) {
      SW_TRY(CheckBcast(comm, bytes));
    }
    SW_TRY(CheckGathers(comm));
    SW_TRY(CheckAllToAll(comm));
    SW_TRY(CheckReduce(comm));
  }
  Status mine;
  if (comm.rank() == comm.size() - 1) mine = Fail(Errc::kIo, "disk");
  const Status agreed = comm.Agree(std::move(mine));
  SW_TRY(Expect(!agreed && agreed.error().message == "disk", "agree"));
  return Expect(agreed.error().rank == (comm.size() == 1 ? -1 : comm.size() - 1), "agreed rank");
}

/// One rank accepts less than it is sent: all ranks must get the error, and can then continue.
inline Status CheckReceiveCap(Comm& comm) {
  const int tight = comm.size() - 1;
  const Bytes piece = Pattern(100, comm.rank(), 0);
  const std::vector<std::span<const std::byte>> pieces(static_cast<std::size_t>(comm.size()),
                                                       piece);
  const std::uint64_t total = 100 * static_cast<std::uint64_t>(comm.size());
  const std::uint64_t cap = comm.rank() == tight ? total - 1 : total;
  const auto refused = comm.AllToAll(pieces, cap);
  SW_TRY(Expect(!refused && refused.error().code == Errc::kLimit, "cap"));
  SW_TRY(Expect(comm.size() == 1 || refused.error().rank == tight, "rank over its cap"));
  SW_TRY_ASSIGN(const std::vector<Bytes> received, comm.AllToAll(pieces, total));
  return Expect(received[0] == Pattern(100, 0, 0), "all-to-all within the cap");
}

/// Calls that break a precondition.
inline Status CheckMisuse(Comm& comm) {
  Bytes bytes;
  for (const int root : {-1, comm.size()}) {
    const Status bcast = comm.Bcast(bytes, root);
    SW_TRY(Expect(!bcast && bcast.error().code == Errc::kInternal, "bcast root"));
    const auto gather = comm.Gather(bytes, root);
    SW_TRY(Expect(!gather && gather.error().code == Errc::kInternal, "gather root"));
  }
  // Only one rank is wrong, all must fail.
  const std::size_t extra = comm.rank() == 0 ? 1 : 0;
  const std::vector<Bytes> pieces(static_cast<std::size_t>(comm.size()) + extra);
  const auto result = comm.AllToAll(pieces);
  SW_TRY(Expect(!result && result.error().code == Errc::kInternal, "piece count"));
  return comm.Barrier();
}

}  // namespace shardwright::comm
