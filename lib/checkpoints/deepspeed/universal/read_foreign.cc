// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "checkpoints/deepspeed/universal/foreign_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"

// Reads the output of DeepSpeed's ds_to_universal: atoms of trainable parameters, and copies of
// the model files, which have names, order, groups, buffers and frozen parameters. It does not
// copy layer files of pipeline checkpoints, so their buffers and frozen parameters are lost.

namespace shardwright::checkpoints::atoms {

using layout::Split;
using pickle::Kind;
using pickle::Node;

namespace {

bool IsTrue(const Node* node) {
  return node != nullptr && node->kind == Kind::kBool && node->integer != 0;
}

std::optional<DType> ConfiguredDType(const Node* config) {
  for (const char* key : {"bf16", "bfloat16"}) {
    if (IsTrue(reader::FindPath(config, {key, "enabled"}))) return DType::kBF16;
  }
  if (IsTrue(reader::FindPath(config, {"fp16", "enabled"}))) return DType::kF16;
  return config != nullptr && config->is_dict() ? std::optional(DType::kF32) : std::nullopt;
}

// Reads the sub-groups of stage 3. Each belongs to the optimizer group that lists it in `params`.
Status ReadSubGroups(Foreign* foreign) {
  const Node* groups = foreign->optimizer->Find("param_groups");
  if (groups == nullptr || !groups->is_list()) {
    return Fail(Errc::kBadInput, "zero/optimizer_state.pt: param_groups: list expected, found ",
                pickle::Describe(groups));
  }
  for (std::uint32_t group = 0; group < groups->items.size(); ++group) {
    const Node* ids = groups->items[group]->Find("params");
    if (ids == nullptr || !ids->is_list()) {
      return Fail(Errc::kBadInput, "zero/optimizer_state.pt: params: list expected, found ",
                  pickle::Describe(ids));
    }
    for (const Node* id : ids->items) {
      SW_TRY_ASSIGN(const std::uint64_t index, pickle::AsCount(id));
      if (index != foreign->sub_groups.size()) {
        return Fail(Errc::kBadInput, "zero/optimizer_state.pt: params: sub-group ",
                    foreign->sub_groups.size(), " expected, found ", index);
      }
      foreign->sub_groups.push_back(group);
    }
  }
  return {};
}

Status ReadShapes(Foreign* foreign, Model* model) {
  const std::string& name = foreign->name_of(*model);
  const Node* list = model->root->Find("param_shapes");
  if (list == nullptr || !list->is_list()) {
    return Fail(Errc::kBadInput, name, ": param_shapes: list expected, found ",
                pickle::Describe(list));
  }
  if (foreign->stage3 && list->items.size() != foreign->sub_groups.size()) {
    return Fail(Errc::kBadInput, name, ": param_shapes: ", foreign->sub_groups.size(),
                " sub-groups expected, found ", list->items.size());
  }
  for (std::uint32_t i = 0; i < list->items.size(); ++i) {
    auto shapes = reader::ShapesOf(list->items[i]);
    if (!shapes) return Within(name + ": param_shapes", std::move(shapes).error());
    const std::uint32_t group = foreign->stage3 ? foreign->sub_groups[i] : i;
    if (model->groups.size() <= group) model->groups.resize(group + 1);
    for (NamedShape& shape : *shapes) {
      if (shape.name.find(".deepspeed_experts.") != std::string::npos) {
        return Fail(Errc::kUnsupported, name, ": \"", shape.name,
                    "\": universal folders written by DeepSpeed's converter mix up the experts of "
                    "MoE layers");
      }
      if (!model->shapes.emplace(shape.name, shape.shape).second) {
        return Fail(Errc::kBadInput, name, ": param_shapes: \"", shape.name, "\" occurs twice");
      }
      foreign->sub_group_of.emplace(shape.name, i);
      model->groups[group].push_back(std::move(shape));
    }
  }
  return {};
}

Status ReadDegrees(Foreign* foreign) {
  Topology& to = foreign->reading.topology;
  const std::uint64_t mp = foreign->models.size();
  const Node* dims = foreign->models.front().root->Find("checkpoint_parallel_dimensions");
  if (dims != nullptr && dims->is_dict()) {
    SW_TRY_ASSIGN(to.tp, pickle::AsCount(dims->Find("tp_degree")));
    SW_TRY_ASSIGN(to.pp, pickle::AsCount(dims->Find("pp_degree")));
    SW_TRY_ASSIGN(const std::uint64_t product, CheckedMul(to.tp, to.pp));
    if (product != mp) {
      return Fail(Errc::kBadInput, foreign->name_of(foreign->models.front()), ": tp_degree ", to.tp,
                  " and pp_degree ", to.pp, ", but there are ", mp, " model files");
    }
    return {};
  }
  const auto& first = foreign->models.front().shapes;
  const auto& last = foreign->models.back().shapes;
  const bool peers = first.size() == last.size() &&
                     std::equal(first.begin(), first.end(), last.begin(),
                                [](const auto& a, const auto& b) { return a.first == b.first; });
  const bool disjoint = std::none_of(first.begin(), first.end(),
                                     [&](const auto& entry) { return last.contains(entry.first); });
  if (mp > 1 && !peers && !(disjoint && mp == 2)) {
    return Fail(Errc::kUnsupported, foreign->name_of(foreign->models.front()),
                ": checkpoint_parallel_dimensions is missing, and parameter names do not "
                "distinguish tensor from pipeline parallelism");
  }
  to.tp = peers ? mp : 1;
  to.pp = peers ? 1 : mp;
  return {};
}

Status ReadTopology(Foreign* foreign) {
  Topology& to = foreign->reading.topology;
  const Node* root = foreign->models.front().root;
  const Node* config = root->Find("ds_config");
  SW_TRY(ReadDegrees(foreign));
  if (const Node* world = root->Find("dp_world_size")) {
    auto ranks = pickle::AsCount(world);
    if (!ranks) return Within("dp_world_size", std::move(ranks).error());
    to.dp = std::max<std::uint64_t>(*ranks, 1);
  }
  if (foreign->stage3) {
    to.zero = 3;
  } else if (const Node* stage = foreign->optimizer->Find("zero_stage")) {
    SW_TRY_ASSIGN(to.zero, reader::StageOf(stage));
  } else {
    to.zero = 1;
    to.bf16_optimizer = true;
  }
  const Node* zero = reader::FindPath(config, {"zero_optimization"});
  if (const auto size = pickle::AsCount(reader::FindPath(zero, {"sub_group_size"}));
      foreign->stage3 && size && *size > 0) {
    to.sub_group = *size;
  }
  to.round_robin = to.zero < 3 && IsTrue(reader::FindPath(zero, {"round_robin_gradients"}));
  const Node* module = root->Find("module");
  to.pipeline = module == nullptr || !module->is_dict();
  std::optional<DType> dtype = to.bf16_optimizer ? std::optional(DType::kBF16) : std::nullopt;
  if (!to.pipeline && !foreign->stage3) {
    for (std::size_t i = 0; i < module->entry_count() && !dtype; ++i) {
      if (!module->key(i)->is_string() || !module->value(i)->is_tensor()) continue;
      const bool known = foreign->models.front().shapes.contains(module->key(i)->text);
      if (known) dtype = module->value(i)->tensor->dtype;
    }
  }
  if (!dtype) dtype = ConfiguredDType(config);
  if (!dtype) {
    foreign->out().warnings.push_back(
        "no file records the type of the compute weights: float32 is assumed");
  }
  to.dtype = dtype.value_or(DType::kF32);
  return {};
}

std::optional<std::uint32_t> LayerOf(const std::string& name) {
  std::uint64_t layer = 0;
  std::size_t at = 0;
  for (; at < name.size() && name[at] >= '0' && name[at] <= '9' && at < 9; ++at) {
    layer = layer * 10 + static_cast<std::uint64_t>(name[at] - '0');
  }
  if (at == 0 || at >= name.size() || name[at] != '.') return std::nullopt;
  return static_cast<std::uint32_t>(layer);
}

// Returns a trainable parameter's shards on all tensor-parallel ranks of its first stage.
Result<std::vector<Shape>> ShardsOf(const Foreign& foreign, const std::string& name) {
  std::vector<Shape> shards;
  const std::uint64_t tp = foreign.tp();
  for (std::uint64_t stage = 0; stage < foreign.reading.topology.pp; ++stage) {
    for (std::uint64_t rank = 0; rank < tp; ++rank) {
      const Model& model = foreign.models[stage * tp + rank];
      const auto shape = model.shapes.find(name);
      if (shape == model.shapes.end() && !shards.empty()) {
        return Fail(Errc::kBadInput, foreign.name_of(model), ": param_shapes lacks \"", name,
                    "\", which other tensor-parallel ranks have");
      }
      if (shape != model.shapes.end()) shards.push_back(shape->second);
    }
    if (!shards.empty()) break;
  }
  return shards;
}

// Returns the rule of a `sub_param_shape` in the shape of the atom, which may be a view
// of a parameter with shards of fewer dimensions. Returns nothing for any other shape.
Result<std::optional<layout::SplitRule>> RuleOfSubShape(const Node* sub, const Atom& atom,
                                                        const Shape& shard) {
  const Node* fields = sub->kind == Kind::kObject && sub->state != nullptr ? sub->state : sub;
  SW_TRY_ASSIGN(const std::uint64_t dim, pickle::AsCount(fields->Find("partition_dim")));
  const Node* shape = fields->Find("shape");
  if (shape == nullptr || dim >= shape->items.size() || shape->items.size() != atom.shape.size()) {
    return std::nullopt;
  }
  layout::SplitRule rule;
  rule.split = Split::kSub;
  rule.dim = static_cast<std::uint32_t>(dim);
  const auto sizes = pickle::AsShape(shape->items[dim]);
  if (!sizes) return std::nullopt;
  rule.sub_sizes = *sizes;
  if (atom.shape.size() != shard.size()) rule.view = atom.shape;
  return rule;
}

// Returns the rule from the keys of an atom, which record how it was merged. With
// one rank DeepSpeed writes `cat_dim` 0 for every parameter, so the keys are ignored.
Result<std::optional<layout::SplitRule>> RuleOfKeys(const Atom& atom,
                                                    const std::vector<Shape>& shards) {
  const std::size_t tp = shards.size();
  if (const Node* sub = atom.keys->Find("sub_param_shape")) {
    SW_TRY_ASSIGN(auto rule, RuleOfSubShape(sub, atom, shards.front()));
    if (rule) rule->origin = "keys of its atom";
    return rule;
  }
  layout::SplitRule rule;
  rule.origin = "keys of its atom";
  const Node* cat = atom.keys->Find("cat_dim");
  if (cat == nullptr) {
    if (tp == 1) return std::nullopt;
    rule.split = Split::kReplicated;
    return rule;
  }
  SW_TRY_ASSIGN(const std::uint64_t dim, pickle::AsCount(cat));
  if (const Node* count = atom.keys->Find("param_n_sub_params")) {
    SW_TRY_ASSIGN(const std::uint64_t subs, pickle::AsCount(count));
    if (dim >= atom.shape.size() || subs == 0 || subs > atom.shape[dim] ||
        atom.shape[dim] % subs != 0) {
      return Fail(Errc::kBadInput, "param_n_sub_params: ", subs, " equal parts along dimension ",
                  dim, " do not fit shape ", ToString(atom.shape));
    }
    rule.split = Split::kSub;
    rule.dim = static_cast<std::uint32_t>(dim);
    rule.sub_sizes.assign(subs, atom.shape[dim] / subs);
    return rule;
  }
  if (tp == 1 && dim == 0) return std::nullopt;
  rule.split = Split::kDim;
  rule.dim = static_cast<std::uint32_t>(dim);
  return rule;
}

}  // namespace

Result<Ruled> RuleOf(const Foreign& foreign, const std::string& name,
                     const std::vector<Shape>& shards, const Atom* atom) {
  const bool dict = atom != nullptr && atom->keys != nullptr;
  if (dict && !foreign.info.says_anything()) {
    SW_TRY_ASSIGN(auto user, foreign.chosen.RuleFor(name, shards, Patterns::From::kUser));
    SW_TRY_ASSIGN(auto keys, RuleOfKeys(*atom, shards));
    if (!user && keys) {
      Ruled ruled{*std::move(keys), {}};
      SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(ruled.rule, shards));
      return ruled;
    }
  }
  const RuleSource* const own = &foreign.info;
  return DecideRule(std::span(&own, 1), foreign.chosen, name, shards);
}

