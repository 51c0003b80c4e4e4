// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <span>

#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/notes.h"
#include "checkpoints/megatron/write/new_run.h"
#include "checkpoints/megatron/write/shards.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Arena;
using pickle::Node;

constexpr double kVersion = 3.0;

const Node* CountNode(Arena& arena, std::uint64_t count) {
  return arena.Int(static_cast<std::int64_t>(count));
}

constexpr double kDefaultRate = 1e-3;

/// Returns Megatron's options of a group, or those that fit a group of another trainer best.
Node* OptionsOf(Arena& arena, const Group& group) {
  if (group.options != nullptr && group.options->is_dict() &&
      group.options->Find("wd_mult") != nullptr) {
    return CopyDict(arena, group.options);
  }
  const HyperParams& hyper = group.hyper;
  return NewOptions(arena, hyper, hyper.lr.value_or(kDefaultRate), 0.0,
                    hyper.weight_decay.value_or(0.0) != 0);
}

double NumberIn(const Node* options, const char* key) {
  const Result<double> value = pickle::AsFloat(options->Find(key));
  return value ? *value : 0;
}

/// Initial values of Megatron's dynamic scaler with default arguments.
constexpr float kFirstScale = 4294967296.0F;
constexpr std::int64_t kFirstHysteresis = 2;

const Node* NewScaler(Document* document) {
  Arena& arena = document->arena;
  std::string bytes(sizeof kFirstScale, '\0');
  std::memcpy(bytes.data(), &kFirstScale, sizeof kFirstScale);
  Node* state = arena.Dict();
  Set(arena, state, "scale", document->AddInline(std::move(bytes), DType::kF32, {1}));
  Set(arena, state, "growth_tracker", arena.Int(0));
  Set(arena, state, "hysteresis_tracker", arena.Int(kFirstHysteresis));
  return state;
}

const char* FormText(OptimizerForm form) {
  return form == OptimizerForm::kDpReshardable ? "dp_reshardable" : "fully_reshardable";
}

/// Builds the common part of one optimizer.
Result<const Node*> OptimizerNode(Document& document, const Writing& writing, bool chained,
                                  bool experts, std::optional<double> step) {
  const Checkpoint& source = writing.source;
  const MegatronLayout& to = writing.to;
  Arena& arena = document.arena;
  const bool distributed = to.optimizer != OptimizerForm::kNone;
  Node* outer = arena.Dict();
  if (distributed) {
    Set(arena, outer, "param_state_sharding_type", arena.String(FormText(to.optimizer)));
  }
  // With buckets, every rank's groups are objects of their own next to the buckets.
  if (to.optimizer == OptimizerForm::kDpReshardable) return outer;
  Node* inner = arena.Dict();
  if (!distributed) {
    Node* state = arena.Dict();
    const auto value = static_cast<float>(step.value_or(0));
    std::string bytes(sizeof value, '\0');
    std::memcpy(bytes.data(), &value, sizeof value);
    if (step) Set(arena, state, "common_step", document.AddInline(bytes, DType::kF32, {}));
    Set(arena, inner, "state", state);
    step.reset();
  }
  std::vector<const Node*> groups;
  for (const TargetGroup& group : GroupsOf(arena, writing, chained, experts, step)) {
    groups.push_back(group.options);
  }
  Set(arena, inner, "param_groups", arena.List(std::move(groups)));
  // Float32 weights without separate master weights have a plain optimizer.
  const bool plain = !distributed && source.layout.dtype == DType::kF32;
  if (plain) return inner;
  Set(arena, outer, "optimizer", inner);
  SW_TRY_ASSIGN(const Node* scaler, ScalerNode(&document, source, experts));
  if (scaler != nullptr) Set(arena, outer, "grad_scaler", scaler);
  return outer;
}

Result<const Node*> OptimizersNode(Document& document, const Writing& writing,
                                   const std::optional<double>& step) {
  Arena& arena = document.arena;
  const bool chained = IsChained(writing.source, writing.to);
  if (!chained) return OptimizerNode(document, writing, false, false, step);
  Node* all = arena.Dict();
  for (const bool experts : {false, true}) {
    all->items.push_back(arena.Int(experts ? 1 : 0));
    SW_TRY_ASSIGN(const Node* one, OptimizerNode(document, writing, true, experts, step));
    all->items.push_back(one);
  }
  return all;
}

