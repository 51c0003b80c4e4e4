// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>

#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"

// Most optimizer states are tensors of their parameter's shape, which any number of
// ranks can partition, or one number for all ranks. This file handles the others.

namespace shardwright::checkpoints::reader {
namespace {

enum class Stages : std::uint8_t { kAll, kOneAndTwo };

/// A state or option known by its name. It counts only if one
/// group's options contain `option` (empty: any optimizer).
struct KnownState {
  std::string_view state;
  std::string_view option;
  StateHandling handling;
  std::string_view optimizer;
  std::string_view what;
  Stages stages = Stages::kAll;
};

constexpr std::string_view kEightBit = "bitsandbytes 8-bit optimizer";
constexpr std::string_view kBlock = "8-bit values of a partition are scaled by block";
constexpr std::string_view kFactors = "one factor for each row or column of a matrix";
constexpr std::string_view kSliced = "every slice_p-th element of a partition";
constexpr std::string_view kStepSize = "each rank computes the step size of its own partition";

constexpr std::array<KnownState, 16> kKnown = {{
    {"RMS", "clip_threshold", StateHandling::kLeftOut, "Adafactor", "computed again at each step"},
    {"exp_avg_sq_row", "", StateHandling::kBound, "Adafactor", kFactors},
    {"exp_avg_sq_col", "", StateHandling::kBound, "Adafactor", kFactors},
    {"row_var", "", StateHandling::kBound, "torch.optim.Adafactor", kFactors},
    {"col_var", "", StateHandling::kBound, "torch.optim.Adafactor", kFactors},
    {"absmax1", "", StateHandling::kBound, kEightBit, kBlock},
    {"absmax2", "", StateHandling::kBound, kEightBit, kBlock},
    {"qmap1", "", StateHandling::kBound, kEightBit, kBlock},
    {"qmap2", "", StateHandling::kBound, kEightBit, kBlock},
    {"s", "slice_p", StateHandling::kBound, "Prodigy", kSliced},
    {"p0", "slice_p", StateHandling::kBound, "Prodigy", kSliced},
    {"d", "growth_rate", StateHandling::kCut, "Prodigy", kStepSize},
    {"d_numerator", "growth_rate", StateHandling::kCut, "Prodigy", kStepSize},
    {"state1", "", StateHandling::kCut, "bitsandbytes AdEMAMix stacks two moments", ""},
    {"unorm_vec", "", StateHandling::kCut, "bitsandbytes LAMB and LARS", "the norm of an update"},
    {"momentum_buffer", "use_muon", StateHandling::kBound, "DeepSpeed Muon",
     "whole parameters at stages 1 and 2, even across partition boundaries", Stages::kOneAndTwo},
}};

/// Returns true if a group's options contain `option` with another value than 1 (slicing off).
bool HasOption(const Node* groups, std::string_view option) {
  if (option.empty()) return true;
  if (groups == nullptr || !groups->is_list()) return false;
  return std::any_of(groups->items.begin(), groups->items.end(), [&](const Node* group) {
    const Node* value = FindPath(group, {option});
    return value != nullptr && !(value->kind == pickle::Kind::kInt && value->integer == 1);
  });
}

const KnownState* FindKnown(const Reading& reading, std::string_view state, const Node* groups) {
  const bool one_or_two = !reading.grid.shard.empty() && !reading.grid.zero3();
  const auto* const at = std::find_if(kKnown.begin(), kKnown.end(), [&](const KnownState& known) {
    return known.state == state && (known.stages == Stages::kAll || one_or_two) &&
           HasOption(groups, known.option);
  });
  return at == kKnown.end() ? nullptr : &*at;
}

/// Compares two options: numbers, words or lists of them. Compares tensors, such as a learning
/// rate for captured graphs, by shape, because every rank's scheduler sets the same value.
bool SameOption(const Node* a, const Node* b) {
  if (a->kind != b->kind || a->items.size() != b->items.size()) return false;
  if (a->integer != b->integer || a->text != b->text) return false;
  const bool both_nan = std::isnan(a->real) && std::isnan(b->real);
  if (a->real != b->real && !both_nan) return false;
  if (a->is_tensor()) return a->tensor->shape == b->tensor->shape;
  for (std::size_t i = 0; i < a->items.size(); ++i) {
    if (!SameOption(a->items[i], b->items[i])) return false;
  }
  return true;
}

/// Returns true for the lists of a group's parameters, which each rank numbers on its own.
bool IsOwnNumbers(std::string_view key) { return key == "params" || key == "param_names"; }

std::string ShowOption(const Node* value) {
  Scalar scalar;
  scalar.value = value;
  return Show(scalar);
}

/// Describes an option for which two ranks have different values.
std::string OptionDiffers(const std::string& files, const std::string& key, std::size_t group,
                          const std::string& ours, const std::string& theirs) {
  return files + ": option \"" + key + "\" of group " + std::to_string(group) +
         " differs between ranks, but a group has one value for all ranks: " + ours + " and " +
         theirs;
}

}  // namespace

Result<std::vector<std::pair<std::string, const Node*>>> StatesOf(const Node* dict) {
  constexpr std::string_view kWrapped = "__bnb_optimizer_quant_state__";
  std::vector<std::pair<std::string, const Node*>> out;
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    auto key = pickle::AsString(dict->key(i));
    if (!key) return Within("state name", std::move(key).error());
    if (*key == kWrapped && dict->value(i)->is_dict()) {
      SW_TRY_ASSIGN(auto inner, StatesOf(dict->value(i)));
      out.insert(out.end(), inner.begin(), inner.end());
    } else {
      out.emplace_back(*key, dict->value(i));
    }
  }
  return out;
}

