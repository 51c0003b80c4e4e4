// SPDX-License-Identifier: Apache-2.0
#include <set>

#include "checkpoints/megatron/read/legacy_internal.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

// The optimizer identifies parameters by number: group by group, each in model order.

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

const Node* ItemOf(const Node* list, std::size_t at) {
  return list != nullptr && list->is_list() && at < list->items.size() ? list->items[at] : nullptr;
}

/// Compares the sizes of groups with their lists of numbers, as names do not identify the members.
/// \error kUnsupported  names the first group that differs
Status CheckCounts(const std::vector<std::vector<std::size_t>>& shared, const Node* groups,
                   const std::string& where) {
  for (std::size_t g = 0; g < shared.size(); ++g) {
    const Node* listed = FindIn(groups->items[g], "params");
    if (listed == nullptr || !listed->is_list() || listed->items.size() == shared[g].size()) {
      continue;
    }
    return Fail(Errc::kUnsupported, where, ": parameter group ", g, " has ",
                Plural(listed->items.size(), "parameter"), ", but ", shared[g].size(),
                " by Megatron's rules for weight decay and learning rates: cannot determine which "
                "parameters are in which optimizer group");
  }
  return {};
}

bool IsHalf(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

}  // namespace

std::vector<LocalName> Legacy::NamesOf(std::size_t rank, std::size_t part, bool chained,
                                       std::optional<std::uint64_t> chunk) const {
  std::vector<LocalName> names;
  for (std::uint64_t v = 0; v < args_.vpp; ++v) {
    if (chunk && *chunk != v) continue;
    for (const LocalName& name : local_[rank][v]) {
      const bool expert =
          collector_.out.params[collector_.by_name.at(name.name)].expert.has_value();
      if (!chained || expert == (part == 1)) names.push_back(name);
    }
  }
  return names;
}

void Legacy::NoteInferred(std::uint32_t param) {
  Inferred& inferred = collector_.out.inferred;
  inferred.params.push_back(param);
  if (inferred.why.empty()) {
    inferred.why =
        "the optimizer's state has no parameter names, so parameters are expected in the order of "
        "the model";
  }
}

Result<std::vector<const Node*>> Legacy::PartsOfOptimizer(std::size_t rank) const {
  const Node* root = ranks_[rank].document->root;
  const Node* optimizer = FindIn(root, "optimizer");
  if (optimizer == nullptr) optimizer = FindIn(root, "optimizer_state_dict");
  if (optimizer == nullptr) return std::vector<const Node*>();
  if (optimizer->is_list()) {
    if (optimizer->items.empty() || optimizer->items.size() > 2) {
      return Fail(Errc::kUnsupported, NameOf(ranks_[rank].model),
                  ": optimizer: 1 or 2 chained optimizers supported, found ",
                  optimizer->items.size());
    }
    return optimizer->items;
  }
  return std::vector<const Node*>{optimizer};
}

Status Legacy::ReadOptimizers() {
  if (!has_optimizer_) return {};
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) SW_TRY(ReadOptimizer(rank));
  Inferred& inferred = collector_.out.inferred;
  const std::set<std::uint32_t> once(inferred.params.begin(), inferred.params.end());
  inferred.params.assign(once.begin(), once.end());
  for (const Param& param : collector_.out.params) {
    if (param.kind != ParamKind::kTrainable || param.group >= 0) continue;
    return Fail(Errc::kUnsupported, "\"", param.name,
                "\": no optimizer has it, and legacy files do not record frozen parameters");
  }
  std::string& name = collector_.out.optimizer;
  name = args_.optimizer;
  if (name == "adam") name = "adamw";  // Megatron's Adam has decoupled weight decay
  return {};
}

Status Legacy::ReadOptimizer(std::size_t rank) {
  const std::string& where = NameOf(ranks_[rank].model);
  SW_TRY_ASSIGN(const std::vector<const Node*> parts, PartsOfOptimizer(rank));
  if (parts.empty()) {
    return Fail(Errc::kNotFound, where, ": no \"optimizer\", but other ranks have one");
  }
  for (std::size_t part = 0; part < parts.size(); ++part) SW_TRY(ReadPart(rank, part, parts[part]));
  return {};
}

Status Legacy::ReadPart(std::size_t rank, std::size_t part, const Node* root) {
  const std::string& where = NameOf(ranks_[rank].model);
  if (!root->is_dict()) {
    return Fail(Errc::kBadInput, where, ": optimizer: dict expected, found ",
                pickle::Describe(root));
  }
  SW_TRY_ASSIGN(const std::vector<const Node*> parts, PartsOfOptimizer(rank));
  const bool chained = parts.size() > 1;
  const Node* inner = FindIn(root, "optimizer");
  const bool mixed = inner != nullptr;  // an outer optimizer has the master weights
  if (inner == nullptr) inner = root;
  const Node* groups = FindIn(inner, "param_groups");
  const std::vector<LocalName> names = NamesOf(rank, part, chained, std::nullopt);
  std::vector<Local> locals;
  locals.reserve(names.size());
  for (const LocalName& name : names) {
    locals.push_back(
        {collector_.by_name.at(name.name), name.node->tensor->shape, name.node->tensor->dtype});
  }
  const bool experts = chained && part == 1;
  SW_TRY_ASSIGN(const auto shared, ShareOut(args_, collector_.out, locals, groups, where));
  if (!args_.distributed) SW_TRY(CheckCounts(shared, groups, where));
  SW_TRY(SetGroups(names, shared, groups, experts));
  if (const Node* scaler = FindIn(root, "grad_scaler"); rank == 0) {
    const RankFiles& files = ranks_[rank];
    own_->scalers.push_back(scaler == nullptr
                                ? Value()
                                : ValueOf(collector_.map, files.model, 0, files.document, scaler));
  }
  if (ranks_[rank].optimizer) return ReadBuffers(rank, part, experts);
  if (FindIn(inner, "state") == nullptr && args_.distributed) {
    return Fail(Errc::kNotFound, ranks_[rank].folder,
                "/distrib_optim.pt is missing: it has the state of the distributed optimizer");
  }
  return ReadWholeStates(rank, root, mixed, names, shared);
}