const Node* ContentNode(Arena& arena, const MegatronLayout& to) {
  Node* content = arena.Dict();
  if (to.optimizer != OptimizerForm::kNone) {
    Set(arena, content, "distrib_optim_sharding_type", arena.String(FormText(to.optimizer)));
  }
  if (to.optimizer == OptimizerForm::kFullyReshardable) {
    Set(arena, content, "distrib_optim_fully_reshardable_mem_efficient", arena.Bool(false));
  }
  Set(arena, content, "singleton_local_shards", arena.Bool(false));
  Set(arena, content, "chained_optim_avoid_prefix", arena.Bool(true));
  return content;
}

}  // namespace

Node* NewOptions(Arena& arena, const HyperParams& hyper, double max_rate, double min_rate,
                 bool decays) {
  const auto [first, second] = hyper.betas.value_or(std::pair(0.9, 0.999));
  Node* options = arena.Dict();
  Set(arena, options, "is_expert_parallel", arena.Bool(false));
  Set(arena, options, "default_config", arena.Bool(true));
  Set(arena, options, "wd_mult", arena.Float(decays ? 1.0 : 0.0));
  Set(arena, options, "lr_mult", arena.Float(1.0));
  Set(arena, options, "is_decoupled_lr", arena.Bool(false));
  Set(arena, options, "max_lr", arena.Float(max_rate));
  Set(arena, options, "min_lr", arena.Float(min_rate));
  Set(arena, options, "lr", arena.Float(hyper.lr.value_or(kDefaultRate)));
  Set(arena, options, "betas", arena.Tuple({arena.Float(first), arena.Float(second)}));
  Set(arena, options, "eps", arena.Float(hyper.eps.value_or(1e-8)));
  Set(arena, options, "weight_decay", arena.Float(decays ? hyper.weight_decay.value_or(0.0) : 0.0));
  Set(arena, options, "amsgrad", arena.Bool(false));
  Set(arena, options, "maximize", arena.Bool(false));
  Set(arena, options, "foreach", arena.None());
  Set(arena, options, "capturable", arena.Bool(false));
  Set(arena, options, "differentiable", arena.Bool(false));
  Set(arena, options, "fused", arena.None());
  Set(arena, options, "decoupled_weight_decay", arena.Bool(true));
  return options;
}

