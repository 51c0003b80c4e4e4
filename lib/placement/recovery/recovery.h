// SPDX-License-Identifier: Apache-2.0
// lib/placement/recovery: the probability that a placement survives failures.
// The replicas of an expert are on a set of failure units (nodes or racks). The model survives if
// every such set keeps a live unit. SolveRecovery computes the probability for k failures, exactly
// if one of its methods fits, and by sampling failure sets otherwise.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "placement/core/types.h"
#include "support/base/stop.h"

namespace shardwright::placement {

/// A set of failure units, stored as bits.
class UnitSet {
 public:
  UnitSet() = default;
  explicit UnitSet(std::uint32_t units) : words_((units + 63) / 64, 0) {}
  void Add(std::uint32_t unit) { words_[unit / 64] |= std::uint64_t{1} << (unit % 64); }
  void Remove(std::uint32_t unit) { words_[unit / 64] &= ~(std::uint64_t{1} << (unit % 64)); }
  bool Has(std::uint32_t unit) const { return (words_[unit / 64] >> (unit % 64) & 1) != 0; }
  std::uint32_t size() const;
  bool Contains(const UnitSet& other) const;
  std::span<const std::uint64_t> words() const { return words_; }
  bool operator==(const UnitSet&) const = default;

 private:
  std::vector<std::uint64_t> words_;
};

/// Method that computed a recovery probability. All except kMonteCarlo are exact up to rounding.
enum class RecoveryMethod : std::uint8_t {
  kProduct,             ///< disjoint sets
  kIntervals,           ///< runs of consecutive units in some order, or in a ring
  kInclusionExclusion,  ///< few sets
  kFrontier,            ///< unit by unit, with the sets that have no live unit yet
  kEnumeration,         ///< every failure set is tested
  kComponents,          ///< parts that share no unit, each solved by one of the methods above
  kMonteCarlo,          ///< sampled failure sets: an estimate
};

/// Returns the name of a method: "product", "intervals", ...
std::string_view Name(RecoveryMethod method);

/// Probability that every expert survives after k of `units` failed, where all sets of k
/// units are equally likely.
struct RecoveryProbability {
  std::uint32_t units = 0;
  RecoveryMethod method = RecoveryMethod::kProduct;
  std::vector<double> survived;  ///< P(k), k = 0 .. min(units, RecoveryOptions::failures_max)
  std::vector<double> lost;      ///< 1 - P(k), without cancellation where the method is exact
  /// Number of survived failure sets of size k. Filled if the method is exact and 64 bits
  /// can store every count.
  std::vector<std::uint64_t> survived_sets;
  std::vector<double> standard_error;  ///< by k; empty if exact; 0 where that k is exact
  /// Largest k with P(k) = 1, always exact. -1 if an expert is already lost.
  std::int64_t certain = 0;

  bool exact() const { return method != RecoveryMethod::kMonteCarlo; }
};

struct RecoveryOptions {
  std::uint32_t failures_max = 512;           ///< greatest k that is computed
  std::uint64_t enumeration_max = 1'000'000;  ///< kEnumeration: limit of failure sets of one size
  std::uint64_t frontier_max = 4096;          ///< limit of states for kFrontier
  std::uint64_t samples = 20'000;             ///< samples of kMonteCarlo, per k
  std::uint64_t seed = 0;
  /// Forces a method, for tests and --recovery: kInclusionExclusion, kFrontier, kEnumeration or
  /// kMonteCarlo. Problems above the limits of that method use the automatic choice.
  std::optional<RecoveryMethod> force;
  StopCheck stop = {};  ///< ends the work early; the result is then undefined
};

/// Computes the recovery probability for sets of units of which each must keep one live unit.
/// \param sets  an empty set means that an expert is already lost
/// \pre units >= 1
/// Local, pure. Source: docs/placement.md.
RecoveryProbability SolveRecovery(const std::vector<UnitSet>& sets, std::uint32_t units,
                                  const RecoveryOptions& options = {});

/// Computes the recovery probability of one layer. Units are live nodes, or racks with a live node.
/// \pre placement fits cluster
RecoveryProbability LayerRecovery(const Placement& placement, const Cluster& cluster,
                                  std::uint32_t layer, FailureUnit unit = FailureUnit::kNode,
                                  const RecoveryOptions& options = {});

/// Computes the recovery probability of the model. It survives failures that all layers survive.
RecoveryProbability ModelRecovery(const Placement& placement, const Cluster& cluster,
                                  FailureUnit unit = FailureUnit::kNode,
                                  const RecoveryOptions& options = {});

/// Returns the probability of survival if every unit fails independently with probability q. More
/// than RecoveryOptions::failures_max failures count as not survived.
double SurvivalAt(const RecoveryProbability& recovery, double q);

}  // namespace shardwright::placement
