// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/import_foreign.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/pickled/hyper.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

using pickle::Arena;
using pickle::Node;

// The files have the form of this DeepSpeed release.
constexpr const char* kRelease = "0.19.8";

bool IsKnown(const HyperParams& hyper) {
  return hyper.lr || hyper.betas || hyper.eps || hyper.weight_decay || hyper.momentum;
}

void SetDefault(Arena& arena, Node* options, std::string_view key, const Node* value) {
  if (options->Find(key) == nullptr) Set(arena, options, key, value);
}

/// Returns the source's options plus the defaults of all other keys that optimizers of torch
/// and DeepSpeed read. A loaded group has only the saved keys, so none of them may be missing.
const Node* OptionsOf(Arena& arena, const Group& group) {
  const HyperParams& hyper = group.hyper;
  const Node* given = PlainOptions(group.options, group.tensors, &arena);
  const bool known = given != nullptr && given->is_dict();
  Node* options = known ? CopyDict(arena, given) : arena.Dict();
  Set(arena, options, "lr", arena.Float(hyper.lr.value_or(1e-3)));
  Set(arena, options, "weight_decay", arena.Float(hyper.weight_decay.value_or(0.0)));
  if (hyper.momentum) {
    Set(arena, options, "momentum", arena.Float(*hyper.momentum));
    SetDefault(arena, options, "dampening", arena.Float(0.0));
    SetDefault(arena, options, "nesterov", arena.Bool(false));
    return options;
  }
  const auto [first, second] = hyper.betas.value_or(std::pair(0.9, 0.999));
  Set(arena, options, "betas", arena.Tuple({arena.Float(first), arena.Float(second)}));
  Set(arena, options, "eps", arena.Float(hyper.eps.value_or(1e-8)));
  SetDefault(arena, options, "bias_correction", arena.Bool(true));
  SetDefault(arena, options, "amsgrad", arena.Bool(false));
  return options;
}

/// Builds the configuration, from which this library's writer and reader take values.
const Node* ConfigOf(Arena& arena, const Checkpoint& source) {
  const auto enabled = [&](bool value) {
    Node* section = arena.Dict();
    Set(arena, section, "enabled", arena.Bool(value));
    return section;
  };
  Node* config = arena.Dict();
  if (source.layout.dtype == DType::kBF16) Set(arena, config, "bf16", enabled(true));
  if (source.layout.dtype == DType::kF16) Set(arena, config, "fp16", enabled(true));
  return config;
}

const Node* ModelStates(Arena& arena, const Checkpoint& source) {
  const std::uint64_t steps = source.iteration ? *source.iteration : 0;
  Node* root = arena.Dict();
  // Schedulers of DeepSpeed and torch use different keys for their count; both are set.
  Node* schedule = arena.Dict();
  Set(arena, schedule, "last_batch_iteration", arena.Count(steps));
  Set(arena, schedule, "last_epoch", arena.Count(steps));
  Set(arena, schedule, "lr_lambdas", arena.List({}));  // LambdaLR, used by transformers
  Set(arena, root, "lr_scheduler", schedule);
  Set(arena, root, "data_sampler", arena.None());
  Set(arena, root, "random_ltd", arena.None());
  Set(arena, root, "sparse_tensor_module_names", arena.New(pickle::Kind::kSet));
  Set(arena, root, "skipped_steps", arena.Int(0));
  Set(arena, root, "global_steps", arena.Count(steps));
  Set(arena, root, "global_samples", arena.Count(source.consumed_samples.value_or(0)));
  Set(arena, root, "ds_config", ConfigOf(arena, source));
  Set(arena, root, "ds_version", arena.String(kRelease));
  return root;
}

/// Makes one group of the dense parameters and one of the experts.
Status MakeGroups(Checkpoint* checkpoint) {
  Group dense;
  Group experts;
  experts.moe = true;
  for (std::uint32_t i = 0; i < checkpoint->params.size(); ++i) {
    const Param& param = checkpoint->params[i];
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    (param.expert ? experts : dense).params.push_back(i);
  }
  for (Group* group : {&dense, &experts}) {
    if (group->params.empty()) continue;
    for (const std::uint32_t index : group->params) {
      checkpoint->params[index].group = static_cast<std::int32_t>(checkpoint->groups.size());
    }
    checkpoint->groups.push_back(std::move(*group));
  }
  return {};
}