namespace {

// Adds the step of a stage-3 parameter, which rank 0's shard stores with the sub-group.
Status AddStage3Step(Foreign* foreign, Param* param, std::uint32_t file) {
  const Passed& passed = foreign->reading.state.optimizer.front();
  const Node* state = reader::FindPath(foreign->optimizer, {"optimizer_state_dict", "state"});
  const Node* mine = pickle::FindInt(state, foreign->sub_group_of.at(param->name));
  if (mine == nullptr || !mine->is_dict()) return {};
  const Node* step = mine->Find("step");
  if (step == nullptr) return {};
  SW_TRY_ASSIGN(auto scalar, reader::ScalarOf(&foreign->reading, file, passed.document,
                                              layout::kStep, step, param->shape));
  if (scalar) param->scalars.push_back(*std::move(scalar));
  return {};
}

Status AddStep(Foreign* foreign, Param* param) {
  const auto file = foreign->folder.Find(AtomName(param->name, layout::kStep));
  if (!file && foreign->stage3) {
    SW_TRY_ASSIGN(const std::uint32_t optimizer, foreign->folder.Need("zero/optimizer_state.pt"));
    return AddStage3Step(foreign, param, optimizer);
  }
  if (!file) return {};
  const SourceFile& source = foreign->reading.source.files[*file];
  auto document = torch_pt::Parse(*source.containers.front().metadata);
  if (!document) return Within(source.path, std::move(document).error());
  SW_TRY_ASSIGN(auto scalar, reader::ScalarOf(&foreign->reading, *file, *document, layout::kStep,
                                              document->root, param->shape));
  if (!scalar) {
    return Fail(Errc::kBadInput, source.name, ": one number expected, found ",
                pickle::Describe(document->root));
  }
  // The value may be a node of this document, which is freed here.
  if (scalar->value != nullptr) {
    Node* kept = foreign->out().arena->New(scalar->value->kind);
    kept->integer = scalar->value->integer;
    kept->real = scalar->value->real;
    kept->text = scalar->value->text;
    scalar->value = kept;
  }
  param->scalars.push_back(*std::move(scalar));
  return {};
}

Status AddTrainable(Foreign* foreign, const std::string& name, std::uint32_t group) {
  const std::vector<std::string>& states = foreign->folder.StatesOf(name);
  if (std::find(states.begin(), states.end(), layout::kMaster) == states.end()) {
    return Fail(Errc::kNotFound, foreign->reading.source.tag, ": ", AtomName(name, layout::kMaster),
                " is missing");
  }
  Param param;
  param.name = name;
  param.group = static_cast<std::int32_t>(group);
  param.dtype = foreign->reading.topology.dtype;
  SW_TRY_ASSIGN(const std::vector<Shape> shards, ShardsOf(*foreign, name));
  SW_TRY_ASSIGN(const Atom master,
                OpenAtom(&foreign->reading, foreign->folder, name, layout::kMaster));
  if (master.keys != nullptr && IsTrue(master.keys->Find("is_expert_param"))) {
    return Fail(Errc::kUnsupported, "\"", name, "\": AutoEP experts are not supported");
  }
  SW_TRY_ASSIGN(Ruled ruled, RuleOf(*foreign, name, shards, &master));
  param.rule = std::move(ruled.rule);
  param.shape = std::move(ruled.whole);
  for (const std::string& state : states) {
    if (foreign->only_weights && !layout::IsModelState(state)) continue;
    SW_TRY_ASSIGN(const Atom atom, OpenAtom(&foreign->reading, foreign->folder, name, state));
    SW_TRY(AddAtom(&foreign->reading, param, state, atom));
  }
  if (!foreign->only_weights) SW_TRY(AddStep(foreign, &param));
  if (foreign->reading.topology.pipeline) {
    param.layer = LayerOf(name);
    if (!param.layer) {
      return Fail(Errc::kUnsupported, "\"", name,
                  "\": universal folders written by DeepSpeed's converter do not record which "
                  "pipeline layers share it");
    }
  }
  Checkpoint& out = foreign->out();
  foreign->by_name.emplace(name, static_cast<std::uint32_t>(out.params.size()));
  out.params.push_back(std::move(param));
  return {};
}

// Finds the layers with state, by pipeline stage.
void ReadStages(Foreign* foreign) {
  Topology& to = foreign->reading.topology;
  if (!to.pipeline) return;
  to.stages.assign(to.pp, {});
  for (std::uint64_t stage = 0; stage < to.pp; ++stage) {
    std::vector<std::uint32_t>& layers = to.stages[stage];
    for (const auto& [name, shape] : foreign->models[stage * to.tp].shapes) {
      if (const auto layer = LayerOf(name)) layers.push_back(*layer);
    }
    std::sort(layers.begin(), layers.end());
    layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  }
}

Status AddAllTrainable(Foreign* foreign) {
  Checkpoint& out = foreign->out();
  std::unordered_set<std::string> seen;
  std::size_t groups = 0;
  for (const Model& model : foreign->models) groups = std::max(groups, model.groups.size());
  if (foreign->stage3 && !foreign->only_weights) {
    groups = std::max(groups, foreign->optimizer->Find("param_groups")->items.size());
  }
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const Model& model : foreign->models) {
    // DeepSpeed's converter keeps only the options of rank 0's groups, so they cannot identify it.
    if (!foreign->only_weights && !model.groups.empty() && model.groups.size() < groups) {
      return Fail(Errc::kUnsupported, foreign->name_of(model),
                  ": param_shapes: ", model.groups.size(), " groups, another stage has ", groups,
                  ": the folder does not record which groups this stage has: convert the native "
                  "checkpoint instead");
    }
    for (const auto& [name, shape] : model.shapes) {
      names.push_back(name);
      shapes.push_back(shape);
    }
  }
  foreign->chosen = foreign->reading.patterns.ForModel(names, shapes);
  for (std::uint32_t group = 0; group < groups; ++group) {
    out.groups.emplace_back();
    for (const Model& model : foreign->models) {
      if (group >= model.groups.size()) continue;
      for (const NamedShape& named : model.groups[group]) {
        if (!seen.insert(named.name).second) continue;
        out.groups.back().params.push_back(static_cast<std::uint32_t>(out.params.size()));
        SW_TRY(AddTrainable(foreign, named.name, group));
      }
    }
  }
  // All states except the master weight belong to the optimizer.
  for (const auto& [name, states] : foreign->folder.params()) {
    if (!seen.contains(name)) continue;
    for (const std::string& state : states) {
      if (state != layout::kMaster && !foreign->only_weights &&
          std::find(out.states.begin(), out.states.end(), state) == out.states.end()) {
        out.states.push_back(state);
      }
    }
  }
  std::sort(out.states.begin(), out.states.end());
  return {};
}

}  // namespace

