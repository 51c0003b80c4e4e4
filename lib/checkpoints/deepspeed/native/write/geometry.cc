// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/deepspeed/native/write/regroup_internal.h"
#include "checkpoints/deepspeed/native/write/write_internal.h"
#include "checkpoints/model/source.h"
#include "checkpoints/tp_rules/quantized.h"
#include "engine/layout/rule.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"
#include "support/base/text.h"
#include "support/os/dir.h"

namespace shardwright::checkpoints::deepspeed {

namespace {

Status FindStates(const Checkpoint& source, Geometry& geometry) {
  geometry.states = {std::string(layout::kMaster), std::string(layout::kWeight),
                     std::string(layout::kBuffer), std::string(layout::kFrozen)};
  geometry.states.insert(geometry.states.end(), source.states.begin(), source.states.end());
  const layout::TensorIndex index(source.map);
  geometry.dtypes.resize(source.params.size());
  for (std::size_t i = 0; i < source.params.size(); ++i) {
    const Param& param = source.params[i];
    auto& dtypes = geometry.dtypes[i];
    dtypes.resize(geometry.states.size());
    if (!param.alias_of.empty()) continue;
    for (std::uint32_t state = 0; state < geometry.states.size(); ++state) {
      const auto found = index.Find(param.name, geometry.states[state]);
      if (found) dtypes[state] = source.map.tensors[*found].dtype;
    }
    const bool trainable = param.kind == ParamKind::kTrainable;
    const std::uint32_t needed = param.kind == ParamKind::kBuffer   ? kBuffer
                                 : param.kind == ParamKind::kFrozen ? kFrozen
                                                                    : kFp32;
    if (!dtypes[needed] && !(trainable && dtypes[kWeight])) {
      return Fail(Errc::kBadInput, "parameter ", Quoted(param.name), ": the source has no \"",
                  geometry.states[needed], "\" of it");
    }
    if (!trainable) continue;
    if (!dtypes[kFp32]) dtypes[kFp32] = DType::kF32;
    dtypes[kWeight] = param.dtype;
  }
  return {};
}

/// Sets the types of the target's weights: the source's, unless the topology specifies another.
void ConvertWeights(Geometry& geometry) {
  const bool asked = geometry.to.dtype != geometry.from.dtype;
  std::vector<NamedTensor> all;
  for (const Param& param : geometry.params) all.push_back({param.name, param.dtype, param.shape});
  const auto scales = QuantizationTensors(all);
  for (std::size_t i = 0; i < geometry.params.size(); ++i) {
    Param& param = geometry.params[i];
    const bool floating =
        param.dtype == DType::kF32 || param.dtype == DType::kF16 || param.dtype == DType::kBF16;
    if (!asked || !floating || param.kind == ParamKind::kBuffer) continue;
    if (param.kind == ParamKind::kFrozen && scales.contains(param.name)) continue;
    param.dtype = geometry.to.dtype;
    auto& dtypes = geometry.dtypes[i];
    if (dtypes[kWeight]) dtypes[kWeight] = param.dtype;
    if (dtypes[kFrozen]) dtypes[kFrozen] = param.dtype;
  }
}

Status MakeCuts(Geometry& geometry) {
  geometry.cuts.reserve(geometry.params.size() * geometry.to.tp);
  for (const Param& param : geometry.params) {
    const bool whole = geometry.to.tp == 1 && !param.rule.padded;
    for (std::uint64_t rank = 0; rank < geometry.to.tp; ++rank) {
      const bool same = rank > 0 && (param.rule.split == layout::Split::kReplicated ||
                                     param.rule.split == layout::Split::kAverage);
      if (same) {
        geometry.cuts.push_back(geometry.cuts.back());
        continue;
      }
      if (whole) {
        geometry.cuts.push_back(
            std::make_shared<const layout::Cut>(layout::Cut::Whole(param.shape)));
        continue;
      }
      auto cut = layout::MakeCut(param.rule, param.shape, geometry.to.tp, rank);
      if (!cut) return Within("parameter " + Quoted(param.name), std::move(cut).error());
      if (cut->view() != param.shape) {
        auto shape = layout::ShardShape(param.rule, param.shape, geometry.to.tp, rank);
        if (!shape) return Within("parameter " + Quoted(param.name), std::move(shape).error());
        geometry.viewed.emplace(geometry.cuts.size(), *std::move(shape));
      }
      geometry.cuts.push_back(std::make_shared<const layout::Cut>(*std::move(cut)));
    }
  }
  return {};
}

Status PlaceOnStages(Geometry& geometry) {
  geometry.stage_params.resize(geometry.to.pp);
  for (std::uint32_t i = 0; i < geometry.params.size(); ++i) {
    const Param& param = geometry.params[i];
    if (geometry.to.pipeline && param.alias_of.empty() && !param.layer &&
        param.tied_layers.empty()) {
      return Fail(Errc::kBadInput, "parameter ", Quoted(param.name),
                  ": no layer of the pipeline holds it");
    }
    for (std::uint32_t stage = 0; stage < geometry.to.pp; ++stage) {
      if (geometry.StageHolds(stage, i)) geometry.stage_params[stage].push_back(i);
    }
  }
  return {};
}

/// Computes flat order, extents and offsets of one group on one
/// mp rank. Empty if the rank has no parameter of the group.
Result<FlatGroup> Flatten(const Geometry& geometry, std::uint32_t source, std::uint32_t mp) {
  const Group& group = geometry.groups[source];
  const Topology& to = geometry.to;
  FlatGroup flat;
  flat.source = source;
  flat.moe = group.moe;
  flat.ranks = to.zero == 0 ? 1 : group.moe ? to.dp / to.ep : to.dp;
  std::vector<std::uint32_t> held;
  for (std::uint32_t param : group.params) {
    if (!geometry.StageHolds(geometry.stage_of(mp), param)) continue;
    // ZeRO of DeepSpeed omits parameters without elements from its groups.
    if (to.zero > 0 && geometry.cut(param, mp)->shard_elems() == 0) continue;
    held.push_back(param);
  }
  if (group.moe) {
    SW_TRY_ASSIGN(flat.params, SplitExperts(geometry.params, held, to.ep));
  } else {
    flat.params = {std::move(held)};
  }
  if (to.round_robin && to.zero > 0) {
    for (auto& params : flat.params) {
      std::vector<std::uint32_t> reordered;
      reordered.reserve(params.size());
      for (std::uint32_t at : RoundRobinOrder(params.size(), flat.ranks)) {
        reordered.push_back(params[at]);
      }
      params = std::move(reordered);
    }
  }
  for (std::uint32_t param : flat.params[0]) {
    const std::uint64_t elems = geometry.cut(param, mp)->shard_elems();
    flat.offsets.push_back(flat.total);
    flat.elems.push_back(elems);
    SW_TRY_ASSIGN(flat.total, CheckedAdd(flat.total, elems));
  }
  flat.partition = flat.total;
  if (to.zero == 1 || to.zero == 2) {
    SW_TRY_ASSIGN(flat.partition, PartitionElems(flat.total, flat.ranks));
  }
  if (to.zero == 3) {
    std::vector<std::uint64_t> shares;
    for (std::uint64_t elems : flat.elems) shares.push_back(ShareElems(elems, flat.ranks));
    SW_TRY_ASSIGN(flat.sub_groups, SubGroups(shares, to.sub_group));
  }
  return flat;
}

Status FlattenAll(Geometry& geometry) {
  geometry.flat.resize(geometry.to.mp());
  for (std::uint32_t mp = 0; mp < geometry.to.mp(); ++mp) {
    std::uint32_t sub_groups = 0;
    for (std::uint32_t group = 0; group < geometry.groups.size(); ++group) {
      auto flat = Flatten(geometry, group, mp);
      if (!flat) return Within("group " + std::to_string(group), std::move(flat).error());
      // DeepSpeed drops groups without parameters before it numbers them.
      if (flat->params[0].empty()) continue;
      flat->sub_group_first = sub_groups;
      sub_groups += static_cast<std::uint32_t>(flat->sub_groups.size());
      geometry.flat[mp].push_back(*std::move(flat));
    }
    const bool trains = !geometry.groups.empty();
    if (trains && geometry.flat[mp].empty()) {
      return Fail(Errc::kInfeasible, "pipeline stage ", geometry.stage_of(mp), " of ",
                  geometry.to.pp, " would hold no trained parameter");
    }
  }
  return {};
}

bool UsesLayerAxes(const Checkpoint& source) {
  return std::any_of(source.map.files.begin(), source.map.files.end(), [](const std::string& path) {
    const std::string name = path.substr(path.find_last_of('/') + 1);
    return name.starts_with("layer_") && name.find("-model_") != std::string::npos &&
           name.find("-model_states.pt") != name.find("-model_");
  });
}

/// Returns true for FusedAdam, which has flat groups at stage 0: bias_correction but no amsgrad.
bool FlatAtStage0(const Checkpoint& source, const EngineState& state) {
  for (const Passed& passed : state.optimizer) {
    if (passed.document.root != nullptr && passed.document.root->Find("fp32_groups_flat")) {
      return true;
    }
  }
  return std::any_of(source.groups.begin(), source.groups.end(), [](const Group& group) {
    return group.options != nullptr && group.options->Find("bias_correction") != nullptr &&
           group.options->Find("amsgrad") == nullptr;
  });
}

bool ExpertDataFirst(const EngineState& state) {
  const pickle::Node* config = state.model_states[0].document.root->Find("ds_config");
  const pickle::Node* flag =
      config == nullptr ? nullptr : config->Find("use_data_before_expert_parallelism");
  return flag != nullptr && flag->kind == pickle::Kind::kBool && flag->integer != 0;
}

std::string TagOf(const Checkpoint& source) {
  return std::string(source.origin == "universal" ? PlainTag(source.tag) : source.tag);
}

std::string Padded(std::uint32_t number) {
  const std::string digits = std::to_string(number);
  return digits.size() < 2 ? "0" + digits : digits;
}

}  // namespace

std::uint32_t Geometry::StageOfLayer(std::uint32_t layer) const {
  // Stages list only layers with state. Other layers belong to the stage of the layers before them.
  std::uint32_t stage = 0;
  for (std::uint32_t i = 0; i < to.stages.size(); ++i) {
    if (!to.stages[i].empty() && to.stages[i].front() <= layer) stage = i;
  }
  return stage;
}

bool Geometry::StageHolds(std::uint32_t stage, std::uint32_t param) const {
  if (!to.pipeline) return true;
  const Param& held = params[param];
  if (held.tied_layers.empty()) return held.layer && StageOfLayer(*held.layer) == stage;
  return std::any_of(held.tied_layers.begin(), held.tied_layers.end(),
                     [&](std::uint32_t layer) { return StageOfLayer(layer) == stage; });
}

std::uint32_t Geometry::FirstWithCut(std::uint32_t param, std::uint32_t tp_rank) const {
  const layout::Split split = params[param].rule.split;
  const bool copies = split == layout::Split::kReplicated || split == layout::Split::kMesh ||
                      split == layout::Split::kListed;
  if (!copies) return tp_rank;
  std::uint32_t first = 0;
  const layout::CutPtr* const all = &cuts[param * to.tp];
  while (first < tp_rank && !(all[first] == all[tp_rank] || *all[first] == *all[tp_rank])) ++first;
  return first;
}

std::string Geometry::LocalName(std::uint32_t param) const {
  const Param& named = params[param];
  if (!named.expert) return named.name;
  const std::uint64_t local = layer_experts.at(named.expert->layer) / to.ep;
  auto name = WithExpertId(named.name, named.expert->expert % local);
  SW_CHECK(name.has_value());  // SplitExperts has already renamed it
  return *std::move(name);
}

std::uint32_t Geometry::PassedRank(std::uint32_t mp) const {
  return static_cast<std::uint32_t>(checkpoints::PassedRank(from, to, mp, model_states.size()));
}

const Passed& Geometry::PassedModel(std::uint32_t mp) const { return model_states[PassedRank(mp)]; }

const Passed* Geometry::PassedOptimizer(std::uint32_t mp) const {
  const std::uint32_t rank = PassedRank(mp);
  const Passed* passed = rank < optimizer.size() ? &optimizer[rank] : nullptr;
  if (passed == nullptr && !optimizer.empty()) passed = &optimizer[0];
  if (passed != nullptr && (passed->document.root == nullptr || !passed->document.root->is_dict()))
    return nullptr;
  return passed;
}

Result<std::optional<DType>> Geometry::GroupDType(const FlatGroup& group, std::size_t ep,
                                                  std::size_t first, std::size_t last,
                                                  std::uint32_t state) const {
  std::optional<std::uint32_t> found;
  for (std::size_t i = first; i < last; ++i) {
    const std::uint32_t param = group.params[ep][i];
    if (!dtypes[param][state]) continue;
    if (!found) found = param;
    if (*dtypes[param][state] != *dtypes[*found][state]) {
      return Fail(Errc::kUnsupported, "\"", states[state], "\" is ", Name(*dtypes[*found][state]),
                  " for ", Quoted(params[*found].name), " and ", Name(*dtypes[param][state]),
                  " for ", Quoted(params[param].name), ", and one flat group holds both");
    }
  }
  if (!found) return std::optional<DType>();
  return dtypes[*found][state];
}

std::string Geometry::PathOf(const FileId& id) const {
  const std::string mp = "mp_rank_" + Padded(id.mp);
  const std::string rank = std::to_string(id.rank);
  switch (id.kind) {
    case FileKind::kModel:
      return tag + "/" + (to.zero == 3 ? "zero_pp_rank_" + rank + "_" : "") + mp +
             "_model_states.pt";
    case FileKind::kOptimizer:
      return tag + "/" + (to.dtype == DType::kBF16 ? "bf16_" : "") + "zero_pp_rank_" + rank + "_" +
             mp + "_optim_states.pt";
    case FileKind::kLayer:
      return tag + "/layer_" + Padded(id.layer) + "-" +
             (to.tp > 1 || layer_axes ? "model_" + Padded(tp_rank_of(id.mp)) + "-" : "") +
             "model_states.pt";
    case FileKind::kExpert:
      return tag + "/layer_" + std::to_string(id.layer) + "_expert_" + std::to_string(id.expert) +
             "_" + mp + "_model_states.pt";
    case FileKind::kExpertOptimizer:
      return tag + "/expp_rank_" + rank + "_" + mp + "_optim_states.pt";
  }
  return tag;
}

namespace {

bool HasState(const Checkpoint& source, std::string_view state) {
  return std::find(source.states.begin(), source.states.end(), state) != source.states.end();
}

bool AnyGroupHas(const Checkpoint& source, std::string_view option) {
  return std::any_of(source.groups.begin(), source.groups.end(), [&](const Group& group) {
    return group.options != nullptr && group.options->Find(option) != nullptr;
  });
}

/// Fails for states that an optimizer stores in another shape at some stages.
Status CheckStates(const Checkpoint& source, const Topology& to) {
  const auto refuse = [&](const char* optimizer, const char* state, const char* want) {
    return Fail(Errc::kUnsupported, optimizer, ": its state \"", state, "\" is ", want,
                " with ZeRO stage ", to.zero);
  };
  const bool partitions = to.zero == 1 || to.zero == 2;
  if (partitions && HasState(source, "momentum_buffer") && AnyGroupHas(source, "use_muon")) {
    return refuse("DeepSpeed Muon", "momentum_buffer", "kept for whole parameters");
  }
  if (to.zero == 0 && HasState(source, "p0") && AnyGroupHas(source, "growth_rate")) {
    return refuse("Prodigy", "p0", "a vector without the parameter's shape");
  }
  return {};
}

/// Returns true if the run uses DeepSpeed's BF16_Optimizer at stage 1: its configuration
/// accumulates gradients of bf16 weights in float32, or that optimizer wrote the source's shards.
bool IsForBf16Optimizer(const Geometry& geometry) {
  if (geometry.to.zero != 1 || geometry.to.dtype != DType::kBF16) return false;
  const pickle::Node* config = geometry.model_states[0].document.root->Find("ds_config");
  const pickle::Node* types = config == nullptr ? nullptr : config->Find("data_types");
  const pickle::Node* gradients = types == nullptr ? nullptr : types->Find("grad_accum_dtype");
  if (gradients != nullptr && gradients->is_string()) {
    return gradients->text == "fp32" || gradients->text == "float32";
  }
  const Passed* passed = geometry.PassedOptimizer(0);
  return geometry.from.zero == 1 && passed != nullptr &&
         passed->document.root->Find("loss_scaler") == nullptr;
}

Status CheckRoundRobin(const Geometry& geometry) {
  if (!geometry.to.round_robin || !IsForBf16Optimizer(geometry)) return {};
  return Fail(
      Errc::kUnsupported,
      "round_robin=true: with zero=1, bf16 weights and gradients in float32 DeepSpeed ignores "
      "round_robin_gradients and would load tensors into other parameters; omit round_robin");
}

Status MakeInfo(Geometry& geometry) {
  const pickle::Node* own =
      geometry.model_states[0].document.root->Find("universal_checkpoint_info");
  geometry.keeps_info = own != nullptr && geometry.to.tp == geometry.from.tp;
  if (geometry.keeps_info) return {};
  SW_TRY_ASSIGN(geometry.info,
                BuildUniversalInfo(geometry.info_arena, geometry.params, geometry.to.tp));
  return {};
}

}  // namespace

Result<GeometryPtr> MakeGeometry(const Checkpoint& source, const Topology& topology) {
  const EngineState* state = EngineStateOf(source);
  if (state == nullptr || state->model_states.empty() ||
      state->model_states[0].document.root == nullptr ||
      !state->model_states[0].document.root->is_dict()) {
    return Fail(Errc::kBadInput, "the source has no model states to take the training state from");
  }
  SW_TRY(CheckStates(source, topology));
  auto geometry = std::make_shared<Geometry>();
  geometry->to = topology;
  geometry->from = TopologyOf(source.layout);
  geometry->tag = TagOf(source);
  SW_TRY(os::SafeName(geometry->tag));
  geometry->params = source.params;
  geometry->model_states = state->model_states;
  geometry->optimizer = state->optimizer;
  geometry->options_rank = state->options_rank;
  geometry->entries = state->entries;
  SW_TRY(CheckRoundRobin(*geometry));
  geometry->arena = source.arena;
  geometry->frozen_unknown = source.frozen_unknown;
  geometry->expert_data_first = ExpertDataFirst(*state);
  geometry->layer_axes = UsesLayerAxes(source);
  geometry->plain_fp32 = topology.zero == 0 && topology.dtype == DType::kF32;
  geometry->flat_stage0 =
      topology.zero == 0 && topology.dtype != DType::kF32 && FlatAtStage0(source, *state);
  for (std::uint32_t i = 0; i < geometry->params.size(); ++i) {
    const Param& param = geometry->params[i];
    geometry->by_name.emplace(param.name, i);
    if (!param.expert) continue;
    geometry->has_experts = true;
    geometry->frozen_experts = geometry->frozen_experts || param.kind == ParamKind::kFrozen;
    std::uint64_t& experts = geometry->layer_experts[param.expert->layer];
    experts = std::max<std::uint64_t>(experts, std::uint64_t{param.expert->expert} + 1);
    geometry->expert_params[{param.expert->layer, param.expert->expert}].push_back(i);
  }
  SW_TRY(FindStates(source, *geometry));
  ConvertWeights(*geometry);
  SW_TRY(MakeCuts(*geometry));
  SW_TRY_ASSIGN(geometry->groups, RegroupExperts(source, topology));
  SW_TRY(PlaceOnStages(*geometry));
  SW_TRY(MakeInfo(*geometry));
  SW_TRY(FlattenAll(*geometry));
  return GeometryPtr(std::move(geometry));
}

std::optional<std::string> StageGroupsWarning(const Geometry& geometry) {
  const Topology& to = geometry.to;
  const bool sums_norms = (to.zero == 1 || to.zero == 2) && !IsForBf16Optimizer(geometry);
  if (!to.pipeline || !sums_norms) return std::nullopt;
  std::vector<std::string> stages;
  bool differ = false;
  for (std::uint32_t mp = 0; mp < to.mp(); mp += static_cast<std::uint32_t>(to.tp)) {
    std::vector<std::string> groups;
    for (const FlatGroup& group : geometry.flat[mp]) groups.push_back(std::to_string(group.source));
    differ = differ || groups.size() != geometry.flat[0].size();
    stages.push_back(StrCat("stage ", geometry.stage_of(mp), " has ",
                            groups.size() == 1 ? "group " : "groups ", Joined(groups, " and ")));
  }
  if (!differ) return std::nullopt;
  return StrCat("the pipeline stages have different parameter groups (", FirstFew(stages),
                "): with zero=", to.zero,
                " the first training step of DeepSpeed 0.19.8 never returns; choose another number "
                "of stages (pp=) or other ranges (stages=), so that every stage has parameters of "
                "every group");
}

std::vector<FileId> ListFiles(const Geometry& geometry) {
  std::vector<FileId> files;
  const Topology& to = geometry.to;
  const auto ranks = static_cast<std::uint32_t>(to.dp);
  for (std::uint32_t mp = 0; mp < to.mp(); ++mp) {
    const std::uint32_t copies = to.zero == 3 ? ranks : 1;
    for (std::uint32_t rank = 0; rank < copies; ++rank) {
      files.push_back({.kind = FileKind::kModel, .mp = mp, .rank = rank});
    }
    if (to.pipeline) {
      for (std::uint32_t layer : to.stages[geometry.stage_of(mp)]) {
        files.push_back({.kind = FileKind::kLayer, .mp = mp, .layer = layer});
      }
    }
    for (const auto& [expert, params] : geometry.expert_params) {
      if (!geometry.StageHolds(geometry.stage_of(mp), params.front())) continue;
      files.push_back(
          {.kind = FileKind::kExpert, .mp = mp, .layer = expert.first, .expert = expert.second});
    }
    const bool expert_optimizer = to.zero == 0 && geometry.has_experts;
    const std::uint32_t shards = to.zero > 0        ? ranks
                                 : expert_optimizer ? static_cast<std::uint32_t>(to.ep)
                                                    : 0;
    const FileKind kind = to.zero > 0 ? FileKind::kOptimizer : FileKind::kExpertOptimizer;
    for (std::uint32_t rank = 0; rank < shards && !geometry.flat[mp].empty(); ++rank) {
      files.push_back({.kind = kind, .mp = mp, .rank = rank});
    }
  }
  return files;
}

}  // namespace shardwright::checkpoints::deepspeed
