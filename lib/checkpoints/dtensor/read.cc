// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "checkpoints/dtensor/dtensor.h"
#include "checkpoints/dtensor/item_table_internal.h"
#include "checkpoints/dtensor/read_internal.h"
#include "checkpoints/pickled/weight_sets.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/mesh_rule.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using layout::MeshSplit;

void MakeParams(Reading* reading) {
  for (const Entry& entry : reading->entries) {
    Param param;
    param.name = entry.name;
    param.shape = entry.spread.first.shape;
    param.dtype = entry.spread.first.dtype;
    param.alias_of = entry.alias_of;
    const bool plain = entry.spread.first.kind == RankTensor::Kind::kPlain;
    param.kind = plain ? ParamKind::kBuffer : ParamKind::kFrozen;
    reading->out.params.push_back(std::move(param));
  }
}

/// Adds the model's tensors. A float32 tensor with optimizer states becomes the master weight.
Status AddModelTensors(Reading* reading) {
  std::unordered_map<std::string, bool> stepped;
  for (const layout::LogicalTensor& tensor : reading->out.map.tensors) stepped[tensor.name] = true;
  const std::vector<std::uint32_t>& files = reading->family.Find(Item::kModel)->files;
  for (std::size_t i = 0; i < reading->entries.size(); ++i) {
    const Entry& entry = reading->entries[i];
    const Param& param = reading->out.params[i];
    if (!entry.alias_of.empty()) continue;
    std::string_view state = layout::kBuffer;
    if (param.kind == ParamKind::kFrozen) state = layout::kFrozen;
    if (param.kind == ParamKind::kTrainable) {
      const bool trained = stepped.contains(param.name) || (param.group >= 0 && !stepped.empty());
      const bool master = param.dtype == DType::kF32 && trained;
      state = master ? layout::kMaster : layout::kWeight;
    }
    SW_TRY(AddTensor(reading, entry.spread, entry.name, state, files));
  }
  return {};
}

void AddTies(Reading* reading) {
  for (std::size_t i = 0; i < reading->entries.size(); ++i) {
    const std::string& holder = reading->entries[i].alias_of;
    if (!holder.empty())
      reading->out.params[i].kind = reading->out.params[reading->by_name.at(holder)].kind;
  }
}

/// Returns the mesh of a tensor that has the most dimensions.
const DeviceMesh* WholeMesh(const Reading& reading) {
  const DeviceMesh* whole = nullptr;
  for (const Entry& entry : reading.entries) {
    const DeviceMesh* mesh = entry.spread.first.mesh.get();
    if (mesh != nullptr && (whole == nullptr || mesh->sizes.size() > whole->sizes.size())) {
      whole = mesh;
    }
  }
  return whole;
}

Role RoleOf(const Reading& reading, const DeviceMesh& mesh, std::size_t dim) {
  if (mesh.names) {
    const std::string& name = (*mesh.names)[dim];
    if (name.find("tp") != std::string::npos) return Role::kTensorParallel;
    if (name.find("replicate") != std::string::npos || name == "ddp") return Role::kReplicate;
    if (name.find("fsdp") != std::string::npos || name.find("shard") != std::string::npos) {
      return Role::kShard;
    }
  }
  bool here = false;
  bool before = false;
  for (const Entry& entry : reading.entries) {
    const RankTensor& tensor = entry.spread.first;
    if (tensor.mesh == nullptr || tensor.splits.size() != mesh.sizes.size()) continue;
    here = here || tensor.splits[dim].shards();
    for (std::size_t i = 0; i < dim; ++i) before = before || tensor.splits[i].shards();
  }
  if (before) return Role::kTensorParallel;
  return here ? Role::kShard : Role::kReplicate;
}

