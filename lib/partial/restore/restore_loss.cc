// SPDX-License-Identifier: Apache-2.0
// Tokens that a restore loses, and the counters with which selection continues.

#include <algorithm>
#include <utility>

#include "partial/restore/restore_internal.h"
#include "partial/store/dynamic_run.h"
#include "partial/store/token_log.h"

namespace shardwright::partial::restore {
namespace {

/// Returns the counters of the restored checkpoint, or those after the last restore of it.
/// \param last  last recovery of the store
Result<SelectionState> StateAt(const Base& base, const Chosen& chosen,
                               const std::optional<RecoveryRecord>& last) {
  const bool again = last && chosen.at.sequence != 0 && last->manifest == chosen.at.sequence;
  SelectionState state = again ? last->state : chosen.at.state;
  SW_TRY(Validate(state.persist, chosen.described.model.experts));
  // Losses that were charged after the restored checkpoint stay charged.
  SW_TRY_ASSIGN(state.dynamic_k, NewestDynamicK(base.store, base.all, last));
  return state;
}

/// Resets the counters to experts of these versions.
/// \param history  absent: tokens were not counted
SelectionState GoBack(SelectionState state, const Counts& versions,
                      const std::optional<TokenHistory>& history) {
  for (std::size_t m = 0; m < versions.size(); ++m) {
    for (std::size_t e = 0; e < versions[m].size(); ++e) {
      std::uint64_t& held = state.persist.version[m][e];
      if (versions[m][e] >= held) continue;
      // Older than the level's version: tokens in between are unsaved again.
      const std::uint64_t between = history ? history->Between(m, e, versions[m][e], held) : 0;
      state.persist.covered[m][e] -= std::min(between, state.persist.covered[m][e]);
      held = versions[m][e];
    }
  }
  // Memory has only the restored state, so its level continues from
  // storage. Its cursors stay, so that the rotation continues.
  std::vector<std::uint64_t> cursor = std::move(state.snapshot.cursor);
  state.snapshot = state.persist;
  state.snapshot.cursor = std::move(cursor);
  return state;
}

/// Charges the lost tokens to the ledger, and removes them from both levels.
Status Charge(const RecoveryPlan& plan, const TokenHistory& history, const Counts& versions,
              Loss* out) {
  if (!out->ledger) out->ledger = LossLedger::Make(history.experts());
  RestoreLoss loss;
  SW_TRY_ASSIGN(loss.fault, out->ledger->Charge(history, versions, plan.resume));
  const std::uint64_t run = out->state.dynamic_k ? out->state.dynamic_k->iterations : 0;
  SW_TRY_ASSIGN(const LayerTokens tokens, TokensOfRun(history, plan.resume, run));
  SW_TRY_ASSIGN(loss.run, SummarizeLoss(out->ledger->layer_lost, tokens));
  SW_TRY_ASSIGN(const LossSummary now, SummarizeLoss(loss.fault.layer, tokens));
  loss.plt = now.plt;
  loss.faults = out->ledger->resumes.size();
  SW_TRY(ForgetLost(&out->state.persist, loss.fault.lost));
  SW_TRY(ForgetLost(&out->state.snapshot, loss.fault.lost));
  out->loss = std::move(loss);
  return {};
}

/// Charges the recovery to the budget of dynamic K. The record of this recovery
/// stores the state, so it counts once, and only if training resumes from here.
Status Spend(const Base& base, const Chosen& chosen, Loss* out) {
  if (!out->state.dynamic_k) return {};
  const LayerExperts& experts = chosen.described.model.experts;
  SW_TRY(CheckExperts(*out->state.dynamic_k, experts));
  if (out->loss) {
    SW_TRY(EnterRecovery(&*out->state.dynamic_k, out->loss->plt));
  } else {
    out->unknown_spent = true;
  }
  const std::uint64_t interval = IntervalBefore(base.all, chosen.at.iteration);
  out->dynamic_k = ReportOf(*out->state.dynamic_k, experts, interval, chosen.at.iteration);
  return {};
}

}  // namespace

Result<Loss> CountLoss(const Base& base, const Chosen& chosen) {
  Loss out;
  const LayerExperts& experts = chosen.described.model.experts;
  if (experts.empty()) return out;
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, base.store.LastRecovery());
  SW_TRY_ASSIGN(SelectionState state, StateAt(base, chosen, last));
  SW_TRY_ASSIGN(const Counts versions, ExpertVersions(chosen.plan, experts));
  std::optional<TokenHistory> history;
  if (state.counted_to) {
    const std::uint64_t oldest = OldestVersion(versions, chosen.at.iteration);
    SW_TRY_ASSIGN(history, ReadHistory(base.store, chosen.at.sequence, oldest));
  }
  out.state = GoBack(std::move(state), versions, history);
  if (last) out.ledger = last->ledger;
  if (history) SW_TRY(Charge(chosen.plan, *history, versions, &out));
  SW_TRY(Spend(base, chosen, &out));
  return out;
}

}  // namespace shardwright::partial::restore
