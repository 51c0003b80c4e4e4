// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Tokens per expert over time, ready for sums over ranges of iterations. Iterations that were
/// never added had no tokens.
class TokenHistory {
 public:
  /// \error as ValidateExperts
  static Result<TokenHistory> Make(LayerExperts experts);

  /// Adds an iteration. Nothing changes on an error.
  /// \error kMismatch  counters of another shape: layer and both numbers; kBadInput  an iteration
  ///        that is not above the last one, or a sum that does not fit in 64 bits; kLimit
  Status Add(std::uint64_t iteration, const Counts& tokens);

  /// Forgets the iterations above `iteration`, for they are run again after a recovery.
  void Truncate(std::uint64_t iteration);

  /// Tokens of an expert in iterations after+1 .. last; 0 if there are none.
  /// \pre the expert exists
  std::uint64_t Between(std::size_t layer, std::size_t expert, std::uint64_t after,
                        std::uint64_t last) const;

  /// Tokens of all experts of a layer in iterations after+1 .. last.
  std::uint64_t LayerBetween(std::size_t layer, std::uint64_t after, std::uint64_t last) const;

  const LayerExperts& experts() const { return experts_; }
  const std::vector<std::uint64_t>& iterations() const { return iterations_; }  ///< ascending

 private:
  explicit TokenHistory(LayerExperts experts);
  /// Iterations that are at most `iteration`.
  std::size_t CountUpTo(std::uint64_t iteration) const;

  LayerExperts experts_;
  std::vector<std::size_t> layer_first_;   // by layer: its first cell; one past the last
  std::vector<std::uint64_t> iterations_;  // ascending
  std::vector<std::uint64_t> sums_;        // [iteration + 1][cell]: tokens up to and with it
};

/// Iterations after+1 .. last.
struct IterationRange {
  std::uint64_t after = 0;
  std::uint64_t last = 0;

  bool operator==(const IterationRange&) const = default;
};

/// What one fault cost.
struct FaultLoss {
  std::uint64_t resume = 0;          ///< X
  Counts lost;                       ///< [layer][expert]: tokens
  std::vector<std::uint64_t> layer;  ///< L(m, j): [layer]
};

/// Charges every lost iteration of an expert once: what an earlier fault has charged and no later
/// iteration made good is not charged again. Plain data: a store keeps it and gives it back.
struct LossLedger {
  std::vector<std::uint64_t> layer_lost;           ///< [layer]: sum of L(m, j) over the faults
  std::vector<std::uint64_t> resumes;              ///< X of each fault
  PerExpert<std::vector<IterationRange>> charged;  ///< [layer][expert]: ascending, disjoint

  /// An empty ledger.
  static LossLedger Make(const LayerExperts& experts);

  /// Enters a fault: training resumes at iteration X, and each expert is restored from its version
  /// v <= X. Its tokens of v+1 .. X are lost, less those charged before. Iterations above X are run
  /// again: they are not lost, and nothing charged above X stays charged. Nothing changes on an
  /// error.
  /// \param version  [layer][expert]
  /// \error kMismatch  another shape; kBadInput  a version above X: names layer and expert, or an
  ///        overflow
  /// Pure. Source: docs/pec-planning.md section 2.1.
  Result<FaultLoss> Charge(const TokenHistory& history, const Counts& version,
                           std::uint64_t resume);
};

/// What the tokens of a layer are compared with: [layer].
struct LayerTokens {
  std::vector<std::uint64_t> tokens;  ///< counts of a run, or what they will be at its end
  bool observed = false;              ///< whether all of them were counted
};

/// The counts of a history up to and with an iteration.
/// Pure.
LayerTokens ObservedTokens(const TokenHistory& history, std::uint64_t last);

/// The counts of a history up to and with an iteration, as they will be after `run` iterations if
/// the others have as many tokens on average. A run that is over, or of 0 iterations (not known):
/// as ObservedTokens.
/// \error kBadInput  overflow
/// Pure.
Result<LayerTokens> TokensOfRun(const TokenHistory& history, std::uint64_t last, std::uint64_t run);

/// Lost tokens as fractions.
struct LossSummary {
  double plt = 0;      ///< mean over the layers that had tokens (eq 7)
  double mlt_sum = 0;  ///< MoEtion's MLT as printed: the sum over the layers, which may exceed 1
  double mlt_avg = 0;  ///< mlt_sum / M, M the layers that had tokens: compare limits with this one
  std::vector<double> layer;           ///< [layer]: 0 where there were no tokens
  std::vector<std::uint32_t> skipped;  ///< layers without tokens
  bool observed = false;               ///< as LayerTokens
};

/// \param lost  [layer]: sum of L(m, j) over the faults
/// \error kMismatch  another number of layers
/// Pure. Source: MoC-System eq 7, MoEtion eq 6; docs/pec-planning.md sections 2.2, 2.4.
Result<LossSummary> SummarizeLoss(const std::vector<std::uint64_t>& lost,
                                  const LayerTokens& processed);

/// The PLT above which accuracy suffers (MoC-System section 3.1).
inline constexpr double kPltLimit = 0.0375;

/// Unsaved tokens of the experts that a selection leaves out, and of all.
struct TokensAtRisk {
  std::uint64_t at_risk = 0;
  std::uint64_t total = 0;

  double fraction() const {
    return total == 0 ? 0 : static_cast<double>(at_risk) / static_cast<double>(total);
  }
};

/// \param unsaved  [layer][expert]: tokens since each expert's last save
/// \error kBadInput  overflow; kMismatch, kBadInput  a selection that does not fit
/// Pure. Source: docs/pec-planning.md section 2.4.
Result<TokensAtRisk> RiskOf(const Counts& unsaved, const Selection& selection);

/// Iterations' worth of tokens that one fault at a checkpoint loses, with even routing and in a
/// steady state: I * (p-1) * (1 - K*p/(2N)), p = ceil(N/K). K is taken as at most N.
/// \error kUsage  n or k is 0
/// Pure. Source: docs/pec-planning.md section 2.3.
Result<double> SteadyLoss(std::uint32_t n, std::uint32_t k, double interval);

/// The same with two levels, of which a fraction `lost_share` of the experts has lost the upper:
/// lost_share * loss(k_persist) + (1 - lost_share) * loss(k_snapshot).
/// \error kUsage  as SteadyLoss, or a fraction that is not in [0, 1]
/// Pure. Source: docs/pec-planning.md section 2.3.
Result<double> SteadyLossTwoLevels(std::uint32_t n, std::uint32_t k_snapshot,
                                   std::uint32_t k_persist, double interval, double lost_share);

/// PLT of `faults` faults that lose `loss` iterations' worth of tokens each, in a run of
/// `iterations`.
/// \error kUsage  no iterations, or a negative number
/// Pure. Source: docs/pec-planning.md section 2.3.
Result<double> ExpectedPlt(double faults, double loss, double iterations);

}  // namespace shardwright::partial