Status Legacy::SetGroups(const std::vector<LocalName>& names,
                         const std::vector<std::vector<std::size_t>>& shared, const Node* groups,
                         bool experts) {
  Checkpoint& out = collector_.out;
  for (std::size_t g = 0; g < shared.size(); ++g) {
    const std::uint32_t group = groups_.Of(*out.arena, groups->items[g], experts, &out.groups);
    for (const std::size_t i : shared[g]) {
      Param& param = out.params[collector_.by_name.at(names[i].name)];
      const auto index = static_cast<std::int32_t>(group);
      if (param.group >= 0 && param.group != index) {
        return Fail(Errc::kBadInput, "\"", param.name, "\": in groups of different options");
      }
      param.group = index;
      const auto step = out.groups[group].hyper.step;
      if (step && param.scalars.empty()) param.scalars.push_back(StepScalar(*step));
    }
  }
  return {};
}

Status Legacy::ReadWholeStates(std::size_t rank, const Node* root, bool mixed,
                               const std::vector<LocalName>& names,
                               const std::vector<std::vector<std::size_t>>& shared) {
  const std::string& where = NameOf(ranks_[rank].model);
  const Node* inner = mixed ? FindIn(root, "optimizer") : root;
  const Node* groups = FindIn(inner, "param_groups");
  const Node* states = FindIn(inner, "state");
  const Node* masters = FindIn(root, "fp32_from_fp16_params");
  if (masters == nullptr) masters = FindIn(root, "fp32_from_fp16");
  std::set<std::uint64_t> asked;
  for (std::size_t g = 0; g < shared.size(); ++g) {
    auto ids = pickle::AsShape(FindIn(groups->items[g], "params"));
    if (!ids) return Within(StrCat(where, ": optimizer group ", g), ids.error());
    if (ids->size() != shared[g].size()) {
      return Fail(Errc::kUnsupported, where, ": optimizer group ", g, ": ", shared[g].size(),
                  " parameters expected, found ", ids->size());
    }
    std::size_t half = 0;
    for (std::size_t i = 0; i < ids->size(); ++i) {
      const LocalName& name = names[shared[g][i]];
      asked.insert((*ids)[i]);
      const pickle::Tensor& weight = *name.node->tensor;
      if (IsHalf(weight.dtype)) {
        const Node* master = ItemOf(ItemOf(masters, g), half++);
        if (master == nullptr || !master->is_tensor() || master->tensor->shape != weight.shape) {
          return Fail(Errc::kUnsupported, where, ": optimizer group ", g, ": a master weight of \"",
                      name.name, "\", ", ToString(weight.shape), ", expected, found ",
                      pickle::Describe(master));
        }
        SW_TRY_ASSIGN(const Place place,
                      collector_.map.PlaceOf(ranks_[rank].model, *ranks_[rank].document, master,
                                             "master weight of \"" + name.name + "\""));
        SW_TRY(
            AddShard(rank, name, layout::kMaster, place.dtype, collector_.map.AddWhole(place), 0));
        if (!name.copy) NoteInferred(collector_.by_name.at(name.name));
      }
      SW_TRY(ReadStatesOf(rank, FindInt(states, static_cast<std::int64_t>((*ids)[i])), name));
    }
  }
  for (std::size_t i = 0; states != nullptr && i < states->entry_count(); ++i) {
    const auto id = pickle::AsCount(states->key(i));
    if (!id || !asked.contains(*id)) {
      return Fail(Errc::kBadInput, where, ": the optimizer has state of parameter ",
                  (id ? std::to_string(*id) : pickle::Describe(states->key(i))),
                  ", which no group has");
    }
  }
  return {};
}

Status Legacy::ReadStatesOf(std::size_t rank, const Node* state, const LocalName& name) {
  if (state == nullptr) return {};
  const RankFiles& files = ranks_[rank];
  const std::string& where = NameOf(files.model);
  if (!state->is_dict()) {
    return Fail(Errc::kBadInput, where, ": state of \"", name.name, "\": dict expected, found ",
                pickle::Describe(state));
  }
  for (std::size_t i = 0; i < state->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view key, pickle::AsString(state->key(i)));
    const Node* value = state->value(i);
    const std::string what = std::string(key) + " of \"" + name.name + "\"";
    if (key == layout::kStep) {
      if (value->is_tensor()) {
        SW_TRY_ASSIGN(const Scalar scalar,
                      ScalarOf(source_.files[files.model].containers.front(), *files.document,
                               value, StrCat(where, ": ", what)));
        Param& param = collector_.out.params[collector_.by_name.at(name.name)];
        param.scalars = {scalar};
        continue;
      }
      SW_TRY_ASSIGN(const double step, pickle::AsFloat(value));
      collector_.out.params[collector_.by_name.at(name.name)].scalars = {StepScalar(step)};
      continue;
    }
    SW_TRY_ASSIGN(const Place place,
                  collector_.map.PlaceOf(files.model, *files.document, value, what));
    if (value->tensor->shape != name.node->tensor->shape) {
      return Fail(Errc::kUnsupported, where, ": ", what, ": ", ToString(name.node->tensor->shape),
                  " expected, found ", pickle::Describe(value));
    }
    SW_TRY(AddShard(rank, name, key, place.dtype, collector_.map.AddWhole(place), 0));
  }
  return {};
}

}  // namespace shardwright::checkpoints::megatron
