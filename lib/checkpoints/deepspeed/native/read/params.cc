// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/tensor/convert.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::reader {
namespace {

/// Returns the kind of a module's entry. Requires that the optimizer's parameters are known.
ParamKind KindOf(const Model& model, const std::string& name) {
  if (model.trainable.contains(name)) return ParamKind::kTrainable;
  return model.buffers.contains(name) ? ParamKind::kBuffer : ParamKind::kFrozen;
}

/// Maps names without data to the names that have their data.
using Aliases = std::unordered_map<std::string, std::string>;

/// Returns true for two tensors without elements and of different shapes.
/// DeepSpeed considers them tied because both have the address null.
bool OnlyEmpty(const Model& model, const std::string& alias, const std::string& holder) {
  const Node* a = model.module->Find(alias);
  const Node* b = model.module->Find(holder);
  if (a == nullptr || b == nullptr || !a->is_tensor() || !b->is_tensor()) return false;
  const Shape& shape = a->tensor->shape;
  return Elems(shape) == 0 && shape != b->tensor->shape;
}

/// Finds the ties of a module: those in the files, and tensors that share their bytes.
/// \param ties  ties of the first mp rank; other ranks' files have none
Aliases FindAliases(const Model& model, const Ties& ties, bool ranked) {
  Aliases out;
  for (const auto& [alias, holder] : ties.aliases) {
    if (!model.trainable.contains(alias)) out.emplace(alias, holder);
  }
  using View = std::tuple<std::uint32_t, std::uint64_t, Shape, std::vector<std::uint64_t>>;
  std::map<View, std::string> holders;
  for (const bool holders_turn : {true, false}) {
    for (std::size_t i = 0; i < model.module->entry_count(); ++i) {
      const std::string& name = model.module->key(i)->text;
      const Node* node = model.module->value(i);
      if (!node->is_tensor() || Elems(node->tensor->shape) == 0) continue;
      const bool buffer = model.buffers.contains(name);
      if (out.contains(name) || name.ends_with("_extra_state")) continue;
      const bool holder = !ranked || buffer || model.trainable.contains(name);
      if (ranked && holder != holders_turn) continue;
      const pickle::Tensor& tensor = *node->tensor;
      const auto [at, fresh] =
          holders.emplace(View(tensor.storage, tensor.offset, tensor.shape, tensor.strides), name);
      // Buffers can only be tied to buffers (one module under
      // two names). DeepSpeed looks up frozen parameters by name.
      const bool to_buffer = model.buffers.contains(at->second);
      const bool own = model.trainable.contains(name) || (buffer && !to_buffer) ||
                       (to_buffer && model.frozen_lists.names.contains(name));
      if (!fresh && at->second != name && !own) {
        out.emplace(name, at->second);
      }
    }
  }
  std::erase_if(out, [&](const auto& tie) { return OnlyEmpty(model, tie.first, tie.second); });
  return out;
}

Status AddAlias(Reading* reading, const std::string& name, const std::string& holder) {
  if (reading->by_name.contains(name)) return {};
  Param param;
  param.name = name;
  param.alias_of = holder;
  reading->by_name.emplace(name, static_cast<std::uint32_t>(reading->out.params.size()));
  reading->out.params.push_back(std::move(param));
  reading->params.emplace_back();
  reading->params.back().shards.resize(reading->topology.tp);
  reading->params.back().known.resize(reading->topology.tp);
  return {};
}

/// Adds one tensor of a module at stages 0 to 2.
Status AddEntry(Reading* reading, std::uint64_t mp, const std::string& name, const Node* node,
                ParamKind kind) {
  const Model& model = reading->models[mp];
  SW_TRY_ASSIGN(
      std::vector<PlacedPart> parts,
      reading->map.PartsOf(model.file, model.document, node, "parameter " + Quoted(name)));
  SW_TRY_ASSIGN(const std::uint32_t param, AddParam(reading, name, kind, mp, node->tensor->shape,
                                                    node->tensor->dtype, model.file));
  AddWeight(reading, param, mp, std::move(parts));
  return {};
}

/// Returns the whole shapes of parameters that stage 3 partitions, by name.
std::unordered_map<std::string_view, const NamedShape*> PartitionedShapes(const Model& model) {
  std::unordered_map<std::string_view, const NamedShape*> out;
  for (const std::vector<NamedShape>& group : model.shapes) {
    for (const NamedShape& param : group) out.emplace(param.name, &param);
  }
  for (const NamedShape& param : model.frozen) out.emplace(param.name, &param);
  return out;
}

/// Adds one parameter from its placeholder in the module at stage 3.
Status AddPlaceholder(Reading* reading, std::uint64_t mp, const std::string& name, const Node* node,
                      ParamKind kind, const NamedShape* known) {
  const Model& model = reading->models[mp];
  if (known != nullptr) {
    SW_TRY(AddParam(reading, name, kind, mp, known->shape, node->tensor->dtype, model.file));
    return {};
  }
  if (Elems(node->tensor->shape) == 0) {
    return Fail(
        Errc::kUnsupported, reading->file_name(model.file), ": parameter ", Quoted(name),
        ": neither optimized nor frozen nor a buffer: the checkpoint contains only a placeholder "
        "for it; save the checkpoint with all parameters in the optimizer or listed as frozen");
  }
  return AddEntry(reading, mp, name, node, kind);
}

/// Stage 3: returns true for an entry that looks like a partitioned parameter's placeholder.
bool IsPlaceholder(const Model& model, const std::string& name, const Node* node) {
  return node->tensor->shape == Shape{0} && !model.buffers.contains(name) &&
         !name.ends_with("_extra_state") && CanConvert(node->tensor->dtype, DType::kF32);
}

/// Stage 3: returns the data of a name tied to an excluded frozen
/// parameter, or null. Only Shardwright's files contain it.
const Node* WholeFrozen(const Model& model, const std::string& name) {
  return FindPath(model.document.root, {kWholeFrozen, name});
}

/// Stage 3: adds the module entry of such a name.
Status AddLeftOut(Reading* reading, std::uint64_t mp, const std::string& name) {
  const Model& model = reading->models[mp];
  if (const Node* whole = WholeFrozen(model, name)) {
    return AddEntry(reading, mp, name, whole, ParamKind::kFrozen);
  }
  reading->out.warnings.push_back(LeftOutToo(reading->file_name(model.file), name));
  return {};
}

/// Adds one tensor of a module that is neither an alias nor excluded.
Status AddTensor(Reading* reading, std::uint64_t mp, const std::string& name, const Node* node,
                 const std::unordered_map<std::string_view, const NamedShape*>& partitioned,
                 bool entry) {
  const Model& model = reading->models[mp];
  const bool ranked = reading->knows_trained(model);
  ParamKind kind = entry ? ParamKind::kBuffer : KindOf(model, name);
  if (!ranked && kind == ParamKind::kFrozen) kind = ParamKind::kTrainable;
  const bool placeholder =
      reading->grid.zero3() && (kind != ParamKind::kBuffer || IsPlaceholder(model, name, node));
  if (!placeholder) {
    SW_TRY(AddEntry(reading, mp, name, node, kind));
    reading->out.params[reading->by_name.at(name)].entry = entry;
    return {};
  }
  const auto known = partitioned.find(name);
  return AddPlaceholder(reading, mp, name, node,
                        kind == ParamKind::kBuffer ? ParamKind::kFrozen : kind,
                        known == partitioned.end() ? nullptr : known->second);
}

Status ReadModule(Reading* reading, std::uint64_t mp) {
  const Model& model = reading->models[mp];
  const bool zero3 = reading->grid.zero3();
  const bool ranked = reading->knows_trained(model);
  const Ties& ties = reading->models.front().ties;
  Aliases aliases = FindAliases(model, ties, ranked);
  std::unordered_map<std::string_view, const NamedShape*> partitioned;
  if (zero3) {
    partitioned = PartitionedShapes(model);
    Aliases placeholders = TiedPlaceholders(
        model.module, [&](const std::string& name) { return partitioned.contains(name); });
    std::erase_if(placeholders, [&](const auto& tie) { return ties.left_out.contains(tie.first); });
    aliases.merge(std::move(placeholders));
  }
  const std::unordered_set<std::string> entries = EntriesOf(*reading, mp, model.module, "");
  OpaqueReader opaque(reading, mp, model.file, model.document);
  for (std::size_t i = 0; i < model.module->entry_count(); ++i) {
    auto key = pickle::AsString(model.module->key(i));
    if (!key) return Within(reading->file_name(model.file) + ": module", std::move(key).error());
    const std::string name(*key);
    const Node* node = model.module->value(i);
    if (!node->is_tensor()) {
      opaque.Add(name, node);
      continue;
    }
    opaque.SetAfter(name);
    const bool left_out = zero3 && ties.left_out.contains(name);
    if (const auto alias = aliases.find(name); alias != aliases.end()) {
      if (left_out && WholeFrozen(model, alias->second) == nullptr) continue;
      SW_TRY(AddAlias(reading, name, alias->second));
      continue;
    }
    if (left_out) {
      SW_TRY(AddLeftOut(reading, mp, name));
      continue;
    }
    SW_TRY(AddTensor(reading, mp, name, node, partitioned, entries.contains(name)));
  }
  return {};
}

/// Without param_shapes: takes a parameter's shape from its weight.
Status TakeShape(Reading* reading, std::uint64_t mp, NamedShape* param) {
  const Model& model = reading->models[mp];
  SW_TRY_ASSIGN(const std::uint32_t at, ParamOf(*reading, param->name, 0, model.file));
  param->shape = reading->params[at].shards[reading->tp_of(mp)];
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(param->shape));
  if (elems == param->elems) return {};
  return Fail(Errc::kBadInput, reading->file_name(model.file), ": parameter ", Quoted(param->name),
              ": ", elems, " elements in its weight, ", param->elems, " in param_slice_mappings");
}