namespace {

/// Reads model files and, except for weights only, the optimizer. With weights only,
/// file names show if the source is of stage 3, and all sub-groups belong to one group.
Status ReadStates(Foreign* foreign, std::uint64_t mp) {
  if (!foreign->only_weights) {
    SW_TRY(ReadPassed(&foreign->reading, foreign->folder, mp));
    foreign->optimizer = foreign->reading.state.optimizer.front().document.root;
    foreign->stage3 = foreign->optimizer->Find("optimizer_state_dict") != nullptr;
    return foreign->stage3 ? ReadSubGroups(foreign) : Status();
  }
  SW_TRY(ReadModelStates(&foreign->reading, foreign->folder, mp));
  foreign->optimizer = foreign->out().arena->Dict();
  foreign->stage3 = !foreign->folder.stage3_models().empty();
  const Node* shapes =
      foreign->reading.state.model_states.front().document.root->Find("param_shapes");
  if (foreign->stage3 && shapes != nullptr && shapes->is_list()) {
    foreign->sub_groups.assign(shapes->items.size(), 0);
  }
  return {};
}

}  // namespace

Result<Checkpoint> ReadForeign(const SourceSet& source, const Patterns& patterns,
                               bool only_weights) {
  Foreign foreign(source, patterns);
  foreign.only_weights = only_weights;
  Checkpoint& out = foreign.out();
  out.arena = std::make_shared<pickle::Arena>();
  const auto& models = foreign.folder.models();
  const std::uint64_t mp = models.empty() ? 1 : models.rbegin()->first + 1;
  SW_TRY(ReadStates(&foreign, mp));
  for (std::uint64_t rank = 0; rank < mp; ++rank) {
    Model model;
    model.file = models.at(rank);
    model.root = foreign.reading.state.model_states[rank].document.root;
    SW_TRY(ReadShapes(&foreign, &model));
    foreign.models.push_back(std::move(model));
  }
  SW_TRY(ReadTopology(&foreign));
  auto info = UniversalInfo::Parse(foreign.models.front().root->Find("universal_checkpoint_info"));
  if (!info) return Within(foreign.name_of(foreign.models.front()), std::move(info).error());
  foreign.info = *std::move(info);
  ReadStages(&foreign);
  SW_TRY(AddAllTrainable(&foreign));
  if (!only_weights) SW_TRY(SetOptions(&foreign.reading));
  SW_TRY(AddRest(&foreign));
  // The target does not receive rank 0's whole shard, which stage 3 stores in optimizer_state.pt.
  Finish(&foreign.reading);
  if (only_weights) out.only_weights = OnlyWeights{};  // atoms have the master weights
  return std::move(foreign.reading.out);
}

}  // namespace shardwright::checkpoints::atoms
