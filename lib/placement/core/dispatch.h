// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "support/base/result.h"

namespace shardwright::placement {

/// How tokens that a rank's own replicas cannot take are spread over the others.
enum class Split : std::uint8_t {
  kExact,         ///< ranks in order fill the room of ranks in order: no capacity is exceeded
  kProportional,  ///< by room, floors and largest remainders: over capacity by at most the sources
};

/// Tokens of one layer that one rank sends to another (or keeps) for one expert.
struct Send {
  std::uint32_t expert = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint64_t tokens = 0;
  bool operator==(const Send&) const = default;
};

/// Who sends what: every token once, to a rank that holds its expert.
struct DispatchTable {
  std::uint32_t experts = 0;
  std::uint32_t ranks = 0;
  std::vector<Send> sends;  ///< ascending (expert, from, to), tokens > 0

  /// A rank's send buffer: by receiver, then expert, each entry taking the next tokens of its
  /// expert in input order.
  std::vector<Send> BufferOf(std::uint32_t rank) const;
  /// Tokens of each expert that a rank receives from each rank: [from][expert].
  std::vector<std::uint64_t> ReceivedBy(std::uint32_t rank) const;

  /// The row of the send buffer of `rank` that each of its tokens takes, kNoRow for one without an
  /// expert: BufferOf, token by token.
  /// \param chosen  by token in input order: its expert, or negative for none. A token that goes to
  ///        several experts is there several times
  /// \error kMismatch  other tokens than the table was made for: names the expert and both counts
  Result<std::vector<std::int64_t>> RowsOf(std::uint32_t rank,
                                           std::span<const std::int64_t> chosen) const;
  /// The row, by expert and then by sender, of each row that `rank` receives, senders in order and
  /// each with its part of its send buffer. The inverse puts results back in the order of arrival.
  std::vector<std::int64_t> ArrangementOf(std::uint32_t rank) const;
};

/// What a token without an expert has in place of a row.
inline constexpr std::int64_t kNoRow = -1;

/// Equal shares for all replicas, own replicas first. Every rank computes the same table.
/// \param replicas  [expert][rank]
/// \param tokens    [expert][rank]: tokens that the rank has for the expert
/// \pre both have experts * ranks entries
/// \error kInfeasible  an expert with tokens and without a replica; kBadInput  sums that overflow
/// Local, pure. Source: Lazarus, algorithm 1, on integers: a replica takes floor(t / r), the first
/// t mod r replicas by rank one more.
Result<DispatchTable> DispatchByCapacity(std::span<const std::uint32_t> replicas,
                                         std::span<const std::uint64_t> tokens,
                                         std::uint32_t experts, std::uint32_t ranks, Split split);

/// The nearest holders share evenly: the rank itself, else those of its node, else all; remainders
/// one each from holder (from + expert) mod holders on. No dispatch has fewer tokens between nodes.
/// \param holders  by expert, ascending ranks
/// \param node     of every rank
/// \error kInfeasible  an expert with tokens that nobody holds
/// Local, pure. Source: Hecate, section 4.4.
Result<DispatchTable> DispatchByTopology(const std::vector<std::vector<std::uint32_t>>& holders,
                                         std::span<const std::uint64_t> tokens,
                                         std::span<const std::uint32_t> node);

}  // namespace shardwright::placement