/// Adds a trained parameter that `module` lacks. exclude_frozen_parameters also omits parameters
/// that were frozen after the optimizer was created. The optimizer has their master weights.
Status TakeLeftOut(Reading* reading, std::uint64_t mp, const std::string& name) {
  const Model& model = reading->models[mp];
  const std::string where = reading->file_name(model.file) + ": parameter " + Quoted(name) +
                            ": it is in param_shapes, but not in module";
  if (model.frozen_lists.listed) return Fail(Errc::kBadInput, where);
  reading->out.warnings.push_back(where +
                                  ", as if it was frozen during the run and left out with the "
                                  "frozen parameters: its weight is the rounded master weight");
  return {};
}

/// Checks that every optimized parameter exists and has the shape in param_shapes.
Status CheckTrainable(Reading* reading, std::uint64_t mp) {
  Model& model = reading->models[mp];
  for (std::vector<NamedShape>& group : model.shapes) {
    for (NamedShape& param : group) {
      if (!model.has_shapes) SW_TRY(TakeShape(reading, mp, &param));
      if (ExpertsPathOf(param.name)) continue;
      const auto at = reading->by_name.find(param.name);
      if (at == reading->by_name.end() && !reading->topology.pipeline) {
        SW_TRY(TakeLeftOut(reading, mp, param.name));
      }
      // In a pipeline, a tied parameter may be missing from this stage's
      // layer files. It then has the model's type, known from any weight.
      const DType dtype = at != reading->by_name.end() ? reading->out.params[at->second].dtype
                                                       : reading->topology.dtype;
      SW_TRY(
          AddParam(reading, param.name, ParamKind::kTrainable, mp, param.shape, dtype, model.file));
    }
  }
  return {};
}

