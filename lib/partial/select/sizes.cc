// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sizes.h"

#include <algorithm>
#include <utility>

#include "support/base/checked.h"

namespace shardwright::partial {
Status AddTo(ComponentBytes* sum, const ComponentBytes& more) {
  SW_TRY_ASSIGN(sum->weights, CheckedAdd(sum->weights, more.weights));
  SW_TRY_ASSIGN(sum->master, CheckedAdd(sum->master, more.master));
  SW_TRY_ASSIGN(sum->moments, CheckedAdd(sum->moments, more.moments));
  return {};
}

ComponentBytes SavedBytes(const ComponentBytes& bytes, bool selected, const Keep& keep) {
  if (selected) return bytes;
  return {keep.weights ? bytes.weights : 0, keep.master ? bytes.master : 0,
          keep.moments ? bytes.moments : 0};
}

std::uint64_t KeptBytes(const ComponentBytes& bytes, const Keep& keep) {
  const ComponentBytes kept = SavedBytes(bytes, false, keep);
  return kept.weights + kept.master + kept.moments;
}

Result<std::uint64_t> TotalBytes(const ComponentBytes& bytes) {
  SW_TRY_ASSIGN(const std::uint64_t sum, CheckedAdd(bytes.weights, bytes.master));
  return CheckedAdd(sum, bytes.moments);
}

Result<ComponentBytes> BytesOfParams(std::uint64_t params, const ComponentBytes& per_param) {
  ComponentBytes bytes;
  SW_TRY_ASSIGN(bytes.weights, CheckedMul(params, per_param.weights));
  SW_TRY_ASSIGN(bytes.master, CheckedMul(params, per_param.master));
  SW_TRY_ASSIGN(bytes.moments, CheckedMul(params, per_param.moments));
  SW_TRY(TotalBytes(bytes));
  return bytes;
}

Result<CheckpointSize> SizeOfCheckpoint(const ModelBytes& model, const Selection& selection,
                                        const Keep& keep) {
  SW_TRY(Validate(selection, ShapeOf(model.expert)));
  CheckpointSize size;
  ComponentBytes all_experts;
  for (const ComponentBytes& module : model.nonexpert) SW_TRY(AddTo(&size.nonexpert, module));
  std::vector<bool> selected;
  for (std::size_t m = 0; m < model.expert.size(); ++m) {
    selected.assign(model.expert[m].size(), false);
    for (std::uint32_t e : selection[m]) selected[e] = true;
    for (std::size_t e = 0; e < selected.size(); ++e) {
      SW_TRY(AddTo(&size.expert, SavedBytes(model.expert[m][e], selected[e], keep)));
      SW_TRY(AddTo(&all_experts, model.expert[m][e]));
    }
  }
  SW_TRY_ASSIGN(const std::uint64_t nonexpert, TotalBytes(size.nonexpert));
  SW_TRY_ASSIGN(const std::uint64_t expert, TotalBytes(size.expert));
  SW_TRY_ASSIGN(const std::uint64_t experts, TotalBytes(all_experts));
  SW_TRY_ASSIGN(size.full_bytes, CheckedAdd(nonexpert, experts));
  size.bytes = nonexpert + expert;  // at most full_bytes, so it fits
  return size;
}

Result<CheckpointSize> SizeForK(const ModelBytes& model, std::uint32_t k, const Keep& keep) {
  Selection selection(model.expert.size());
  std::vector<std::string> warnings;
  for (std::size_t m = 0; m < model.expert.size(); ++m) {
    const std::vector<ComponentBytes>& layer = model.expert[m];
    const auto other = std::find_if(layer.begin(), layer.end(), [&](const ComponentBytes& bytes) {
      return !(bytes == layer.front());
    });
    if (other != layer.end()) {
      return Fail(Errc::kUsage, "MoE layer ", m, ": expert ", other - layer.begin(),
                  " and expert 0 differ in size, so K does not determine the size of a checkpoint");
    }
    if (k > layer.size()) {
      warnings.push_back(
          StrCat("MoE layer ", m, ": K = ", k, " is above its ", layer.size(), " experts"));
    }
    for (std::uint32_t e = 0; e < std::min<std::size_t>(k, layer.size()); ++e) {
      selection[m].push_back(e);
    }
  }
  SW_TRY_ASSIGN(CheckpointSize size, SizeOfCheckpoint(model, selection, keep));
  size.warnings = std::move(warnings);
  return size;
}

}  // namespace shardwright::partial
