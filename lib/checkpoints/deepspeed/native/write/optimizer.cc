// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/native/write/write_internal.h"

namespace shardwright::checkpoints::deepspeed {

using pickle::Arena;
using pickle::Node;

namespace {

constexpr const char* kFragment = "deepspeed.utils.tensor_fragment.fragment_address";
constexpr const char* kStage = "deepspeed.runtime.zero.config.ZeroStageEnum";

const Node* StageNode(Arena& arena, std::uint64_t stage) {
  Node* node = arena.New(pickle::Kind::kObject);
  node->build = pickle::Build::kReduce;
  node->callable = arena.Global(kStage);
  node->args = arena.Tuple({arena.Count(stage)});
  return node;
}

void Append(Node* dict, const Node* key, const Node* value) {
  dict->items.push_back(key);
  dict->items.push_back(value);
}

const Node* ScalarNode(Document& document, const Scalar& scalar) {
  if (!scalar.is_tensor) return scalar.value;
  return document.AddInline(scalar.bytes, scalar.dtype, scalar.shape);
}

/// Returns scalars such as the step for parameters flattened together: one value for all.
Result<std::vector<Scalar>> SharedScalars(const Geometry& geometry, const FlatGroup& group,
                                          std::size_t ep, std::size_t first, std::size_t last) {
  const Param* found = nullptr;
  for (std::size_t i = first; i < last; ++i) {
    const Param& param = geometry.params[group.params[ep][i]];
    if (param.scalars.empty()) continue;
    if (found == nullptr) found = &param;
    if (!(param.scalars == found->scalars)) {
      return Fail(Errc::kUnsupported, "\"", found->name, "\" and \"", param.name,
                  "\" have different numbers of steps, but they share a flat group of the "
                  "optimizer, which has one \"",
                  found->scalars.front().state, "\"");
    }
  }
  return found == nullptr ? std::vector<Scalar>() : found->scalars;
}

/// Builds the state dict of a flat group (or sub-group), or null if it
/// never stepped. `cutting` selects the group and the rank's part of it.
Result<const Node*> FlatState(Document& document, const Geometry& geometry, const FlatGroup& group,
                              std::size_t ep, std::size_t first, std::size_t last, Cutting cutting,
                              std::uint64_t elems) {
  Arena& arena = document.arena;
  Node* state = arena.Dict();
  SW_TRY_ASSIGN(const auto scalars, SharedScalars(geometry, group, ep, first, last));
  for (const Scalar& scalar : scalars) {
    Append(state, arena.String(scalar.state), ScalarNode(document, scalar));
  }
  for (cutting.state = kFirstMoment; cutting.state < geometry.states.size(); ++cutting.state) {
    SW_TRY_ASSIGN(const auto dtype, geometry.GroupDType(group, ep, first, last, cutting.state));
    if (!dtype) continue;
    Append(state, arena.String(geometry.states[cutting.state]),
           document.Add(cutting, *dtype, {elems}));
  }
  return state->items.empty() ? nullptr : state;
}

Result<DType> MasterDType(const Geometry& geometry, const FlatGroup& group, std::size_t ep,
                          std::size_t first, std::size_t last) {
  SW_TRY_ASSIGN(const auto dtype, geometry.GroupDType(group, ep, first, last, kFp32));
  return dtype.value_or(DType::kF32);
}

/// Coordinates of a ZeRO rank in the process group that partitions a parameter group.
struct Seat {
  std::size_t ep = 0;
  std::uint64_t rank = 0;
};

Seat SeatOf(const Geometry& geometry, const FlatGroup& group, std::uint32_t rank) {
  if (!group.moe) return {0, rank};
  const ExpertRank place = geometry.PlaceOf(rank);
  return {place.ep, place.edp};
}

/// Lists the parameters in a rank's partition, each with its range of elements.
const Node* SliceMapping(Document& document, const Geometry& geometry, const FlatGroup& group,
                         const Seat& seat) {
  Arena& arena = document.arena;
  Node* mapping = arena.Dict(true);
  const std::uint64_t first = seat.rank * group.partition;
  const std::uint64_t last = first + group.partition;
  auto at = static_cast<std::size_t>(
      std::upper_bound(group.offsets.begin(), group.offsets.end(), first) - group.offsets.begin());
  if (at > 0) --at;
  for (; at < group.offsets.size() && group.offsets[at] < last; ++at) {
    const std::uint64_t from = std::max(first, group.offsets[at]);
    const std::uint64_t to = std::min(last, group.offsets[at] + group.elems[at]);
    if (from >= to) continue;
    Node* address = arena.Dict();
    Set(arena, address, "numel", arena.Count(to - from));
    Set(arena, address, "start", arena.Count(from - first));
    // Local names are those of expert rank 0. Every rank uses the same ones.
    Append(mapping, arena.String(geometry.LocalName(group.params[0][at])),
           arena.Object(kFragment, address));
  }
  return mapping;
}

const Node* ClipGrad(const Geometry& geometry, const Node* source) {
  const Node* clip = source == nullptr ? nullptr : source->Find("clip_grad");
  if (clip != nullptr) return clip;
  const Node* config = geometry.model_states[0].document.root->Find("ds_config");
  clip = config == nullptr ? nullptr : config->Find("gradient_clipping");
  return clip != nullptr && pickle::AsFloat(clip) ? clip : nullptr;
}

const Node* PassedRoot(const Geometry& geometry, std::uint32_t mp) {
  const Passed* passed = geometry.PassedOptimizer(mp);
  return passed == nullptr ? nullptr : passed->document.root;
}

/// Wraps a shard for its file: adds the configuration and version.
Status Finish(Document& document, const Geometry& geometry, std::uint32_t mp, const Node* inner) {
  Arena& arena = document.arena;
  const Passed& passed = geometry.PassedModel(mp);
  const Node* model = passed.document.root;
  Node* root = arena.Dict();
  Set(arena, root, "optimizer_state_dict", inner);
  if (const Node* config = model->Find("ds_config")) {
    Graft graft(document, passed.document, passed.members);
    SW_TRY_ASSIGN(const Node* taken, graft.Take(config));
    Set(arena, root, "ds_config", ConfigNode(arena, geometry, taken));
  }
  Set(arena, root, "ds_version", VersionNode(arena, geometry, model));
  document.root = root;
  return {};
}

}  // namespace

Result<const Node*> OptionsNode(Document& document, const Geometry& geometry,
                                const FlatGroup& group, std::vector<const Node*> ids) {
  Arena& arena = document.arena;
  const Node* source = geometry.groups[group.source].options;
  Node* options = arena.Dict();
  if (source != nullptr) {
    // An option may be a tensor (a learning rate for captured graphs).
    static const Passed kNothing;
    const Passed& passed =
        geometry.optimizer.empty() ? kNothing : geometry.optimizer[geometry.options_rank];
    Graft graft(document, passed.document, passed.members);
    SW_TRY_ASSIGN(const Node* taken, graft.Take(source));
    options = CopyDict(arena, taken);
  }
  if (group.moe) {
    Set(arena, options, "name", arena.String("ep_size_" + std::to_string(geometry.to.ep)));
    Set(arena, options, "moe", arena.Bool(true));
  }
  Set(arena, options, "params", arena.List(std::move(ids)));
  return options;
}

Status BuildZero12(Document& document, const Geometry& geometry, const FileId& id) {
  Arena& arena = document.arena;
  const Node* source = PassedRoot(geometry, id.mp);
  const LossScale scale = LossScaleOf(geometry);
  Node* states = arena.Dict();
  std::vector<const Node*> options, masters, paddings, counts, mappings;
  for (std::uint32_t g = 0; g < geometry.flat[id.mp].size(); ++g) {
    const FlatGroup& group = geometry.flat[id.mp][g];
    const Seat seat = SeatOf(geometry, group, id.rank);
    const std::size_t last = group.params[seat.ep].size();
    const std::uint64_t padding = PartitionPadding(group.total, group.partition, seat.rank);
    Cutting cutting;
    cutting.kind = Cutting::Kind::kFlat;
    cutting.group = g;
    SW_TRY_ASSIGN(const Node* state,
                  FlatState(document, geometry, group, seat.ep, 0, last, cutting, group.partition));
    if (state != nullptr) Append(states, arena.Count(g), state);
    cutting.state = kFp32;
    SW_TRY_ASSIGN(const DType dtype, MasterDType(geometry, group, seat.ep, 0, last));
    masters.push_back(document.Add(cutting, dtype, {group.partition - padding}, true));
    SW_TRY_ASSIGN(const Node* chosen, OptionsNode(document, geometry, group, {arena.Count(g)}));
    options.push_back(chosen);
    paddings.push_back(arena.Count(padding));
    counts.push_back(arena.Count(group.ranks));
    mappings.push_back(SliceMapping(document, geometry, group, seat));
  }
  Node* base = arena.Dict();
  Set(arena, base, "state", states);
  Set(arena, base, "param_groups", arena.List(std::move(options)));
  Node* inner = arena.Dict();
  Set(arena, inner, "loss_scaler", LossScalerNode(arena, scale));
  Set(arena, inner, "dynamic_loss_scale", arena.Bool(scale.dynamic));
  Set(arena, inner, "overflow", arena.Bool(false));
  if (const Node* clip = ClipGrad(geometry, source)) Set(arena, inner, "clip_grad", clip);
  Set(arena, inner, "base_optimizer_state", base);
  Set(arena, inner, "single_partition_of_fp32_groups", arena.List(std::move(masters)));
  Set(arena, inner, "zero_stage", StageNode(arena, geometry.to.zero));
  Set(arena, inner, "group_paddings", arena.List(std::move(paddings)));
  Set(arena, inner, "partition_count", arena.List(std::move(counts)));
  Set(arena, inner, "ds_version",
      VersionNode(arena, geometry, geometry.PassedModel(id.mp).document.root));
  Set(arena, inner, "param_slice_mappings", arena.List(std::move(mappings)));
  return Finish(document, geometry, id.mp, inner);
}

Status BuildZero3(Document& document, const Geometry& geometry, const FileId& id) {
  Arena& arena = document.arena;
  const LossScale scale = LossScaleOf(geometry);
  Node* states = arena.Dict();
  std::vector<const Node*> options, masters;
  for (std::uint32_t g = 0; g < geometry.flat[id.mp].size(); ++g) {
    const FlatGroup& group = geometry.flat[id.mp][g];
    std::vector<const Node*> ids;
    for (std::uint32_t s = 0; s < group.sub_groups.size(); ++s) {
      const SubGroup& sub = group.sub_groups[s];
      Cutting cutting;
      cutting.kind = Cutting::Kind::kSub;
      cutting.group = g;
      cutting.sub_group = s;
      const Node* index = arena.Count(group.sub_group_first + s);
      SW_TRY_ASSIGN(const Node* state, FlatState(document, geometry, group, 0, sub.first, sub.last,
                                                 cutting, sub.elems));
      if (state != nullptr) Append(states, index, state);
      cutting.state = kFp32;
      SW_TRY_ASSIGN(const DType dtype, MasterDType(geometry, group, 0, sub.first, sub.last));
      masters.push_back(document.Add(cutting, dtype, {sub.elems}, true));
      ids.push_back(index);
    }
    SW_TRY_ASSIGN(const Node* chosen, OptionsNode(document, geometry, group, std::move(ids)));
    options.push_back(chosen);
  }
  Node* optimizer = arena.Dict();
  Set(arena, optimizer, "state", states);
  Set(arena, optimizer, "param_groups", arena.List(std::move(options)));
  Node* inner = arena.Dict();
  Set(arena, inner, "zero_stage", StageNode(arena, 3));
  Set(arena, inner, "loss_scaler", LossScalerNode(arena, scale));
  Set(arena, inner, "dynamic_loss_scale", arena.Bool(scale.dynamic));
  Set(arena, inner, "overflow", arena.Bool(false));
  Set(arena, inner, "partition_count", arena.Count(geometry.to.dp));
  Set(arena, inner, "optimizer_state_dict", optimizer);
  Set(arena, inner, "fp32_flat_groups", arena.List(std::move(masters)));
  return Finish(document, geometry, id.mp, inner);
}

namespace {

/// Returns the stage-0 state of one parameter: its scalars, and moments in its own shape.
const Node* ParamState(Document& document, const Geometry& geometry, std::uint32_t param,
                       std::uint32_t mp) {
  Arena& arena = document.arena;
  Node* state = arena.Dict();
  for (const Scalar& scalar : geometry.params[param].scalars) {
    Append(state, arena.String(scalar.state), ScalarNode(document, scalar));
  }
  Cutting cutting;
  cutting.kind = Cutting::Kind::kWhole;
  cutting.param = param;
  for (cutting.state = kFirstMoment; cutting.state < geometry.states.size(); ++cutting.state) {
    const auto& dtype = geometry.dtypes[param][cutting.state];
    if (!dtype) continue;
    Append(state, arena.String(geometry.states[cutting.state]),
           document.Add(cutting, *dtype, geometry.ShardShape(param, mp)));
  }
  return state->items.empty() ? nullptr : state;
}

/// Builds a torch optimizer's state dict, with one entry per parameter.
Result<const Node*> TorchState(Document& document, const Geometry& geometry, std::uint32_t mp,
                               std::uint32_t ep) {
  Arena& arena = document.arena;
  Node* states = arena.Dict();
  std::vector<const Node*> options;
  std::uint64_t index = 0;
  for (const FlatGroup& group : geometry.flat[mp]) {
    std::vector<const Node*> ids;
    for (std::uint32_t param : group.params[group.moe ? ep : 0]) {
      const Node* id = arena.Count(index++);
      ids.push_back(id);
      const Node* state = ParamState(document, geometry, param, mp);
      if (state != nullptr) Append(states, id, state);
    }
    SW_TRY_ASSIGN(const Node* chosen, OptionsNode(document, geometry, group, std::move(ids)));
    options.push_back(chosen);
  }
  Node* optimizer = arena.Dict();
  Set(arena, optimizer, "state", states);
  Set(arena, optimizer, "param_groups", arena.List(std::move(options)));
  return optimizer;
}

void SetScale(Arena& arena, Node* root, const LossScale& scale) {
  Set(arena, root, "dynamic_loss_scale", arena.Bool(scale.dynamic));
  Set(arena, root, "cur_scale", arena.Float(scale.scale));
  Set(arena, root, "cur_iter", arena.Int(scale.iteration));
  if (!scale.dynamic) return;
  Set(arena, root, "last_overflow_iter", arena.Int(scale.last_overflow));
  Set(arena, root, "scale_factor", arena.Float(scale.factor));
  Set(arena, root, "scale_window", arena.Int(scale.window));
}

/// Builds the state of FP16_UnfusedOptimizer: master weights and moments by parameter.
Result<const Node*> UnfusedState(Document& document, const Geometry& geometry, std::uint32_t mp,
                                 std::uint32_t ep) {
  Arena& arena = document.arena;
  Node* root = arena.Dict();
  SetScale(arena, root, LossScaleOf(geometry));
  SW_TRY_ASSIGN(const Node* torch, TorchState(document, geometry, mp, ep));
  Set(arena, root, "optimizer_state_dict", torch);
  std::vector<const Node*> groups;
  for (const FlatGroup& group : geometry.flat[mp]) {
    std::vector<const Node*> masters;
    for (std::uint32_t param : group.params[group.moe ? ep : 0]) {
      Cutting cutting;
      cutting.kind = Cutting::Kind::kWhole;
      cutting.param = param;
      cutting.state = kFp32;
      masters.push_back(document.Add(cutting, geometry.dtypes[param][kFp32].value_or(DType::kF32),
                                     geometry.ShardShape(param, mp), true));
    }
    groups.push_back(arena.List(std::move(masters)));
  }
  Set(arena, root, "fp32_groups", arena.List(std::move(groups)));
  return root;
}

/// Builds the state of FP16_Optimizer: flat groups without padding.
Result<const Node*> FusedState(Document& document, const Geometry& geometry, std::uint32_t mp,
                               std::uint32_t ep) {
  Arena& arena = document.arena;
  Node* states = arena.Dict();
  std::vector<const Node*> options, masters;
  for (std::uint32_t g = 0; g < geometry.flat[mp].size(); ++g) {
    const FlatGroup& group = geometry.flat[mp][g];
    const std::size_t at = group.moe ? ep : 0;
    const std::size_t last = group.params[at].size();
    Cutting cutting;
    cutting.kind = Cutting::Kind::kFlat;
    cutting.group = g;
    SW_TRY_ASSIGN(const Node* state,
                  FlatState(document, geometry, group, at, 0, last, cutting, group.total));
    if (state != nullptr) Append(states, arena.Count(g), state);
    cutting.state = kFp32;
    SW_TRY_ASSIGN(const DType dtype, MasterDType(geometry, group, at, 0, last));
    masters.push_back(document.Add(cutting, dtype, {group.total}, true));
    SW_TRY_ASSIGN(const Node* chosen, OptionsNode(document, geometry, group, {arena.Count(g)}));
    options.push_back(chosen);
  }
  Node* optimizer = arena.Dict();
  Set(arena, optimizer, "state", states);
  Set(arena, optimizer, "param_groups", arena.List(std::move(options)));
  Node* root = arena.Dict();
  if (geometry.to.dtype == DType::kF16) SetScale(arena, root, LossScaleOf(geometry));
  Set(arena, root, "optimizer_state_dict", optimizer);
  Set(arena, root, "fp32_groups_flat", arena.List(std::move(masters)));
  const Node* clip = ClipGrad(geometry, PassedRoot(geometry, mp));
  Set(arena, root, "clip_grad", clip != nullptr ? clip : arena.Float(0.0));
  return root;
}

}  // namespace

Result<const Node*> Stage0Node(Document& document, const Geometry& geometry, std::uint32_t mp,
                               std::uint32_t ep) {
  if (geometry.plain_fp32) return TorchState(document, geometry, mp, ep);
  if (geometry.flat_stage0) return FusedState(document, geometry, mp, ep);
  return UnfusedState(document, geometry, mp, ep);
}

Status BuildExpertOptimizer(Document& document, const Geometry& geometry, const FileId& id) {
  SW_TRY_ASSIGN(const Node* optimizer, Stage0Node(document, geometry, id.mp, id.rank));
  Node* root = document.arena.Dict();
  Set(document.arena, root, "optimizer", optimizer);
  document.root = root;
  return {};
}

}  // namespace shardwright::checkpoints::deepspeed