/// Finds tensors that can be either frozen parameters or entries
/// of the state dict. Tied names always belong to parameters.
void SetUndecided(Reading* reading) {
  UnlistedParameters unlisted;
  std::unordered_set<std::string> tied;
  for (const auto& [alias, holder] : reading->models.front().ties.aliases) tied.insert(holder);
  for (const Param& param : reading->out.params) {
    if (param.kind == ParamKind::kTrainable) unlisted.AddTrained(param.name);
    if (!param.alias_of.empty()) tied.insert(param.alias_of);
  }
  const auto is_marked = [&](const std::string& name, std::string_view kind) {
    return std::ranges::any_of(reading->models, [&](const Model& model) {
      return model.frozen_lists.KindOf(name) == kind;
    });
  };
  const FrozenLists& lists = reading->models.front().frozen_lists;
  const bool told = lists.listed || lists.left_out;
  for (Param& param : reading->out.params) {
    if (!param.alias_of.empty() || param.expert || param.kind == ParamKind::kTrainable) continue;
    const bool guessed = param.kind == ParamKind::kFrozen && !told && !tied.contains(param.name) &&
                         !reading->models.front().ties.left_out.contains(param.name) &&
                         !is_marked(param.name, "frozen") && !unlisted.Contains(param.name);
    if (!guessed && !is_marked(param.name, "undecided")) continue;
    param.kind = ParamKind::kBuffer;
    param.entry = true;
    param.undecided = true;
  }
}

/// Records that frozen parameters may be missing, if no file lists them
/// and the module has none of them or only other names of excluded ones.
void SetFrozenUnknown(Reading* reading) {
  const Model& model = reading->models.front();
  reading->out.frozen_unknown = !model.lists_frozen;
  for (Param& param : reading->out.params) {
    if (param.kind != ParamKind::kFrozen || !param.alias_of.empty()) continue;
    const auto holder = model.ties.left_out.find(param.name);
    if (holder != model.ties.left_out.end()) {
      param.left_out_holder = holder->second;
    } else {
      reading->out.frozen_unknown = false;
    }
  }
}