void DescribeMesh(Reading* reading) {
  FilesLayout& own = reading->own;
  const DeviceMesh* mesh = WholeMesh(*reading);
  own.sizes = {reading->family.world};
  own.roles = {Role::kShard};
  if (mesh != nullptr) {
    own.form = mesh->form;
    own.device = mesh->device;
    own.names = mesh->names;
    own.sizes = mesh->sizes;
    own.roles.clear();
    for (std::size_t dim = 0; dim < mesh->sizes.size(); ++dim) {
      own.roles.push_back(RoleOf(*reading, *mesh, dim));
    }
  }
  Mesh& out = reading->out.layout.mesh;
  for (std::size_t dim = 0; dim < own.sizes.size(); ++dim) {
    std::uint64_t& size = own.roles[dim] == Role::kReplicate ? out.dp_replicate
                          : own.roles[dim] == Role::kShard   ? out.dp_shard
                                                             : out.tp;
    size *= own.sizes[dim];
  }
}

/// Records the cut of each parameter, on the whole mesh or on the part without tensor parallelism.
void DescribeSplits(Reading* reading) {
  FilesLayout& own = reading->own;
  for (const Entry& entry : reading->entries) {
    const RankTensor& tensor = entry.spread.first;
    if (tensor.mesh == nullptr) continue;
    ParamSplit split;
    const bool whole = tensor.splits.size() == own.sizes.size();
    for (std::size_t dim = 0; dim < tensor.splits.size(); ++dim) {
      const MeshSplit& one = tensor.splits[dim];
      const Role role = whole ? own.roles[dim] : one.shards() ? Role::kShard : Role::kReplicate;
      if (role == Role::kTensorParallel) {
        split.tp.push_back(one.shards() ? MeshSplit::Shard(one.dim) : MeshSplit::Replicate());
      } else if (one.shards()) {
        split.shard_dim = one.dim;
      }
    }
    own.splits.emplace(entry.name, split);
  }
}

/// Rules for tensor parallelism from the tensors' placements.
class PlacementRules : public RuleSource {
 public:
  PlacementRules(const FilesLayout& own, std::uint64_t tp) : own_(own), tp_(tp) {}

  Result<std::optional<Ruled>> RuleFor(const std::string& name,
                                       std::span<const Shape> shards) const override {
    const auto found = own_.splits.find(name);
    if (tp_ == 1 || found == own_.splits.end()) return std::nullopt;
    Ruled ruled;
    ruled.whole = shards.front();
    if (const std::vector<MeshSplit>& splits = found->second.tp; !splits.empty()) {
      auto rule = layout::RuleOfSplits(own_.tp_sizes(), splits);
      if (!rule) return std::nullopt;
      ruled.rule = *std::move(rule);
    }
    ruled.rule.origin = "placements";
    return ruled;
  }

 private:
  const FilesLayout& own_;
  std::uint64_t tp_;
};

Status DecideRules(Reading* reading) {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const Param& param : reading->out.params) {
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  const Patterns chosen = reading->patterns.ForModel(names, shapes);
  const PlacementRules placements(reading->own, reading->out.layout.mesh.tp);
  const RuleSource* const sources[] = {&placements};
  for (Param& param : reading->out.params) {
    SW_TRY_ASSIGN(Ruled ruled, DecideRule(sources, chosen, param.name, std::span(&param.shape, 1)));
    param.rule = std::move(ruled.rule);
  }
  return {};
}

std::optional<double> StepOf(const Param& param) {
  for (const Scalar& scalar : param.scalars) {
    if (scalar.state != layout::kStep) continue;
    return NumberOf(scalar);
  }
  return std::nullopt;
}

/// Sets the iteration to the optimizer's step, the only counter in the files.
void SetIteration(Checkpoint* out) {
  std::optional<double> step;
  for (const Param& param : out->params) {
    const std::optional<double> one = StepOf(param);
    if (!one) continue;
    if (step && *step != *one) {
      out->iteration = BadInput("the steps of the parameters differ");
      return;
    }
    step = one;
  }
  if (!step || *step < 0 || *step != std::floor(*step) || *step > 1e15) return;
  out->iteration = static_cast<std::uint64_t>(*step);
}

std::string KindOfOptimizer(const std::vector<Group>& groups) {
  if (groups.empty()) return {};
  const pickle::Node* options = groups.front().options;
  const pickle::Node* decoupled = options->Find("decoupled_weight_decay");
  if (decoupled != nullptr && decoupled->kind == pickle::Kind::kBool) {
    return decoupled->integer != 0 ? "adamw" : "adam";
  }
  const bool momentum = groups.front().hyper.momentum.has_value();
  return momentum && options->Find("dampening") != nullptr ? "sgd" : "";
}