const Node* ArgsNode(Arena& arena, const Writing& writing) {
  const Checkpoint& source = writing.source;
  const MegatronLayout& to = writing.to;
  const Args& args = writing.args;
  const RunState* own = RunStateOf(source);
  const Node* before = own == nullptr || own->common.root == nullptr
                           ? nullptr
                           : AttributesOf(own->common.root->Find("args"));
  Node* all = before == nullptr ? arena.Dict() : CopyDict(arena, before);
  const auto set = [&](const char* key, std::uint64_t value) {
    Set(arena, all, key, CountNode(arena, value));
  };
  const auto set_or_none = [&](const char* key, std::uint64_t value) {
    Set(arena, all, key, value > 0 ? CountNode(arena, value) : arena.None());
  };
  set("tensor_model_parallel_size", args.tp);
  set("pipeline_model_parallel_size", args.pp);
  set_or_none("virtual_pipeline_model_parallel_size", args.vpp > 1 ? args.vpp : 0);
  set("data_parallel_size", args.dp);
  set("world_size", args.tp * args.pp * args.cp * args.dp);
  set("expert_model_parallel_size", args.ep);
  set("expert_tensor_parallel_size", args.etp);
  // Megatron derives these from the sizes above, and rejects fewer shards than ranks.
  const std::pair<const char*, std::uint64_t> shards[] = {
      {"tensor_parallel_num_weight_shards", args.tp},
      {"expert_tensor_parallel_num_weight_shards", args.etp}};
  for (const auto& [key, ranks] : shards) {
    const Node* old = before == nullptr ? nullptr : before->Find(key);
    if (old != nullptr && !old->is_none()) set(key, ranks);
  }
  set_or_none("decoder_first_pipeline_num_layers", to.first);
  set_or_none("decoder_last_pipeline_num_layers", to.last);
  const bool legacy = to.files == Files::kTorch;
  Set(arena, all, "ckpt_format", arena.String(legacy ? "torch" : "torch_dist"));
  if (to.optimizer == OptimizerForm::kDpReshardable || legacy) {
    Set(arena, all, "overlap_grad_reduce", arena.Bool(to.bucket > 0));
    set_or_none("ddp_bucket_size", to.bucket);
    Set(arena, all, "ddp_num_buckets", arena.None());
  }
  Set(arena, all, "use_distributed_optimizer", arena.Bool(args.distributed));
  if (writing.vocab_rows > 0) set("padded_vocab_size", writing.vocab_rows);
  if (!writing.keeps_random && !legacy) Set(arena, all, "no_save_rng", arena.Bool(true));
  if (source.iteration) set("iteration", *source.iteration);
  if (source.consumed_samples) set("consumed_train_samples", *source.consumed_samples);
  if (before == nullptr) {
    set_or_none("num_experts", args.experts);
    set_or_none("mtp_num_layers", args.mtp);
    Set(arena, all, "transformer_impl",
        arena.String(args.transformer_engine ? "transformer_engine" : "local"));
    Set(arena, all, "params_dtype", arena.Global("torch." + std::string(Name(args.dtype))));
    Set(arena, all, "bf16", arena.Bool(args.dtype == DType::kBF16));
    Set(arena, all, "fp16", arena.Bool(args.dtype == DType::kF16));
    if (args.latent) Set(arena, all, "multi_latent_attention", arena.Bool(true));
    Set(arena, all, "hetereogenous_dist_checkpoint", arena.Bool(args.layers_differ));
    Set(arena, all, "untie_embeddings_and_output_weights", arena.Bool(args.untied));
  }
  if (!IsOfMegatron(source)) {
    // Megatron-LM compares these three unless --finetune is given.
    const std::uint64_t heads = to.run ? to.run->heads : KnownSize(source, kHeadsFact);
    const std::uint64_t groups = KnownSize(source, kGroupsFact);
    const std::pair<const char*, std::uint64_t> sizes[] = {{"num_layers", args.layers},
                                                           {"hidden_size", HiddenSize(source)},
                                                           {"num_attention_heads", heads},
                                                           {"num_query_groups", groups}};
    for (const auto& [key, size] : sizes) {
      if (size > 0) set(key, size);
    }
    if (heads > 0 && groups > 0) {
      Set(arena, all, "group_query_attention", arena.Bool(groups != heads));
    }
  }
  if (to.run) set("consumed_train_samples", to.run->samples);
  return arena.Object("argparse.Namespace", all);
}

std::vector<TargetGroup> GroupsOf(Arena& arena, const Writing& writing, bool chained, bool experts,
                                  const std::optional<double>& step) {
  std::vector<TargetGroup> groups;
  std::vector<std::vector<double>> identities;
  for (std::uint32_t g = 0; g < writing.groups.size(); ++g) {
    const Group& group = writing.groups[g];
    const bool any =
        std::any_of(group.params.begin(), group.params.end(), [&](std::uint32_t index) {
          return !chained || IsExpert(writing.source.params[index]) == experts;
        });
    if (!any) continue;
    Node* options = OptionsOf(arena, group);
    Set(arena, options, "is_expert_parallel", arena.Bool(experts));
    pickle::Remove(options, "step");
    if (step) Set(arena, options, "step", arena.Float(*step));
    // Groups without weight decay come last.
    const std::vector<double> identity = {-NumberIn(options, "wd_mult"),
                                          NumberIn(options, "lr_mult"), NumberIn(options, "max_lr"),
                                          NumberIn(options, "min_lr")};
    const auto at = std::lower_bound(identities.begin(), identities.end(), identity);
    const auto place = groups.begin() + (at - identities.begin());
    if (at != identities.end() && *at == identity) {
      place->from.push_back(g);
      continue;
    }
    groups.insert(place, {options, {g}});
    identities.insert(at, identity);
  }
  return groups;
}

bool HasArgs(const Checkpoint& source) {
  const RunState* own = RunStateOf(source);
  if (own == nullptr || own->noted || own->common.root == nullptr) return true;
  return own->common.root->Find("args") != nullptr;
}

bool HasExtraState(const Checkpoint& source, std::string_view name) {
  const auto* from = dynamic_cast<const MegatronLayout*>(source.layout.own.get());
  const bool legacy = from != nullptr && from->files == Files::kTorch;
  return !legacy || name != kOutputState;
}

