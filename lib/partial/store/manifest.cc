// SPDX-License-Identifier: Apache-2.0
#include "partial/store/manifest.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "engine/exec/manifest.h"
#include "partial/store/manifest_internal.h"
#include "support/base/version.h"

namespace shardwright::partial {
namespace {

using OrderedJson = nlohmann::ordered_json;

OrderedJson Head(std::string_view kind) {
  return {{"schema", kStoreSchema},
          {"program", "shardwright"},
          {"version", kVersion},
          {"kind", kind},
          {exec::kTextSum, exec::NoTextSum()}};
}

OrderedJson BlobJson(const BlobRef& blob) {
  OrderedJson out = {exec::Hex(blob.digest), blob.bytes, blob.crc32, exec::Hex(blob.head)};
  if (blob.zstd) out.push_back("zstd");
  return out;
}

OrderedJson LevelJson(const LevelState& level) {
  return {{"checkpoints", level.checkpoints}, {"cursor", level.cursor},
          {"tokens", level.tokens},           {"covered", level.covered},
          {"version", level.version},         {"saved_at", level.saved_at}};
}

OrderedJson StateJson(const SelectionState& state) {
  OrderedJson out = {
      {"snapshot", LevelJson(state.snapshot)},
      {"persist", LevelJson(state.persist)},
      {"counted_to", state.counted_to ? OrderedJson(*state.counted_to) : OrderedJson(nullptr)}};
  if (!state.dynamic_k) return out;
  const DynamicK& dynamic = *state.dynamic_k;
  out["dynamic_k"] = {{"experts", dynamic.experts}, {"k", dynamic.k},
                      {"levels", dynamic.levels},   {"limit", dynamic.limit},
                      {"spent", dynamic.spent},     {"total", dynamic.total},
                      {"predict", dynamic.predict}, {"iterations", dynamic.iterations}};
  return out;
}

OrderedJson LedgerJson(const LossLedger& ledger) {
  OrderedJson charged = OrderedJson::array();
  for (const auto& layer : ledger.charged) {
    OrderedJson experts = OrderedJson::array();
    for (const auto& ranges : layer) {
      OrderedJson list = OrderedJson::array();
      for (const IterationRange& range : ranges) list.push_back({range.after, range.last});
      experts.push_back(std::move(list));
    }
    charged.push_back(std::move(experts));
  }
  return {{"layer_lost", ledger.layer_lost},
          {"resumes", ledger.resumes},
          {"charged", std::move(charged)}};
}

}  // namespace

bool GivesUp(const RecoveryRecord& restore, std::uint64_t recovery, std::uint64_t iteration) {
  return restore.sequence > recovery && restore.resume < iteration;
}

std::string BegunText() { return exec::WithTextSum(Head(kBegunKind).dump() + "\n"); }

std::string ToText(const StoreHead& head) {
  OrderedJson out = Head(kStoreKind);
  out["fingerprint"] = exec::Hex(head.fingerprint);
  out["modules"] = head.modules;
  out["experts"] = head.experts;
  out["layer_id"] = head.layer_id;
  OrderedJson keep = OrderedJson::array();
  for (const Component component : kAllComponents) {
    if (head.keep[static_cast<std::size_t>(component)]) keep.push_back(Name(component));
  }
  out["keep"] = std::move(keep);
  if (!head.id.empty()) out["id"] = head.id;
  return exec::WithTextSum(out.dump(1) + "\n");
}

std::string ModuleLine(const std::string& name, const StoredModule& module) {
  // Without the JSON library, because this dominates saves of many small modules.
  std::string line = "{\"module\":" + OrderedJson(name).dump();
  for (const Component component : kAllComponents) {
    const auto& held = module[static_cast<std::size_t>(component)];
    if (!held) continue;
    const BlobRef& blob = held->blob;
    line.append(",\"").append(Name(component)).append("\":[");
    line.append(std::to_string(held->version)).append(",\"").append(exec::Hex(blob.digest));
    line.append("\",").append(std::to_string(blob.bytes)).append(",");
    line.append(std::to_string(blob.crc32)).append(",\"").append(exec::Hex(blob.head));
    line.append(blob.zstd ? "\",\"zstd\"]" : "\"]");
  }
  return line + "}";
}

std::string ToText(const Manifest& manifest, std::span<const std::string_view> lines) {
  OrderedJson out = Head(kManifestKind);
  out["sequence"] = manifest.sequence;
  out["parent"] = manifest.parent;
  out["iteration"] = manifest.iteration;
  out["tag"] = manifest.tag;
  out["policy"] = manifest.policy;
  out["k_snapshot"] = manifest.k_snapshot;
  out["k_persist"] = manifest.k_persist;
  if (!manifest.store.empty()) out["store"] = manifest.store;
  out["catalogue"] = exec::Hex(manifest.catalogue);
  out["passed"] = manifest.passed ? BlobJson(*manifest.passed) : OrderedJson(nullptr);
  out["state"] = StateJson(manifest.state);
  // One line per module keeps large manifests readable in a pager.
  std::string text = out.dump();
  text.back() = ',';
  text += kModulesBegin;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) text += kModulesNext;
    text += lines[i];
  }
  text += kModulesEnd;
  return exec::WithTextSum(std::move(text));
}

std::string ToText(const Manifest& manifest) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
    lines.push_back(ModuleLine(manifest.names[i], manifest.modules[i]));
  }
  const std::vector<std::string_view> views(lines.begin(), lines.end());
  return ToText(manifest, views);
}

std::string ToText(const TokenRecord& record) {
  OrderedJson out = Head(kTokensKind);
  if (record.sequence) out["sequence"] = *record.sequence;
  out["parent"] = record.parent;
  out["sums"] = OrderedJson::array();
  for (const TokenSum& sum : record.sums) {
    out["sums"].push_back({{"iteration", sum.iteration}, {"tokens", sum.tokens}});
  }
  return exec::WithTextSum(out.dump() + "\n");
}

std::string ToText(const RecoveryRecord& recovery) {
  OrderedJson out = Head(kRecoveryKind);
  out["sequence"] = recovery.sequence;
  out["manifest"] = recovery.manifest;
  out["resume"] = recovery.resume;
  out["abandoned"] = recovery.abandoned;
  out["state"] = StateJson(recovery.state);
  out["ledger"] = recovery.ledger ? LedgerJson(*recovery.ledger) : OrderedJson(nullptr);
  if (recovery.older) out["older"] = *recovery.older;
  return exec::WithTextSum(out.dump() + "\n");
}

}  // namespace shardwright::partial
