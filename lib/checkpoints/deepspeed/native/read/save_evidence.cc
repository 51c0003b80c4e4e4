// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::reader {
namespace {

std::optional<std::uint64_t> EngineCount(const Node* root, std::string_view key) {
  const Node* node = pickle::FindIn(root, key);
  if (node == nullptr) return std::nullopt;
  const Result<std::uint64_t> count = pickle::AsCount(node);
  return count ? std::optional(*count) : std::nullopt;
}

/// Returns false if the configuration shows that no engine wrote the counters. An engine
/// does not start without a batch size, and files converted from other formats have none.
bool CountedByEngine(const Node* root) {
  const Node* config = pickle::FindIn(root, "ds_config");
  if (config == nullptr || !config->is_dict()) return true;
  constexpr std::array<std::string_view, 3> kBatch = {
      "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};
  return std::any_of(kBatch.begin(), kBatch.end(),
                     [&](std::string_view key) { return config->Find(key) != nullptr; });
}

/// Returns the largest step in any parameter's state. Groups
/// that were added later or not always trained have smaller ones.
std::optional<double> MostSteps(const Checkpoint& checkpoint) {
  std::optional<double> most;
  for (const Param& param : checkpoint.params) {
    for (const Scalar& scalar : param.scalars) {
      if (scalar.state != layout::kStep) continue;
      const std::optional<double> number = NumberOf(scalar);
      if (number && std::isfinite(*number)) most = std::max(most.value_or(*number), *number);
    }
  }
  return most;
}

bool IsEnabledIn(const Node* flag) {
  return flag != nullptr && flag->kind == pickle::Kind::kBool && flag->integer != 0;
}

/// Returns a reason why compute weights may differ from rounded master weights, or an empty text.
std::string WhyWeightsLead(const Node* root, const Checkpoint& checkpoint) {
  const Node* config = pickle::FindIn(root, "ds_config");
  const Node* zenflow = pickle::FindIn(pickle::FindIn(config, "zero_optimization"), "zenflow");
  if (zenflow != nullptr && !zenflow->is_none()) {
    return "ZenFlow updates a part of the compute weights before the master weights";
  }
  if (IsEnabledIn(pickle::FindIn(pickle::FindIn(config, "quantize_training"), "enabled"))) {
    return "MoQ (quantize_training) quantizes the compute weights after each step";
  }
  const bool schedule_free =
      std::any_of(checkpoint.groups.begin(), checkpoint.groups.end(), [](const Group& group) {
        return group.options != nullptr && group.options->Find("weight_sum") != nullptr;
      });
  if (schedule_free) {
    return "a schedule-free optimizer changes the master weights when it switches between training "
           "and evaluation";
  }
  return {};
}

/// Returns the file of a part of the engine's state, or an empty text if it has no payload.
std::string FileOfState(const Passed& passed, const Checkpoint& checkpoint) {
  const layout::ShardMap& map = checkpoint.map;
  for (const std::uint32_t member : passed.members) {
    if (member < map.members.size()) return map.files[map.members[member].file];
  }
  return {};
}

}  // namespace

SaveEvidence EvidenceOf(const Reading& reading) {
  const EngineState& state = reading.state;
  const Checkpoint& checkpoint = reading.out;
  SaveEvidence out;
  if (state.model_states.empty()) return out;
  const Node* root = state.model_states.front().document.root;
  out.weights_lead = WhyWeightsLead(root, checkpoint);
  out.weights_are_rounded = out.weights_lead.empty();
  const std::optional<std::uint64_t> iterations = EngineCount(root, "global_steps");
  const std::uint64_t skipped = EngineCount(root, "skipped_steps").value_or(0);
  const std::optional<double> steps = MostSteps(checkpoint);
  if (!iterations || *iterations == 0 || skipped > *iterations || !steps ||
      !CountedByEngine(root)) {
    return out;
  }
  const std::uint64_t expected = *iterations - skipped;
  // Old releases take an extra step with zero gradients to create the optimizer's state.
  const auto least = static_cast<double>(expected);
  if (*steps == least || *steps == least + 1) {
    out.steps = SaveEvidence::Steps::kAgree;
    return out;
  }
  const std::string model = FileOfState(state.model_states.front(), checkpoint);
  const std::string optimizer =
      state.optimizer.empty() ? std::string() : FileOfState(state.optimizer.front(), checkpoint);
  if (model == optimizer && checkpoint.map.files.size() == 1) return out;  // without ZeRO
  out.steps = SaveEvidence::Steps::kDiffer;
  std::string found = std::to_string(*steps);
  found.erase(found.find_last_not_of('0') + 1);
  if (found.ends_with('.')) found.pop_back();
  out.difference = (model.empty() ? "the model states were" : model + " was") +
                   " saved at optimizer step " + std::to_string(expected) + " (global_steps " +
                   std::to_string(*iterations) + ", skipped_steps " + std::to_string(skipped) +
                   "), " + (optimizer.empty() ? "the optimizer states" : optimizer) + " at step " +
                   found;
  return out;
}

}  // namespace shardwright::checkpoints::reader
