// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sharding/saved_model.h"

#include <string>
#include <utility>

#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

/// Splits a module's bytes into those to divide, and those that ZeRO has sharded.
Result<ExpertBytes> PartsOf(const ComponentBytes& bytes, std::uint32_t zero_stage) {
  SW_TRY_ASSIGN(const std::uint64_t total, TotalBytes(bytes));
  switch (zero_stage) {
    case 0:
      return ExpertBytes{total, 0};
    case 3:
      return ExpertBytes{0, total};
    default:
      return ExpertBytes{bytes.weights, total - bytes.weights};
  }
}

/// Returns the components that are not kept.
ComponentBytes SelectedOf(const ComponentBytes& bytes, const Keep& keep) {
  return {keep.weights ? 0 : bytes.weights, keep.master ? 0 : bytes.master,
          keep.moments ? 0 : bytes.moments};
}

}  // namespace

Result<SavedModel> SavedModelOf(const ModelBytes& model, const Keep& keep, ExpertMap map,
                                SaveRanks ranks, std::uint32_t zero_stage) {
  if (zero_stage > 3) {
    return Fail(Errc::kUsage, "ZeRO stage ", zero_stage, ", expected 0 to 3");
  }
  if (ShapeOf(model.expert) != map.experts()) {
    return Fail(Errc::kMismatch, "the expert sizes are for ", model.expert.size(),
                " MoE layers, the expert map has ", map.experts().size(),
                ": expected the same layers and experts in both");
  }
  SavedModel saved;
  saved.map = std::move(map);
  saved.ranks = std::move(ranks);
  for (const ComponentBytes& module : model.nonexpert) {
    SW_TRY_ASSIGN(const ExpertBytes parts, PartsOf(module, zero_stage));
    saved.nonexpert_bytes.push_back(parts.cut);
    SW_TRY_ASSIGN(saved.options.nonexpert_split,
                  CheckedAdd(saved.options.nonexpert_split, parts.split));
  }
  for (const auto& layer : model.expert) {
    auto& selected = saved.expert_bytes.emplace_back();
    auto& kept = saved.kept_bytes.emplace_back();
    for (const ComponentBytes& expert : layer) {
      SW_TRY(TotalBytes(expert));
      SW_TRY_ASSIGN(const ExpertBytes parts, PartsOf(SelectedOf(expert, keep), zero_stage));
      selected.push_back(parts);
      kept.push_back(KeptBytes(expert, keep));
    }
  }
  return saved;
}

}  // namespace shardwright::partial
