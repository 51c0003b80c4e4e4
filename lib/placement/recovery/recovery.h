// SPDX-License-Identifier: Apache-2.0
// lib/placement/recovery: how likely a placement survives failures.
// The replicas of an expert lie on a set of failure units (nodes, or racks). The model survives if
// every such set keeps a live unit. SolveRecovery works out the probability for k failures, exactly
// by one of several methods where one of them fits, by drawing failure sets otherwise.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "placement/core/types.h"
#include "support/base/stop.h"

namespace shardwright::placement {

/// A set of failure units, as bits.
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

/// How a recovery probability was found. All but kMonteCarlo are exact up to rounding.
enum class RecoveryMethod : std::uint8_t {
  kProduct,             ///< disjoint sets
  kIntervals,           ///< runs of consecutive units in some order, or of a ring
  kInclusionExclusion,  ///< few sets
  kFrontier,            ///< unit by unit with the sets that have not been saved yet
  kEnumeration,         ///< every failure set looked at
  kComponents,          ///< parts that share no unit, solved by several of the above
  kMonteCarlo,          ///< drawn failure sets: an estimate
};

/// "product", "intervals", ...
std::string_view Name(RecoveryMethod method);

/// Probability that everything is still there after k of `units` failed, each set of k units being
/// equally likely.
struct RecoveryProbability {
  std::uint32_t units = 0;
  RecoveryMethod method = RecoveryMethod::kProduct;
  std::vector<double> survived;  ///< P(k), k = 0 .. min(units, RecoveryOptions::failures_max)
  std::vector<double> lost;      ///< 1 - P(k), without cancellation where the method is exact
  /// Number of survived failure sets of size k, where 64 bits hold them all and the method is
  /// exact.
  std::vector<std::uint64_t> survived_sets;
  std::vector<double> standard_error;  ///< by k; empty if exact; 0 where that k is exact
  /// Largest k with P(k) = 1: always exact. -1 if something is lost already.
  std::int64_t certain = 0;

  bool exact() const { return method != RecoveryMethod::kMonteCarlo; }
};

struct RecoveryOptions {
  std::uint32_t failures_max = 512;           ///< greatest k that is looked at
  std::uint64_t enumeration_max = 1'000'000;  ///< failure sets of one size that are looked at
  std::uint64_t frontier_max = 4096;          ///< states kept by kFrontier
  std::uint64_t samples = 20'000;             ///< of Monte Carlo, per k
  std::uint64_t seed = 0;
  /// Force a method; for tests and for --recovery. kInclusionExclusion, kFrontier, kEnumeration and
  /// kMonteCarlo only; what does not fit their limits falls to the automatic choice.
  std::optional<RecoveryMethod> force;
  StopCheck stop = {};  ///< ends the work early; the result is then undefined
};

/// Recovery of sets of which each must keep one live unit.
/// \param sets  an empty set means that something is lost already
/// \pre units >= 1
/// Local, pure. Source: docs/placement.md.
RecoveryProbability SolveRecovery(const std::vector<UnitSet>& sets, std::uint32_t units,
                                  const RecoveryOptions& options = {});

/// Recovery of one layer; units are live nodes, or racks that have one.
/// \pre placement fits cluster
RecoveryProbability LayerRecovery(const Placement& placement, const Cluster& cluster,
                                  std::uint32_t layer, FailureUnit unit = FailureUnit::kNode,
                                  const RecoveryOptions& options = {});

/// Recovery of the whole model: a failure set is survived if every layer survives it.
RecoveryProbability ModelRecovery(const Placement& placement, const Cluster& cluster,
                                  FailureUnit unit = FailureUnit::kNode,
                                  const RecoveryOptions& options = {});

/// Probability to survive when every unit fails with probability q, independently. More than
/// RecoveryOptions::failures_max failures count as not survived.
double SurvivalAt(const RecoveryProbability& recovery, double q);

}  // namespace shardwright::placement
