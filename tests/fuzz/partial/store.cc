// SPDX-License-Identifier: Apache-2.0
// Any bytes as the texts of a store: head, manifest, tokens, recovery. Accepted texts are written
// the same again. Then a save or a restore either works on them or returns an error.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "partial/select/lost_tokens.h"
#include "partial/select/selection.h"
#include "partial/store/dynamic_run.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"

namespace partial = shardwright::partial;
using shardwright::Errc;
using shardwright::Result;

namespace {

constexpr std::size_t kCells = 1 << 12;  // larger tables are slow, not different

template <class T>
bool Refused(const Result<T>& result) {
  if (result) return false;
  const Errc code = result.error().code;
  SW_CHECK(code == Errc::kBadInput || code == Errc::kUnsupported || code == Errc::kLimit);
  SW_CHECK(result.error().message.starts_with("input: "));
  return true;
}

std::size_t CellsOf(const partial::Counts& table) {
  std::size_t cells = 0;
  for (const auto& layer : table) cells += layer.size();
  return cells;
}

/// Performs the steps of a save on a selection state that was read.
void UseState(const partial::SelectionState& state) {
  const partial::LayerExperts experts = partial::ShapeOf(state.persist.tokens);
  const bool fits = partial::Validate(state.persist, experts).has_value();
  if (state.dynamic_k) {
    SW_CHECK(partial::Validate(*state.dynamic_k));
    partial::DynamicK next = *state.dynamic_k;
    if (fits && partial::CheckExperts(next, experts)) {
      partial::RaiseAhead(&next, partial::EvenFaultCost(experts, 10, 1000));
      SW_CHECK(next.k <= next.experts);
      const partial::DynamicKReport report = partial::ReportOf(next, experts, 10, 100);
      SW_CHECK(report.fault_plt.has_value());
    }
    SW_CHECK(partial::EnterRecovery(&next, 0.01));
    SW_CHECK(next.k >= state.dynamic_k->k && next.k <= next.experts);
  }
  if (!fits || CellsOf(state.persist.tokens) > kCells) return;
  partial::LevelState after = state.persist;
  const partial::Selection selection = partial::SelectLoadAware(after, 2);
  SW_CHECK(partial::Validate(selection, experts));
  // CompleteSave fails for a version above the iteration, for any text.
  (void)partial::CompleteSave(&after, partial::BeginSave(after, selection, 100));
}

void UseManifest(std::string_view text) {
  const auto manifest = partial::ParseManifest(text, "input");
  const auto split = partial::SplitManifest(std::string(text), "input");
  (void)Refused(split);
  if (Refused(manifest)) return;
  UseState(manifest->state);
  const std::string again = partial::ToText(*manifest);
  const auto same = partial::ParseManifest(again, "again");
  SW_CHECK(same.has_value());
  SW_CHECK(partial::ToText(*same) == again);
  if (manifest->modules.empty()) return;
  const auto lines = partial::SplitManifest(again, "again");
  SW_CHECK(lines.has_value());
  SW_CHECK(lines->lines.size() == manifest->modules.size());
  for (std::size_t i = 0; i < lines->lines.size(); ++i) {
    const auto module = partial::ParseModule(lines->lines[i], manifest->names[i], "again");
    SW_CHECK(module && *module == manifest->modules[i]);
  }
  SW_CHECK(partial::ToText(lines->head, lines->lines) == again);
}

void UseHead(std::string_view text) {
  const auto head = partial::ParseHead(text, "input");
  if (Refused(head)) return;
  const std::string again = partial::ToText(*head);
  const auto same = partial::ParseHead(again, "again");
  SW_CHECK(same && partial::ToText(*same) == again);
}

void UseTokens(std::string_view text) {
  const auto record = partial::ParseTokens(text, "input");
  if (Refused(record)) return;
  const std::string again = partial::ToText(*record);
  const auto same = partial::ParseTokens(again, "again");
  SW_CHECK(same && partial::ToText(*same) == again);
  if (record->sums.empty() || CellsOf(record->sums.front().tokens) > kCells) return;
  auto history = partial::TokenHistory::Make(partial::ShapeOf(record->sums.front().tokens));
  if (!history) return;
  std::uint64_t last = 0;
  for (const partial::TokenSum& sum : record->sums) {
    if (!history->Add(sum.iteration, sum.tokens)) break;
    last = sum.iteration;
  }
  (void)partial::TokensOfRun(*history, last, 1000);
}

void UseRecovery(std::string_view text) {
  const auto recovery = partial::ParseRecovery(text, "input");
  if (Refused(recovery)) return;
  UseState(recovery->state);
  const std::string again = partial::ToText(*recovery);
  const auto same = partial::ParseRecovery(again, "again");
  SW_CHECK(same && partial::ToText(*same) == again);
  const partial::Counts& tokens = recovery->state.persist.tokens;
  if (!recovery->ledger || CellsOf(tokens) > kCells) return;
  auto history = partial::TokenHistory::Make(partial::ShapeOf(tokens));
  if (!history || !history->Add(3, tokens)) return;
  partial::LossLedger ledger = *recovery->ledger;
  // A ledger of another shape or with overlapping ranges makes Charge fail or count, never crash.
  (void)ledger.Charge(*history, partial::MakeCounts(partial::ShapeOf(tokens), 1), 4);
}

/// A reader, and the word that a text must contain for this reader to get it.
struct Use {
  std::string_view kind;
  void (*use)(std::string_view text);
};
constexpr std::array<Use, 4> kUses = {{{"pec-store", UseHead},
                                       {"pec-manifest", UseManifest},
                                       {"pec-tokens", UseTokens},
                                       {"pec-recovery", UseRecovery}}};

}  // namespace

// Passes a text to the readers of the kind that it contains. The others would parse the same JSON
// and then fail, which takes most of the time. Still, one of eight goes to all of them.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  const bool to_all = size_bytes % 8 == 0;
  bool named = false;
  for (const Use& one : kUses) {
    if (!to_all && text.find(one.kind) == std::string_view::npos) continue;
    named = true;
    one.use(text);
  }
  if (!named) kUses[size_bytes % kUses.size()].use(text);
  return 0;
}
