// SPDX-License-Identifier: Apache-2.0
#include "partial/select/lost_tokens.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

__extension__ using Wide = unsigned __int128;

/// Returns the tokens of after+1 .. resume that `charged` lacks,
/// and adds them to it. Removes everything above `resume` from it.
std::uint64_t ChargeExpert(const TokenHistory& history, std::size_t layer, std::size_t expert,
                           std::uint64_t version, std::uint64_t resume,
                           std::vector<IterationRange>* charged) {
  std::uint64_t lost = history.Between(layer, expert, version, resume);
  std::uint64_t after = version;  // begin of the range that this fault charges
  std::vector<IterationRange> kept;
  for (const IterationRange& range : *charged) {
    const std::uint64_t last = std::min(range.last, resume);
    if (range.after >= last) continue;
    if (last <= version) {
      kept.push_back({range.after, last});
      continue;
    }
    lost -= history.Between(layer, expert, std::max(range.after, version), last);
    after = std::min(after, range.after);
  }
  if (version < resume) kept.push_back({after, resume});
  *charged = std::move(kept);
  return lost;
}

Status ValidateVersions(const Counts& version, std::uint64_t resume) {
  for (std::size_t m = 0; m < version.size(); ++m) {
    for (std::size_t e = 0; e < version[m].size(); ++e) {
      if (version[m][e] <= resume) continue;
      const ModuleId id{static_cast<std::int32_t>(m), static_cast<std::int32_t>(e)};
      return Fail(Errc::kBadInput, Name(id), ": version ", version[m][e],
                  " is newer than the resume point ", resume);
    }
  }
  return {};
}

}  // namespace

LossLedger LossLedger::Make(const LayerExperts& experts) {
  LossLedger ledger;
  ledger.layer_lost.assign(experts.size(), 0);
  for (std::uint32_t n : experts) ledger.charged.emplace_back(n);
  return ledger;
}

Result<FaultLoss> LossLedger::Charge(const TokenHistory& history, const Counts& version,
                                     std::uint64_t resume) {
  const LayerExperts& experts = history.experts();
  SW_TRY(ValidateShape(version, experts, "restored versions"));
  if (ShapeOf(charged) != experts || layer_lost.size() != experts.size()) {
    return Fail(Errc::kMismatch, "the ledger of lost tokens has ", charged.size(),
                " MoE layers, the token history has ", experts.size(),
                ": expected the same layers and experts in both");
  }
  SW_TRY(ValidateVersions(version, resume));
  FaultLoss loss{resume, MakeCounts(experts), std::vector<std::uint64_t>(experts.size(), 0)};
  LossLedger next = *this;
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::size_t e = 0; e < experts[m]; ++e) {
      const std::uint64_t lost =
          ChargeExpert(history, m, e, version[m][e], resume, &next.charged[m][e]);
      loss.lost[m][e] = lost;
      loss.layer[m] += lost;  // at most the layer's tokens, which fit
    }
    SW_TRY_ASSIGN(next.layer_lost[m], CheckedAdd(layer_lost[m], loss.layer[m]));
  }
  next.resumes.push_back(resume);
  *this = std::move(next);
  return loss;
}

LayerTokens ObservedTokens(const TokenHistory& history, std::uint64_t last) {
  LayerTokens processed;
  processed.observed = true;
  for (std::size_t m = 0; m < history.experts().size(); ++m) {
    processed.tokens.push_back(history.LayerBetween(m, 0, last));
  }
  return processed;
}

Result<LayerTokens> TokensOfRun(const TokenHistory& history, std::uint64_t last,
                                std::uint64_t run) {
  LayerTokens processed = ObservedTokens(history, last);
  if (history.first() == 0 || history.first() > last) return processed;
  const std::uint64_t counted = last - history.first() + 1;
  if (run <= counted) return processed;
  processed.observed = false;
  for (std::uint64_t& tokens : processed.tokens) {
    const Wide scaled = Wide{tokens} * run / counted;
    if (scaled > std::numeric_limits<std::uint64_t>::max()) {
      return Fail(Errc::kBadInput, tokens, " tokens in ", counted, " iterations: the tokens of ",
                  run, " iterations overflow 64 bits");
    }
    tokens = static_cast<std::uint64_t>(scaled);
  }
  return processed;
}

Result<LossSummary> SummarizeLoss(const std::vector<std::uint64_t>& lost,
                                  const LayerTokens& processed) {
  if (lost.size() != processed.tokens.size()) {
    return Fail(Errc::kMismatch, "lost tokens of ", lost.size(),
                " MoE layers, processed tokens of ", processed.tokens.size(),
                ": expected the same layers in both");
  }
  LossSummary summary;
  summary.observed = processed.observed;
  for (std::size_t m = 0; m < lost.size(); ++m) {
    const bool skip = processed.tokens[m] == 0;
    if (skip) summary.skipped.push_back(static_cast<std::uint32_t>(m));
    summary.layer.push_back(
        skip ? 0 : static_cast<double>(lost[m]) / static_cast<double>(processed.tokens[m]));
    summary.mlt_sum += summary.layer.back();
  }
  const std::size_t layers = lost.size() - summary.skipped.size();
  if (layers > 0) summary.mlt_avg = summary.mlt_sum / static_cast<double>(layers);
  summary.plt = summary.mlt_avg;
  return summary;
}

Result<TokensAtRisk> RiskOf(const Counts& unsaved, const Selection& selection) {
  SW_TRY(Validate(selection, ShapeOf(unsaved)));
  TokensAtRisk risk;
  for (std::size_t m = 0; m < unsaved.size(); ++m) {
    for (std::uint64_t tokens : unsaved[m]) {
      SW_TRY_ASSIGN(risk.total, CheckedAdd(risk.total, tokens));
    }
  }
  risk.at_risk = risk.total;
  for (std::size_t m = 0; m < selection.size(); ++m) {
    for (std::uint32_t e : selection[m]) risk.at_risk -= unsaved[m][e];
  }
  return risk;
}

Result<double> SteadyLoss(std::uint32_t n, std::uint32_t k, double interval) {
  if (n == 0 || k == 0) {
    return Fail(Errc::kUsage, "K = ", k, " of N = ", n, " experts: both must be at least 1");
  }
  const double experts = n;
  const double saved = std::min(n, k);
  const double turns = std::ceil(experts / saved);
  return interval * (turns - 1) * (1 - saved * turns / (2 * experts));
}

Result<double> SteadyLossTwoLevels(std::uint32_t n, std::uint32_t k_snapshot,
                                   std::uint32_t k_persist, double interval, double lost_share) {
  if (!(lost_share >= 0 && lost_share <= 1)) {
    return Fail(Errc::kUsage, "the share of experts that lose their memory copies is ", lost_share,
                ", expected 0 to 1");
  }
  SW_TRY_ASSIGN(const double storage, SteadyLoss(n, k_persist, interval));
  SW_TRY_ASSIGN(const double memory, SteadyLoss(n, k_snapshot, interval));
  return lost_share * storage + (1 - lost_share) * memory;
}

Result<double> ExpectedPlt(double faults, double loss, double iterations) {
  if (!(faults >= 0) || !(loss >= 0) || !(iterations > 0)) {
    return Fail(Errc::kUsage, "the expected PLT of ", faults, " faults that lose ", loss,
                " iterations each, in a run of ", iterations,
                " iterations, is undefined: expected numbers from 0 and a positive length");
  }
  return faults * loss / iterations;
}

}  // namespace shardwright::partial
