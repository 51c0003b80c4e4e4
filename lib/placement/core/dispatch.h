// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "support/base/result.h"

namespace shardwright::placement {

/// Method that distributes the tokens that exceed the capacity of a rank's own replicas.
enum class Split : std::uint8_t {
  kExact,         ///< fills free capacity in rank order; no rank exceeds its capacity
  kProportional,  ///< in proportion to free capacity; excess of at most one token per source
};

/// Tokens of one layer that one rank sends to another (or keeps) for one expert.
struct Send {
  std::uint32_t expert = 0;
  std::uint32_t from = 0;
  std::uint32_t to = 0;
  std::uint64_t tokens = 0;
  bool operator==(const Send&) const = default;
};

/// Tokens that each rank sends. Every token goes once to a rank with a replica of its expert.
struct DispatchTable {
  std::uint32_t experts = 0;
  std::uint32_t ranks = 0;
  std::vector<Send> sends;  ///< ascending (expert, from, to), tokens > 0

  /// Returns the send buffer of a rank, ordered by receiver and then by expert. Each entry takes
  /// the next tokens of its expert in input order.
  std::vector<Send> BufferOf(std::uint32_t rank) const;
  /// Returns the tokens of each expert that `rank` receives from each rank, as [from][expert].
  std::vector<std::uint64_t> ReceivedBy(std::uint32_t rank) const;

  /// Returns the row in the send buffer of `rank` for each of its tokens, in the order of BufferOf.
  /// The row is kNoRow for a token without an expert.
  /// \param chosen  expert of each token in input order, negative for none. A token that goes
  ///        to several experts appears several times
  /// \error kMismatch  the counts differ from those of the table: names the expert and both counts
  Result<std::vector<std::int64_t>> RowsOf(std::uint32_t rank,
                                           std::span<const std::int64_t> chosen) const;
  /// Returns the position, by expert and then sender, of each row that `rank` receives. Rows arrive
  /// by sender and then expert. The inverse permutation restores the order of arrival.
  std::vector<std::int64_t> ArrangementOf(std::uint32_t rank) const;
};

/// Marks a token without an expert in the result of DispatchTable::RowsOf.
inline constexpr std::int64_t kNoRow = -1;

/// Gives all replicas equal shares, own replicas first. Every rank computes the same table.
/// \param replicas  [expert][rank]: number of replicas
/// \param tokens    [expert][rank]: tokens of the rank for the expert
/// \pre both have experts * ranks entries
/// \error kInfeasible  an expert has tokens but no replica; kBadInput  a token total overflows
/// Local, pure. Source: Lazarus, algorithm 1, with integers. A replica takes floor(t / r) tokens,
/// and the first t mod r replicas by rank take one more.
Result<DispatchTable> DispatchByCapacity(std::span<const std::uint32_t> replicas,
                                         std::span<const std::uint64_t> tokens,
                                         std::uint32_t experts, std::uint32_t ranks, Split split);

/// Shares tokens evenly among the nearest replicas: own rank, then own node, then all. Remainders
/// go one each from index (from + expert) mod count on. Sends the fewest tokens between nodes.
/// \param holders  by expert: ranks with a replica, ascending
/// \param node     by rank: its node
/// \error kInfeasible  an expert has tokens but no replica
/// Local, pure. Source: Hecate, section 4.4.
Result<DispatchTable> DispatchByTopology(const std::vector<std::vector<std::uint32_t>>& holders,
                                         std::span<const std::uint64_t> tokens,
                                         std::span<const std::uint32_t> node);

}  // namespace shardwright::placement
