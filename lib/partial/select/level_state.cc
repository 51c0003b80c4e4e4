// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>

#include "partial/select/selection.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

/// Checks that a save fits the state that will record it.
Status ValidateSave(const LevelState& state, const PendingSave& save) {
  SW_TRY(Validate(save.selected, ShapeOf(state.tokens)));
  SW_TRY(ValidateShape(save.covered, ShapeOf(save.selected), "tokens of the save"));
  for (std::size_t m = 0; m < save.selected.size(); ++m) {
    for (std::size_t i = 0; i < save.selected[m].size(); ++i) {
      const std::uint32_t e = save.selected[m][i];
      if (save.iteration < state.version[m][e]) {
        return Fail(Errc::kBadInput, ExpertName(m, e), ": a save of iteration ", save.iteration,
                    " cannot replace version ", state.version[m][e]);
      }
      if (save.covered[m][i] > state.tokens[m][e]) {
        return Fail(Errc::kBadInput, ExpertName(m, e), ": the save covers ", save.covered[m][i],
                    " tokens, but only ", state.tokens[m][e], " were counted");
      }
    }
  }
  return {};
}

}  // namespace

LevelState MakeLevelState(const LayerExperts& experts, std::uint32_t k) {
  LevelState state;
  state.cursor.reserve(experts.size());
  for (std::size_t m = 0; m < experts.size(); ++m) state.cursor.push_back(std::uint64_t{k} * m);
  state.tokens = MakeCounts(experts);
  state.covered = state.tokens;
  state.version = state.tokens;
  state.saved_at = state.tokens;
  return state;
}

Status Validate(const LevelState& state, const LayerExperts& experts) {
  SW_TRY(ValidateExperts(experts));
  if (state.cursor.size() != experts.size()) {
    return Fail(Errc::kMismatch, state.cursor.size(),
                " selection cursors, expected one for each of ", experts.size(), " MoE layers");
  }
  SW_TRY(ValidateShape(state.tokens, experts, "tokens counted"));
  SW_TRY(ValidateShape(state.covered, experts, "tokens covered"));
  SW_TRY(ValidateShape(state.version, experts, "versions"));
  SW_TRY(ValidateShape(state.saved_at, experts, "last saves"));
  for (std::size_t m = 0; m < experts.size(); ++m) {
    for (std::size_t e = 0; e < experts[m]; ++e) {
      if (state.covered[m][e] > state.tokens[m][e]) {
        return Fail(Errc::kBadInput, ExpertName(m, e), ": ", state.covered[m][e],
                    " tokens are covered by its version, but only ", state.tokens[m][e],
                    " were counted");
      }
      if (state.saved_at[m][e] > state.checkpoints) {
        return Fail(Errc::kBadInput, ExpertName(m, e), ": last saved by checkpoint ",
                    state.saved_at[m][e], ", but there were only ", state.checkpoints,
                    " checkpoints");
      }
    }
  }
  return {};
}

Status CountTokens(LevelState* state, const Counts& tokens) {
  SW_TRY(ValidateShape(tokens, ShapeOf(state->tokens), "token counters"));
  Counts sums = state->tokens;
  for (std::size_t m = 0; m < tokens.size(); ++m) {
    for (std::size_t e = 0; e < tokens[m].size(); ++e) {
      SW_TRY_ASSIGN(sums[m][e], CheckedAdd(sums[m][e], tokens[m][e]));
    }
  }
  state->tokens = std::move(sums);
  return {};
}

Counts Unsaved(const LevelState& state) {
  Counts unsaved = state.tokens;
  for (std::size_t m = 0; m < unsaved.size(); ++m) {
    for (std::size_t e = 0; e < unsaved[m].size(); ++e) unsaved[m][e] = state.unsaved(m, e);
  }
  return unsaved;
}

PendingSave BeginSave(const LevelState& state, Selection selected, std::uint64_t iteration) {
  PendingSave save{iteration, std::move(selected), {}};
  save.covered.resize(save.selected.size());
  for (std::size_t m = 0; m < save.selected.size(); ++m) {
    for (std::uint32_t e : save.selected[m]) save.covered[m].push_back(state.tokens[m][e]);
  }
  return save;
}

Status CompleteSave(LevelState* state, const PendingSave& save) {
  SW_TRY(ValidateSave(*state, save));
  ++state->checkpoints;
  for (std::size_t m = 0; m < save.selected.size(); ++m) {
    for (std::size_t i = 0; i < save.selected[m].size(); ++i) {
      const std::uint32_t e = save.selected[m][i];
      state->version[m][e] = save.iteration;
      state->saved_at[m][e] = state->checkpoints;
      state->covered[m][e] = save.covered[m][i];
    }
    state->cursor[m] += save.selected[m].size();
  }
  return {};
}

Status ForgetLost(LevelState* state, const Counts& lost) {
  SW_TRY(ValidateShape(lost, ShapeOf(state->tokens), "lost tokens"));
  for (std::size_t m = 0; m < lost.size(); ++m) {
    for (std::size_t e = 0; e < lost[m].size(); ++e) {
      if (lost[m][e] > state->unsaved(m, e)) {
        return Fail(Errc::kBadInput, ExpertName(m, e), ": ", lost[m][e], " tokens lost, only ",
                    state->unsaved(m, e), " were unsaved");
      }
    }
  }
  for (std::size_t m = 0; m < lost.size(); ++m) {
    for (std::size_t e = 0; e < lost[m].size(); ++e) state->tokens[m][e] -= lost[m][e];
  }
  return {};
}

}  // namespace shardwright::partial
