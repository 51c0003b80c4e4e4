// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/dcp/parts_internal.h"
#include "checkpoints/dcp/reader_internal.h"
#include "checkpoints/pickled/weight_sets.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {

using shardwright::dcp::Entry;

/// Chooses one model. Accelerate numbers models and gives an optimizer its model's number.
Status FolderReader::ChooseFolders() {
  std::vector<WeightCandidate> candidates;
  std::size_t optimizers = 0;
  for (const Folder& folder : folders_) {
    const std::string_view name = folder.StemName();
    if (IsOptimizerFolder(name)) ++optimizers;
    if (!IsModelFolder(name)) continue;
    WeightCandidate one;
    one.name = name;
    for (const Entry& entry : folder.index.entries) {
      one.tensors += entry.is_tensor ? 1 : 0;
      if (entry.is_tensor) one.bytes += Elems(entry.shape) * ItemSize(entry.dtype);
    }
    candidates.push_back(std::move(one));
  }
  if (candidates.size() < 2 && optimizers < 2) return {};
  const auto number_of = [](std::string_view name) { return name.substr(name.rfind('_') + 1); };
  for (WeightCandidate& one : candidates) {
    const bool trained = std::any_of(folders_.begin(), folders_.end(), [&](const Folder& folder) {
      return IsOptimizerFolder(folder.StemName()) &&
             number_of(folder.StemName()) == number_of(one.name);
    });
    one.matches = trained || optimizers == 0 ? 1 : 0;
  }
  if (candidates.empty()) {
    return Fail(Errc::kUnsupported, source_.tag, ": several optimizers and no model");
  }
  std::size_t taken = 0;
  if (source_.weights_of.empty()) {
    SW_TRY_ASSIGN(taken, ChooseWeights(candidates, optimizers > 0));
  } else {
    SW_TRY_ASSIGN(taken, FindWeights(candidates, source_.weights_of));
  }
  folders_chosen_ = true;
  out_.weight_sets = WeightSetsOf(candidates, taken);
  const std::string number(number_of(candidates[taken].name));
  std::erase_if(folders_, [&](const Folder& folder) {
    const std::string name(folder.StemName());
    if (number_of(name) == number) return false;
    out_.left_out.push_back((IsModelFolder(name) ? "the weights in " : "the optimizer in ") + name);
    return true;
  });
  return {};
}

/// Records the checkpoint's sets of weights, and adds a message if there are several.
void FolderReader::TakeSets(std::vector<WeightSet> sets, bool chosen_by_name) {
  if (out_.weight_sets.size() < 2 || sets.size() > 1) out_.weight_sets = std::move(sets);
  const std::string message = WeightSetsMessage(out_.weight_sets);
  if (!message.empty()) out_.warnings.push_back(message);
  own_->sets = out_.weight_sets;
  others_left_out_ = chosen_by_name;
  if (!chosen_by_name) return;
  for (const WeightSet& set : out_.weight_sets) {
    if (!set.taken) out_.left_out.push_back(WeightSetText(set));
  }
  if (!kept_.empty()) {
    out_.warnings.push_back("--weights-of selects " + Quoted(out_.weight_sets.front().name) +
                            ", but the optimizer's state belongs to other weights; it is "
                            "converted together with the selected weights");
  }
}

/// Warns about parameters that only the optimizer has. The model
/// stores fused projections as several tensors of one module.
void FolderReader::WarnOfUnmatched() {
  const auto module_of = [](std::string_view name) {  // without its last two parts: "wqkv.weight"
    for (int i = 0; i < 2; ++i) {
      const std::size_t dot = name.rfind('.');
      name = dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
    }
    return name;
  };
  std::map<std::string_view, std::size_t> loose;  // number of model tensors without state
  for (const Param& param : out_.params) {
    if (!kept_.contains(param.name)) ++loose[module_of(param.name)];
  }
  bool fused = true;
  std::vector<std::string> names;
  for (const Param& param : out_.fused) {
    names.push_back(param.name);
    const auto found = loose.find(module_of(param.name));
    fused = fused && found != loose.end() && found->second > 1;
  }
  out_.optimizer_warnings.push_back(
      fused ? "the optimizer has parameters that the model saves in parts under other "
              "names, such as fused projections; only --format " +
                  std::string(kName) +
                  " keeps their states, unless --map torchtitan_qkv:split or a map of the "
                  "model's family splits them: " +
                  FirstFew(names)
            : "the optimizer has parameters that the model lacks: " + FirstFew(names) +
                  "; only --format " + std::string(kName) + " keeps their states");
}

}  // namespace shardwright::checkpoints::dcp
