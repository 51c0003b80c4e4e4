// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Tokens per expert over time, prepared for sums over ranges of
/// iterations. Iterations that were never added have no tokens.
class TokenHistory {
 public:
  /// \error as ValidateExperts
  static Result<TokenHistory> Make(LayerExperts experts);

  /// Allows Add to merge the iterations up to `iteration` if there are too many counts. Ranges
  /// must then begin there or later, or at the first iteration.
  void MayMergeTo(std::uint64_t iteration) { merge_to_ = iteration; }

  /// Adds an iteration. Changes nothing on an error.
  /// \error kMismatch  counters of another shape (names layer and both numbers);
  ///        kBadInput  iteration not above the last one, or a sum that overflows 64 bits; kLimit
  Status Add(std::uint64_t iteration, const Counts& tokens);

  /// Forgets the iterations above `iteration`, because training repeats them after a recovery.
  void Truncate(std::uint64_t iteration);

  /// Returns the tokens of an expert in iterations after+1 .. last; 0 if there are none.
  /// \pre the expert exists
  std::uint64_t Between(std::size_t layer, std::size_t expert, std::uint64_t after,
                        std::uint64_t last) const;

  /// Returns the tokens of all experts of a layer in iterations after+1 .. last.
  std::uint64_t LayerBetween(std::size_t layer, std::uint64_t after, std::uint64_t last) const;

  const LayerExperts& experts() const { return experts_; }
  const std::vector<std::uint64_t>& iterations() const { return iterations_; }  ///< ascending
  /// Returns the first iteration that was added, even if it was merged; 0 if there is none.
  std::uint64_t first() const { return first_; }

 private:
  explicit TokenHistory(LayerExperts experts);
  /// Returns the number of added iterations that are at most `iteration`.
  std::size_t CountUpTo(std::uint64_t iteration) const;
  void Merge();

  LayerExperts experts_;
  std::vector<std::size_t> layer_first_;   // by layer: its first cell, then one past the last
  std::vector<std::uint64_t> iterations_;  // ascending
  std::uint64_t first_ = 0;
  std::uint64_t merge_to_ = 0;
  std::vector<std::uint64_t> sums_;  // [iteration + 1][cell]: tokens up to and including it
};

/// Iterations after+1 .. last.
struct IterationRange {
  std::uint64_t after = 0;
  std::uint64_t last = 0;

  bool operator==(const IterationRange&) const = default;
};

/// Cost of one fault.
struct FaultLoss {
  std::uint64_t resume = 0;          ///< X
  Counts lost;                       ///< [layer][expert]: tokens
  std::vector<std::uint64_t> layer;  ///< L(m, j): [layer]
};

/// Charges every lost iteration of an expert once: iterations that an earlier fault has charged,
/// and no later iteration has repeated, are not charged again. Plain data, part of a store's state.
struct LossLedger {
  std::vector<std::uint64_t> layer_lost;           ///< [layer]: sum of L(m, j) over the faults
  std::vector<std::uint64_t> resumes;              ///< X of each fault
  PerExpert<std::vector<IterationRange>> charged;  ///< [layer][expert]: ascending, disjoint

  /// Returns an empty ledger.
  static LossLedger Make(const LayerExperts& experts);

  /// Records a fault: training resumes at iteration X, and each expert is
  /// restored from its version v <= X. Its tokens of v+1 .. X are lost, less
  /// those charged before. Iterations above X are repeated, so they are not lost,
  /// and earlier charges above X are cancelled. Changes nothing on an error.
  /// \param version  [layer][expert]
  /// \error kMismatch  another shape; kBadInput  a version
  ///        above X (names layer and expert), or overflow
  /// Pure. Source: docs/pec-planning.md section 2.1.
  Result<FaultLoss> Charge(const TokenHistory& history, const Counts& version,
                           std::uint64_t resume);
};

/// Processed tokens of each layer, the reference for losses: [layer].
struct LayerTokens {
  std::vector<std::uint64_t> tokens;  ///< counts of a run, or their estimate at its end
  bool observed = false;              ///< true if all of them were counted
};

/// Returns the counts of a history up to and including an iteration.
/// Pure.
LayerTokens ObservedTokens(const TokenHistory& history, std::uint64_t last);

/// Extrapolates the counts of a history up to an iteration to a run of `run`
/// iterations, with the same number of tokens on average. For a finished
/// run, or 0 iterations (unknown), returns the same as ObservedTokens.
/// \error kBadInput  overflow
/// Pure.
Result<LayerTokens> TokensOfRun(const TokenHistory& history, std::uint64_t last, std::uint64_t run);

/// Lost tokens as fractions.
struct LossSummary {
  double plt = 0;      ///< mean over the layers that had tokens (eq 7)
  double mlt_sum = 0;  ///< MoEtion's MLT as printed: sum over the layers, may exceed 1
  double mlt_avg = 0;  ///< mlt_sum / M, M = number of layers with tokens: compare limits with it
  std::vector<double> layer;           ///< [layer]: 0 for layers without tokens
  std::vector<std::uint32_t> skipped;  ///< layers without tokens
  bool observed = false;               ///< as LayerTokens
};

/// \param lost  [layer]: sum of L(m, j) over the faults
/// \error kMismatch  wrong number of layers
/// Pure. Source: MoC-System eq 7, MoEtion eq 6; docs/pec-planning.md sections 2.2, 2.4.
Result<LossSummary> SummarizeLoss(const std::vector<std::uint64_t>& lost,
                                  const LayerTokens& processed);

/// The PLT above which accuracy suffers (MoC-System section 3.1).
inline constexpr double kPltLimit = 0.0375;

/// Unsaved tokens of the experts outside a selection, and of all experts.
struct TokensAtRisk {
  std::uint64_t at_risk = 0;
  std::uint64_t total = 0;

  double fraction() const {
    return total == 0 ? 0 : static_cast<double>(at_risk) / static_cast<double>(total);
  }
};

/// \param unsaved  [layer][expert]: tokens since each expert's last save
/// \error kBadInput  overflow; kMismatch, kBadInput  a selection of another model
/// Pure. Source: docs/pec-planning.md section 2.4.
Result<TokensAtRisk> RiskOf(const Counts& unsaved, const Selection& selection);

/// Returns the loss of one fault at a checkpoint in iterations' worth of tokens, with even
/// routing in a steady state: I * (p-1) * (1 - K*p/(2N)), p = ceil(N/K). K above N counts as N.
/// \error kUsage  n or k is 0
/// Pure. Source: docs/pec-planning.md section 2.3.
Result<double> SteadyLoss(std::uint32_t n, std::uint32_t k, double interval);

/// Computes it for two levels, where a fraction `lost_share` of the experts has lost
/// the upper: lost_share * loss(k_persist) + (1 - lost_share) * loss(k_snapshot).
/// \error kUsage  as SteadyLoss, or a fraction that is not in [0, 1]
/// Pure. Source: docs/pec-planning.md section 2.3.
Result<double> SteadyLossTwoLevels(std::uint32_t n, std::uint32_t k_snapshot,
                                   std::uint32_t k_persist, double interval, double lost_share);

/// Returns the PLT of `faults` faults in a run of `iterations`,
/// each of which loses `loss` iterations' worth of tokens.
/// \error kUsage  no iterations, or a negative number
/// Pure. Source: docs/pec-planning.md section 2.3.
Result<double> ExpectedPlt(double faults, double loss, double iterations);

}  // namespace shardwright::partial
