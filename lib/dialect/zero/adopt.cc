#include "dialect/zero/adopt.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "base/text.h"
#include "dialect/zero/engine_state.h"
#include "dialect/zero/flat.h"
#include "dialect/zero/topology.h"
#include "layout/states.h"

namespace shardwright::dialect {
namespace {

using pickle::Arena;
using pickle::Node;

// The release whose form is written.
constexpr const char* kRelease = "0.19.8";

const Node* CountNode(Arena& arena, std::uint64_t count) {
  return arena.Int(static_cast<std::int64_t>(count));
}

bool IsKnown(const HyperParams& hyper) {
  return hyper.lr || hyper.betas || hyper.eps || hyper.weight_decay || hyper.momentum;
}

/// Every key that an optimizer of torch or of DeepSpeed looks up, with its default where the source
/// is silent: what the saved group lacks, the loaded one lacks too.
const Node* OptionsOf(Arena& arena, const HyperParams& hyper) {
  Node* options = arena.Dict();
  Set(arena, options, "lr", arena.Float(hyper.lr.value_or(1e-3)));
  Set(arena, options, "weight_decay", arena.Float(hyper.weight_decay.value_or(0.0)));
  if (hyper.momentum) {
    Set(arena, options, "momentum", arena.Float(*hyper.momentum));
    Set(arena, options, "dampening", arena.Float(0.0));
    Set(arena, options, "nesterov", arena.Bool(false));
    return options;
  }
  const auto [first, second] = hyper.betas.value_or(std::pair(0.9, 0.999));
  Set(arena, options, "betas", arena.Tuple({arena.Float(first), arena.Float(second)}));
  Set(arena, options, "eps", arena.Float(hyper.eps.value_or(1e-8)));
  Set(arena, options, "bias_correction", arena.Bool(true));
  Set(arena, options, "amsgrad", arena.Bool(false));
  return options;
}

/// The configuration that writer and reader look values up in.
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
  // Schedulers of DeepSpeed and of torch each find the key that they count in.
  Node* schedule = arena.Dict();
  Set(arena, schedule, "last_batch_iteration", CountNode(arena, steps));
  Set(arena, schedule, "last_epoch", CountNode(arena, steps));
  Set(arena, schedule, "lr_lambdas", arena.List({}));  // LambdaLR, the schedules of transformers
  Set(arena, root, "lr_scheduler", schedule);
  Set(arena, root, "data_sampler", arena.None());
  Set(arena, root, "random_ltd", arena.None());
  Set(arena, root, "sparse_tensor_module_names", arena.New(pickle::Kind::kSet));
  Set(arena, root, "skipped_steps", arena.Int(0));
  Set(arena, root, "global_steps", CountNode(arena, steps));
  Set(arena, root, "global_samples", CountNode(arena, source.consumed_samples.value_or(0)));
  Set(arena, root, "ds_config", ConfigOf(arena, source));
  Set(arena, root, "ds_version", arena.String(kRelease));
  return root;
}

/// One group of the dense parameters, and one of the experts'.
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

Status CheckParams(const Checkpoint& checkpoint) {
  for (const Param& param : checkpoint.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    if (param.group < 0 || static_cast<std::size_t>(param.group) >= checkpoint.groups.size()) {
      return Fail(Errc::kUnsupported,
                  "\"" + param.name + "\" is trained and in no group of the optimizer");
    }
    if (param.expert && ExpertModuleOf(param.name).empty()) {
      return Fail(
          Errc::kUnsupported,
          "\"" + param.name +
              "\": an expert with a name that DeepSpeed's mixture of experts does not have");
    }
  }
  return {};
}

std::vector<std::string> Losses(const Checkpoint& source) {
  std::vector<std::string> lost;
  if (source.own != nullptr) {
    const std::vector<std::string> contents = source.own->Contents();
    if (!contents.empty()) {
      lost.push_back("what only " + source.origin + " understands: " + Joined(contents, ", "));
    }
  }
  const std::vector<layout::LogicalTensor>& tensors = source.map.tensors;
  const bool masters = std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return tensor.state == layout::kMaster;
  });
  if (!masters) lost.emplace_back("the source has no master weights: they are made of its weights");
  if (source.states.empty()) {
    lost.emplace_back("the source has no state of an optimizer: moments and steps begin anew");
  }
  const bool known = !source.groups.empty() &&
                     std::all_of(source.groups.begin(), source.groups.end(),
                                 [](const Group& group) { return IsKnown(group.hyper); });
  if (!known) {
    lost.emplace_back(
        "the source has no learning rate and other hyper-parameters: defaults of Adam are written "
        "(lr=0.001), so set yours after loading");
  }
  if (!source.iteration) {
    lost.emplace_back("the source does not tell its iteration: training is counted from 0");
  }
  return lost;
}

}  // namespace

Result<Adopted> Adopt(const Checkpoint& source) {
  Adopted out{source, Losses(source)};
  Checkpoint& checkpoint = out.checkpoint;
  if (checkpoint.groups.empty()) SW_TRY(MakeGroups(&checkpoint));
  SW_TRY(CheckParams(checkpoint));
  // The source's nodes stay with its arena.
  const auto arena = std::make_shared<Arena>();
  for (Group& group : checkpoint.groups) group.options = OptionsOf(*arena, group.hyper);
  EngineState state;
  state.model_states.resize(1);
  state.model_states[0].document.arena = arena;
  state.model_states[0].document.root = ModelStates(*arena, source);
  checkpoint.own = std::make_shared<const EngineState>(std::move(state));
  checkpoint.layout = LayoutOf(TopologyOf(source.layout));
  checkpoint.tag = "global_step" + std::to_string(source.iteration ? *source.iteration : 0);
  return out;
}

}  // namespace shardwright::dialect