/// Records the model's tensors as a set of weights.
void AddOwnSet(Reading* reading) {
  WeightSet own{reading->own.model_item, reading->entries.size(), 0, true};
  for (const Entry& entry : reading->entries) {
    const RankTensor& tensor = entry.spread.first;
    own.bytes += Elems(tensor.shape) * ItemSize(tensor.dtype);
  }
  reading->out.weight_sets.push_back(std::move(own));
}

/// Records an item that has the model's tensors as another set of weights.
Status AddOtherSet(const ItemFiles& item, Reading* reading) {
  SW_TRY_ASSIGN(const torch_pt::Document document, Open(*reading, item.files.front()));
  const pickle::Node* root = document.root;
  if (root == nullptr || !root->is_dict()) return {};
  std::uint64_t same = 0;
  for (std::size_t i = 0; i < root->entry_count(); ++i) {
    const bool named = root->key(i)->is_string() && IsTensor(root->value(i));
    same += named && reading->by_name.contains(root->key(i)->text) ? 1 : 0;
  }
  if (same == 0 || same * 2 < reading->entries.size()) return {};
  reading->out.weight_sets.push_back({item.name, root->entry_count(), 0, false});
  return {};
}

/// Parses and keeps the files of other items, so that the map contains their tensors.
Status ReadOthers(Reading* reading) {
  auto own = std::make_shared<OwnFiles>();
  own->trainer = reading->family.trainer;
  for (const ItemFiles& item : reading->family.items) {
    if (item.item != Item::kOther) continue;
    SW_TRY(AddOtherSet(item, reading));
    OwnFiles::One one{item.name, {}, true};
    for (const std::uint32_t file : item.files) {
      const std::vector<Container>& first = reading->source.files[item.files.front()].containers;
      one.same = one.same && SameSums(first, reading->source.files[file].containers);
      OwnFiles::Passed passed;
      SW_TRY_ASSIGN(passed.document, Open(*reading, file));
      for (std::uint32_t i = 0; i < passed.document.storages.size(); ++i) {
        passed.members.push_back(reading->map.MemberOf(file, passed.document, i));
      }
      one.ranks.push_back(std::move(passed));
    }
    own->items.push_back(std::move(one));
  }
  if (!own->items.empty()) reading->out.own = std::move(own);
  return {};
}

/// Records the sets of weights in the checkpoint, as far as file names show them.
void TakeSets(Reading* reading) {
  Checkpoint& out = reading->out;
  AddOwnSet(reading);
  for (const WeightSet& set : reading->family.sets) {
    if (!set.taken) out.weight_sets.push_back(set);
  }
  out.left_out.insert(out.left_out.end(), reading->family.left_out.begin(),
                      reading->family.left_out.end());
}

void SetStates(Checkpoint* out) {
  for (const layout::LogicalTensor& tensor : out->map.tensors) {
    const bool known =
        std::find(out->states.begin(), out->states.end(), tensor.state) != out->states.end();
    if (!layout::IsModelState(tensor.state) && !known) out->states.push_back(tensor.state);
  }
  std::sort(out->states.begin(), out->states.end());
}

void SetDType(Checkpoint* out) {
  std::map<DType, std::uint64_t> elems;
  for (const Param& param : out->params) {
    if (param.kind == ParamKind::kTrainable && param.alias_of.empty()) {
      elems[param.dtype] += Elems(param.shape);
    }
  }
  const auto most = std::max_element(
      elems.begin(), elems.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != elems.end()) out->layout.dtype = most->first;
}