StateHandling HandlingOf(const Reading& reading, std::string_view state, const Node* groups) {
  const KnownState* known = FindKnown(reading, state, groups);
  return known == nullptr ? StateHandling::kCut : known->handling;
}

std::string WhyUnknown(std::string_view state, const Node* value) {
  if (IsPlainValue(*value)) return "";
  if (!value->is_tensor()) return "tensor or number expected, found " + pickle::Describe(value);
  const bool number = IsNumber(value->tensor->shape);
  if (number || !layout::IsModelState(state)) return "";
  return "its name is reserved for tensors of the model";
}

std::string KnownAs(const Reading& reading, std::string_view state, const Node* groups) {
  if (const KnownState* known = FindKnown(reading, state, groups)) {
    const std::string what = (known->what.empty() ? "" : ": ") + std::string(known->what);
    return " (" + std::string(known->optimizer) + what + ")";
  }
  const Node* type = FindPath(reading.config, {"optimizer", "type"});
  return type == nullptr || !type->is_string() ? "" : " (optimizer " + type->text + ")";
}

void Bind(Reading* reading, const std::string& where, const std::string& state,
          const std::string& found, const Node* groups) {
  if (!reading->named_states.insert(state).second) return;
  reading->out.bound.push_back(StrCat(where, ": optimizer state \"", state,
                                      "\" cannot be resharded: ", found,
                                      KnownAs(*reading, state, groups)));
}

void LeaveOut(Reading* reading, const std::string& where, const std::string& state,
              const Node* groups) {
  if (!reading->named_states.insert(state).second) return;
  reading->out.left_out.push_back(
      StrCat(where, ": optimizer state \"", state, "\"", KnownAs(*reading, state, groups)));
}

bool SameOptions(const Node* a, const Node* b) {
  if (!a->is_dict() || !b->is_dict()) return false;
  const auto has_those_of = [](const Node* group, const Node* other) {
    for (std::size_t i = 0; i < other->entry_count(); ++i) {
      if (!other->key(i)->is_string() || IsOwnNumbers(other->key(i)->text)) continue;
      const Node* value = group->Find(other->key(i)->text);
      if (value == nullptr || !SameOption(other->value(i), value)) return false;
    }
    return true;
  };
  return has_those_of(a, b) && has_those_of(b, a);
}

void CompareOptions(Reading* reading, const Node* a, const Node* b, const std::string& files) {
  if (a == nullptr || b == nullptr || !a->is_list() || !b->is_list()) return;
  for (std::size_t g = 0; g < std::min(a->items.size(), b->items.size()); ++g) {
    const Node* ours = a->items[g];
    if (!ours->is_dict()) continue;
    for (std::size_t i = 0; i < ours->entry_count(); ++i) {
      if (!ours->key(i)->is_string()) continue;
      const std::string& key = ours->key(i)->text;
      if (IsOwnNumbers(key)) continue;
      const Node* theirs = b->items[g]->Find(key);
      if (theirs != nullptr && SameOption(ours->value(i), theirs)) continue;
      if (!reading->named_states.insert(key).second) continue;
      reading->out.bound.push_back(
          OptionDiffers(files, key, g, ShowOption(ours->value(i)),
                        theirs == nullptr ? "nothing" : ShowOption(theirs)) +
          KnownAs(*reading, key, a));
    }
  }
}

}  // namespace shardwright::checkpoints::reader