/// Converts experts outside of DeepSpeed's MoE layers to parameters of a dense
/// model. Merges groups of the optimizer that have the same hyper-parameters.
void MakeForeignExpertsDense(Checkpoint* checkpoint) {
  for (Param& param : checkpoint->params) {
    if (!IsNativeExpert(param)) param.expert.reset();
  }
  std::vector<Group> groups;
  std::vector<std::int32_t> now;  // by old group: index of the new group
  for (Group& group : checkpoint->groups) {
    const bool foreign = group.moe && std::none_of(group.params.begin(), group.params.end(),
                                                   [&](std::uint32_t index) {
                                                     return checkpoint->params[index].expert;
                                                   });
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Group& other) {
      return foreign && !other.moe && other.hyper == group.hyper;
    });
    if (foreign) group.moe = false;
    now.push_back(static_cast<std::int32_t>(same - groups.begin()));
    if (same == groups.end()) {
      groups.push_back(std::move(group));
      continue;
    }
    same->params.insert(same->params.end(), group.params.begin(), group.params.end());
    std::sort(same->params.begin(), same->params.end());
  }
  checkpoint->groups = std::move(groups);
  for (Param& param : checkpoint->params) {
    const auto before = static_cast<std::size_t>(param.group);
    if (param.group >= 0 && before < now.size()) param.group = now[before];
  }
}

Status CheckParams(const Checkpoint& checkpoint) {
  for (const Param& param : checkpoint.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    if (param.group < 0 || static_cast<std::size_t>(param.group) >= checkpoint.groups.size()) {
      return Fail(Errc::kUnsupported, "\"", param.name,
                  "\" is trained, but in none of the optimizer's parameter groups");
    }
  }
  return {};
}

std::vector<std::string> Losses(const Checkpoint& source) {
  std::vector<std::string> lost;
  if (source.own != nullptr) {
    const std::vector<std::string> contents = source.own->Contents();
    if (!contents.empty()) {
      lost.push_back(StrCat("data specific to ", source.origin, ": ", Joined(contents, ", ")));
    }
  }
  const std::vector<layout::LogicalTensor>& tensors = source.map.tensors;
  const bool masters = std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.state == layout::kMaster;
  });
  // Weights of float32 are their own master weights.
  const bool rounded = std::any_of(source.params.begin(), source.params.end(), [](const auto& one) {
    return one.kind == ParamKind::kTrainable && one.dtype != DType::kF32;
  });
  if (!masters && rounded) {
    lost.emplace_back(
        "master weights, which the source lacks: they are made from its rounded weights");
  }
  if (source.states.empty()) {
    lost.emplace_back("optimizer state, which the source lacks: moments and steps start at zero");
  }
  const bool known = !source.groups.empty() &&
                     std::all_of(source.groups.begin(), source.groups.end(),
                                 [](const Group& group) { return IsKnown(group.hyper); });
  if (!known) {
    lost.emplace_back(
        "learning rate and other hyper-parameters, which the source lacks: Adam's defaults are "
        "written (lr=0.001), so set yours after loading");
  }
  if (!source.iteration) {
    lost.emplace_back(
        "the iteration, which the source does not record: training is counted from 0");
  }
  return lost;
}

}  // namespace

Result<Adopted> Adopt(const Checkpoint& source) {
  Adopted out{source, Losses(source)};
  Checkpoint& checkpoint = out.checkpoint;
  if (checkpoint.groups.empty()) SW_TRY(MakeGroups(&checkpoint));
  MakeForeignExpertsDense(&checkpoint);
  SW_TRY(CheckParams(checkpoint));
  // The source's nodes remain in the source's arena.
  const auto arena = std::make_shared<Arena>();
  for (Group& group : checkpoint.groups) group.options = OptionsOf(*arena, group);
  EngineState state;
  state.model_states.resize(1);
  state.model_states[0].document.arena = arena;
  state.model_states[0].document.root = ModelStates(*arena, source);
  checkpoint.own = std::make_shared<const EngineState>(std::move(state));
  checkpoint.layout = LayoutOf(TopologyOf(source.layout));
  checkpoint.tag = "global_step" + std::to_string(source.iteration ? *source.iteration : 0);
  return out;
}

}  // namespace shardwright::checkpoints