Result<const Node*> ModuleNode(Document* document, const Checkpoint& source,
                               const std::string& name) {
  const RunState* own = RunStateOf(source);
  if (own == nullptr || !own->modules.contains(name)) return document->arena.None();
  const Value& value = own->modules.at(name);
  Graft graft(*document, *value.document, value.members);
  return graft.Take(value.root);
}

Result<const Node*> ScalerNode(Document* document, const Checkpoint& source, bool experts) {
  const RunState* own = RunStateOf(source);
  const Value* value = nullptr;
  if (own != nullptr && !own->scalers.empty()) {
    // All optimizers share one scale of the gradients.
    value = &own->scalers[std::min<std::size_t>(experts ? 1 : 0, own->scalers.size() - 1)];
  }
  if (value != nullptr && value->root != nullptr) {
    Graft graft(*document, *value->document, value->members);
    return graft.Take(value->root);
  }
  return source.layout.dtype == DType::kF16 ? NewScaler(document) : nullptr;
}

const Node* TypesNode(Arena& arena, const StateBuffer& buffer) {
  return arena.Tuple({arena.Global("torch." + std::string(Name(buffer.dtype))),
                      arena.Global("torch." + std::string(Name(buffer.gradient)))});
}

bool IsChained(const Checkpoint& source, const MegatronLayout& to) {
  return to.mesh.ep > 1 && std::any_of(source.params.begin(), source.params.end(), IsExpert);
}

Result<std::optional<double>> StepOf(const Checkpoint& source) {
  std::optional<double> step;
  const Param* first = nullptr;
  for (const Param& param : source.params) {
    for (const Scalar& scalar : param.scalars) {
      if (scalar.state != layout::kStep) continue;
      const std::optional<double> number = NumberOf(scalar);
      if (!number) continue;
      const double value = *number;
      if (step && *step != value) {
        return Fail(Errc::kUnsupported, "\"" + first->name + "\" has made " +
                                            std::to_string(*step) + " steps, \"" + param.name +
                                            "\" " + std::to_string(value) +
                                            ": Megatron has one number for all parameters");
      }
      if (!step) first = &param;
      step = value;
    }
  }
  for (const Group& group : source.groups) {
    if (!step) step = group.hyper.step;
  }
  return step;
}

Status AddOthers(const Checkpoint& source, Document* document, Node* root) {
  const RunState* own = RunStateOf(source);
  const Node* before = own == nullptr ? nullptr : own->common.root;
  if (before == nullptr) return {};
  Graft graft(*document, *own->common.document, own->common.members);
  for (std::size_t i = 0; i < before->entry_count(); ++i) {
    const Result<std::string_view> key = pickle::AsString(before->key(i));
    if (!key || root->Find(*key) != nullptr || *key == kNotesKey) continue;
    SW_TRY_ASSIGN(const Node* value, graft.Take(before->value(i)));
    Set(document->arena, root, *key, value);
  }
  return {};
}

Result<Document> CommonState(const Writing& writing) {
  const Checkpoint& source = writing.source;
  const RunState* own = RunStateOf(source);
  Document document;
  Arena& arena = document.arena;
  Node* root = arena.Dict();
  if (HasArgs(source)) Set(arena, root, "args", ArgsNode(arena, writing));
  Set(arena, root, "checkpoint_version", arena.Float(kVersion));
  Set(arena, root, "iteration", CountNode(arena, source.iteration ? *source.iteration : 0));
  if (writing.has_optimizer) {
    SW_TRY_ASSIGN(const std::optional<double> step, StepOf(source));
    SW_TRY_ASSIGN(const Node* optimizers, OptimizersNode(document, writing, step));
    Set(arena, root, "optimizer", optimizers);
    if (writing.to.run)
      Set(arena, root, "opt_param_scheduler", ScheduleNode(arena, *writing.to.run));
  }
  Set(arena, root, "content_metadata", ContentNode(arena, writing.to));
  SW_TRY(AddOthers(source, &document, root));
  if (own == nullptr || own->noted) Set(arena, root, kNotesKey, NotesNode(arena, source));
  document.root = root;
  return document;
}

}  // namespace shardwright::checkpoints::megatron