/// Reads the process group names of every rank. The writer uses them again for an unchanged mesh.
Status ReadGroupNames(Reading* reading) {
  FilesLayout& own = reading->own;
  const ItemFiles& model = *reading->family.Find(Item::kModel);
  // Uses the first tensor on the whole mesh.
  std::string name;
  for (const Entry& entry : reading->entries) {
    const bool whole = entry.spread.first.mesh != nullptr &&
                       entry.spread.first.mesh->sizes.size() == own.sizes.size();
    if (whole && name.empty()) name = entry.name;
  }
  if (name.empty()) return {};
  for (std::uint64_t rank = 0; rank < model.files.size(); ++rank) {
    SW_TRY_ASSIGN(const torch_pt::Document document, Open(*reading, model.files[rank]));
    SW_TRY_ASSIGN(const RankTensor tensor, TensorReader(rank).Read(document.root->Find(name)));
    own.groups.push_back(tensor.mesh->groups);
  }
  return {};
}

}  // namespace

Status CheckItemTable(const Reading& reading) {
  if (reading.family.trainer != Trainer::kTorchCheckpointing) return {};
  SW_TRY_ASSIGN(const ItemTable table, ReadItemTable(reading.source.manifest));
  for (const ItemTable::Of& item : table.items) {
    if (item.item != reading.family.Find(Item::kModel)->name) continue;
    std::map<std::string, const ListedTensor*> listed;
    for (const ListedTensor& tensor : item.tensors) listed.emplace(tensor.path, &tensor);
    for (const Entry& entry : reading.entries) {
      const auto found = listed.find("[" + Quoted(entry.name) + "]");
      const RankTensor& tensor = entry.spread.first;
      if (found == listed.end()) continue;
      const ListedTensor& said = *found->second;
      const bool dtensor = tensor.kind == RankTensor::Kind::kDTensor;
      const bool same =
          said.shape == tensor.shape && said.dtype == "torch." + std::string(Name(tensor.dtype)) &&
          (!dtensor || (said.mesh == tensor.mesh->sizes && said.splits == tensor.splits));
      if (same) continue;
      return BadInput(kItemTable, ": tensor ", Quoted(entry.name), " is ", said.dtype, " ",
                      ToString(said.shape), " ", layout::Explain(said.splits),
                      ", but differs in the per-rank files");
    }
  }
  return {};
}

namespace {

Result<Checkpoint> ReadItems(const SourceSet& source, const Patterns& patterns, bool only_weights) {
  Reading reading(source, patterns);
  Checkpoint& out = reading.out;
  out.origin = kName;
  out.tag = source.tag;
  out.warnings = source.warnings;
  out.arena = std::make_shared<pickle::Arena>();
  SW_TRY_ASSIGN(reading.family, FamilyOf(source, only_weights));
  FilesLayout& own = reading.own;
  own.trainer = reading.family.trainer;
  own.fsdp_version = reading.family.fsdp_version.value_or(2);
  own.model_item = reading.family.Find(Item::kModel)->name;
  if (const ItemFiles* optimizer = reading.family.Find(Item::kOptimizer)) {
    own.optimizer_item = optimizer->name;
  }
  SW_TRY(ReadModel(&reading));
  SW_TRY(CheckItemTable(reading));
  MakeParams(&reading);
  SW_TRY(ReadOptimizer(&reading));
  AddTies(&reading);
  SW_TRY(AddModelTensors(&reading));
  DescribeMesh(&reading);
  DescribeSplits(&reading);
  SW_TRY(ReadGroupNames(&reading));
  SW_TRY(DecideRules(&reading));
  TakeSets(&reading);
  SW_TRY(ReadOthers(&reading));
  if (std::string text = WeightSetsMessage(out.weight_sets); !text.empty()) {
    out.warnings.push_back(std::move(text));
  }
  SetStates(&out);
  SetDType(&out);
  SetIteration(&out);
  out.optimizer = KindOfOptimizer(out.groups);
  out.layout.ranks = reading.family.world;
  out.layout.own = std::make_shared<const FilesLayout>(std::move(own));
  SW_TRY(layout::Validate(out.map));
  out.proved = true;
  // The files of the model contain all weights.
  if (only_weights) out.only_weights = OnlyWeights{};
  return std::move(out);
}

}  // namespace

Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns) {
  return ReadItems(source, patterns, false);
}

Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns) {
  return ReadItems(source, patterns, true);
}

}  // namespace shardwright::checkpoints::dtensor