/// Takes the compute type from the first trained parameter. Integer
/// parameters are never trained, even if no other information shows this.
void SetModelType(Reading* reading) {
  for (const Param& param : reading->out.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    if (!IsFloating(param.dtype)) continue;
    reading->topology.dtype = param.dtype;
    return;
  }
}

/// Marks trained parameters that are also listed as frozen. requires_grad was set to
/// false after the optimizer was created. DeepSpeed's loader looks them up in both places.
void SetFrozenLater(Reading* reading) {
  for (const Model& model : reading->models) {
    for (const std::string& name : model.frozen_lists.names) {
      const auto at = reading->by_name.find(name);
      if (at == reading->by_name.end()) continue;
      Param& param = reading->out.params[at->second];
      param.frozen_later = param.kind == ParamKind::kTrainable && param.alias_of.empty();
    }
  }
}

}  // namespace

std::unordered_set<std::string> EntriesOf(const Reading& reading, std::uint64_t mp,
                                          const Node* dict, const std::string& prefix) {
  const Model& model = reading.models[mp];
  std::unordered_set<std::string> tied;
  for (const auto& [alias, holder] : reading.models.front().ties.aliases) {
    tied.insert(alias);
    tied.insert(holder);
  }
  const auto known = [&](const std::string& name) {
    return model.trainable.contains(name) || model.buffers.contains(name) || tied.contains(name) ||
           reading.models.front().ties.left_out.contains(name);
  };
  return EntryNames(dict, prefix, model.frozen_lists, known, reading.knows_trained(model));
}

Result<std::uint32_t> AddParam(Reading* reading, const std::string& name, ParamKind kind,
                               std::uint64_t mp, const Shape& shard, DType dtype,
                               std::uint32_t file) {
  const std::uint64_t tp = reading->tp_of(mp);
  const std::uint64_t stage = reading->stage_of(mp);
  const auto [at, fresh] =
      reading->by_name.emplace(name, static_cast<std::uint32_t>(reading->out.params.size()));
  if (fresh) {
    Param param;
    param.name = name;
    param.kind = kind;
    param.dtype = dtype;
    reading->out.params.push_back(std::move(param));
    ParamInfo info;
    info.first_stage = stage;
    info.shards.resize(reading->topology.tp);
    info.known.resize(reading->topology.tp);
    reading->params.push_back(std::move(info));
  }
  const Param& param = reading->out.params[at->second];
  ParamInfo& info = reading->params[at->second];
  const std::string where = reading->file_name(file) + ": " + "parameter " + Quoted(name);
  if (param.kind != kind) {
    return Fail(Errc::kBadInput, where, ": trainable in one file, not in another");
  }
  if (param.dtype != dtype) {
    return Fail(Errc::kBadInput, where, ": ", Name(param.dtype),
                " expected as on other ranks, found ", Name(dtype));
  }
  if (info.known[tp] && info.shards[tp] != shard) {
    return Fail(Errc::kBadInput, where, ": shape ", ToString(info.shards[tp]),
                " expected as in another file, found ", ToString(shard));
  }
  info.known[tp] = true;
  info.shards[tp] = shard;
  if (std::find(info.stages.begin(), info.stages.end(), stage) == info.stages.end()) {
    info.stages.push_back(stage);
    info.first_stage = std::min(info.first_stage, stage);
  }
  return at->second;
}

Status ReadParams(Reading* reading) {
  const std::uint64_t stage = reading->grid.zero3() ? 3 : reading->topology.zero;
  for (Model& model : reading->models) {
    model.frozen_lists = FrozenLists::Of(model.document.root, stage);
  }
  if (!reading->shards.empty()) {
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
      if (!reading->models[mp].has_shapes) SW_TRY(NameParams(reading, mp));
    }
  }
  if (reading->topology.pipeline) {
    SW_TRY(ReadLayers(reading));
  } else {
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) SW_TRY(ReadModule(reading, mp));
  }
  SetModelType(reading);
  SW_TRY(ReadExperts(reading));
  if (reading->shards.empty() && !reading->only_weights) {
    SW_TRY(OrderWithoutZero(reading));
    SetModelType(reading);  // here only the optimizer determines the trained parameters
  } else {
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) SW_TRY(CheckTrainable(reading, mp));
  }
  SetUndecided(reading);
  SetFrozenUnknown(reading);
  SetFrozenLater(reading);
  return {};
}

}  // namespace shardwright::checkpoints::reader
