// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/dtensor/read_internal.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/tp_rules/quantized.h"
#include "engine/layout/states.h"
#include "files/pickle/writer.h"
#include "support/base/text.h"

// Reads the optimizer's files of all ranks.

namespace shardwright::checkpoints::dtensor {

using pickle::Kind;
using pickle::Node;

namespace {

constexpr std::string_view kNames = "param_names";  // of torch_checkpointing's groups

}  // namespace

Result<std::string> Optimizer::IdOf(std::uint32_t file, const Node* node) {
  if (node->is_string()) return node->text;
  if (node->kind == Kind::kInt) return std::to_string(node->integer);
  return tl::unexpected<Error>(
      OtherForm(file, "parameter id expected, found " + pickle::Describe(node)));
}

Status Optimizer::ReadIds(std::uint32_t file, const Node* group,
                          std::vector<std::uint32_t>* members) {
  const Node* ids = group->Find(kNames);
  if (ids == nullptr) ids = group->Find("params");
  if (ids == nullptr || !ids->is_list()) {
    return tl::unexpected<Error>(OtherForm(file, "a parameter group without a list of parameters"));
  }
  for (const Node* id : ids->items) {
    const bool named = id->is_string();
    if (kept_.empty()) named_ = named;
    if (named != named_)
      return tl::unexpected<Error>(
          OtherForm(file, "parameter ids are a mixture of names and numbers"));
    Kept kept;
    SW_TRY_ASSIGN(kept.id, IdOf(file, id));
    if (!named && kept.id != std::to_string(kept_.size())) {
      return tl::unexpected<Error>(
          OtherForm(file, StrCat("parameter ids 0, 1, 2, ... expected: found ", kept.id,
                                 " in place of ", kept_.size())));
    }
    const auto at = static_cast<std::uint32_t>(kept_.size());
    if (!by_id_.emplace(kept.id, at).second) {
      return tl::unexpected<Error>(At(file, "parameter " + Quoted(kept.id) + " is in two groups"));
    }
    members->push_back(at);
    kept_.push_back(std::move(kept));
  }
  return {};
}

/// Returns all groups as one text, to compare the groups of ranks.
/// \param tensors  receives, by group, the options that are tensors
Result<std::string> Optimizer::TakeGroups(std::uint32_t file, const torch_pt::Document& document,
                                          const Node* groups,
                                          std::vector<std::vector<Scalar>>* tensors) {
  pickle::Arena made;
  std::vector<const Node*> plain;
  std::string text;
  for (const Node* group : groups->items) {
    std::vector<Scalar> found = TensorOptions(group, [&](const Node* tensor) {
      return reading_.map.Payload(file, document, tensor, "an option of a parameter group");
    });
    plain.push_back(PlainOptions(group, found, &made));
    for (const Scalar& one : found) text += one.state + std::string(Name(one.dtype)) + one.bytes;
    tensors->push_back(std::move(found));
  }
  const auto dumped = pickle::Dump(made.List(std::move(plain)), {});
  if (!dumped) {
    return Fail(Errc::kUnsupported, reading_.file_name(file),
                ": hyperparameters are not plain values: ", dumped.error().message);
  }
  return text + dumped->bytes;
}

Status Optimizer::ReadGroups(std::uint32_t file, const torch_pt::Document& document) {
  const Node* groups = document.root->Find("param_groups");
  if (groups == nullptr || !groups->is_list()) {
    return tl::unexpected<Error>(OtherForm(file, "no parameter groups"));
  }
  for (const Node* group : groups->items) {
    if (!group->is_dict())
      return tl::unexpected<Error>(
          OtherForm(file, "parameter group: dict expected, found " + pickle::Describe(group)));
  }
  SW_TRY_ASSIGN(groups_text_, TakeGroups(file, document, groups, &tensors_));
  for (std::size_t g = 0; g < groups->items.size(); ++g) {
    const Node* group = groups->items[g];
    std::vector<std::uint32_t> members;
    SW_TRY(ReadIds(file, group, &members));
    members_.push_back(std::move(members));
    pickle::Arena& arena = *reading_.out.arena;
    pickle::Node* options = pickle::CopyDict(arena, PlainOptions(group, tensors_[g], &arena));
    pickle::Remove(options, "params");
    pickle::Remove(options, kNames);
    options_.push_back(options);
  }
  return {};
}

Status Optimizer::CheckGroups(std::uint32_t file, const torch_pt::Document& document) {
  const Node* groups = document.root->Find("param_groups");
  if (groups == nullptr || !groups->is_list()) {
    return tl::unexpected<Error>(OtherForm(file, "no parameter groups"));
  }
  std::vector<std::vector<Scalar>> tensors;
  SW_TRY_ASSIGN(const std::string text, TakeGroups(file, document, groups, &tensors));
  if (text == groups_text_) return {};
  return tl::unexpected<Error>(
      At(file, "its hyperparameters or parameter groups differ from those of " +
                   reading_.file_name(files_.front())));
}

Status Optimizer::ReadSlot(std::uint64_t rank, std::uint32_t file,
                           const torch_pt::Document& document, const std::string& state,
                           const Node* value, TensorReader* tensors, Kept* kept) {
  const std::string what = Quoted(kept->id) + " " + state;
  const auto [at, fresh] = kept->slots.try_emplace(state);
  if (fresh && rank > 0) {
    return tl::unexpected<Error>(At(file, what + ": other ranks do not have it"));
  }
  Slot& slot = at->second;
  const bool one = value->is_tensor() && Elems(value->tensor->shape) == 1 &&
                   (value->tensor->shape.empty() || state == layout::kStep);
  if (IsTensor(value) && !one) {
    auto tensor = tensors->Read(value);
    if (!tensor) return Within(reading_.file_name(file) + ": " + what, std::move(tensor).error());
    return AddPieces(&reading_, rank, file, document, *tensor, what, &slot.spread);
  }
  if (value->is_dict() || value->is_list()) {
    slot.is_nested = true;
    return {};
  }
  Scalar scalar;
  scalar.state = state;
  if (one) {
    scalar.is_tensor = true;
    scalar.dtype = value->tensor->dtype;
    scalar.shape = value->tensor->shape;
    SW_TRY_ASSIGN(scalar.bytes, reading_.map.Payload(file, document, value, what));
  } else {
    scalar.value = value;
  }
  if (fresh) {
    slot.is_scalar = true;
    slot.scalar = std::move(scalar);
    return {};
  }
  bool same = slot.is_scalar && slot.scalar.is_tensor == scalar.is_tensor;
  if (same && scalar.is_tensor) {
    same = scalar.bytes == slot.scalar.bytes && scalar.dtype == slot.scalar.dtype;
  } else if (same) {
    const auto first = pickle::Dump(slot.scalar.value, {});
    const auto second = pickle::Dump(scalar.value, {});
    same = first && second && first->bytes == second->bytes;
  }
  if (same) return {};
  return tl::unexpected<Error>(At(file, what + " differs from that in " +
                                            reading_.file_name(files_.front()) +
                                            ": the files may belong to different saves"));
}

Status Optimizer::ReadSlots(std::uint64_t rank, std::uint32_t file,
                            const torch_pt::Document& document, const Node* slots,
                            TensorReader* tensors, Kept* kept) {
  if (!slots->is_dict()) {
    return tl::unexpected<Error>(
        At(file, Quoted(kept->id) + ": state: dict expected, found " + pickle::Describe(slots)));
  }
  kept->has_state = true;
  for (std::size_t i = 0; i < slots->entry_count(); ++i) {
    if (!slots->key(i)->is_string()) {
      return tl::unexpected<Error>(At(file, Quoted(kept->id) + ": a state without a name"));
    }
    SW_TRY(ReadSlot(rank, file, document, slots->key(i)->text, slots->value(i), tensors, kept));
  }
  for (const auto& [state, slot] : kept->slots) {
    if (slots->Find(state) != nullptr) continue;
    return tl::unexpected<Error>(
        At(file, Quoted(kept->id) + " " + state + ": missing, but other ranks have it"));
  }
  return {};
}

Status Optimizer::ReadRank(std::uint64_t rank) {
  const std::uint32_t file = files_[rank];
  SW_TRY_ASSIGN(const torch_pt::Document document, Open(reading_, file));
  const Node* root = document.root;
  const Node* states = root->Find("state");
  if (states == nullptr || !states->is_dict()) {
    return tl::unexpected<Error>(OtherForm(file, "no optimizer state"));
  }
  if (rank == 0) {
    reading_.out.arena = document.arena;  // keeps options and plain values alive
    SW_TRY(ReadGroups(file, document));
  } else {
    SW_TRY(CheckGroups(file, document));
  }
  TensorReader tensors(rank);
  std::size_t with_state = 0;
  for (std::size_t i = 0; i < states->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string id, IdOf(file, states->key(i)));
    const auto found = by_id_.find(id);
    if (found == by_id_.end() || states->key(i)->is_string() != named_) {
      return tl::unexpected<Error>(
          At(file, "state of " + Quoted(id) + ", which no parameter group lists"));
    }
    Kept& kept = kept_[found->second];
    if (rank > 0 && !kept.has_state) {
      return tl::unexpected<Error>(At(file, "state of " + Quoted(id) + ": only this rank has it"));
    }
    SW_TRY(ReadSlots(rank, file, document, states->value(i), &tensors, &kept));
    ++with_state;
  }
  const auto wanted = static_cast<std::size_t>(
      std::count_if(kept_.begin(), kept_.end(), [](const Kept& kept) { return kept.has_state; }));
  if (with_state == wanted) return {};
  return tl::unexpected<Error>(At(file, StrCat("state of ", Plural(with_state, "parameter"),
                                               ", other ranks have state of ", wanted)));
}

Status Optimizer::Read() {
  for (std::uint64_t rank = 0; rank < files_.size(); ++rank) SW_TRY(ReadRank(rank));
  if (IsFlat()) {
    SW_TRY(MatchFlat());
    return AddGroups();
  }
  if (named_) {
    SW_TRY(MatchNames());
  } else {
    SW_TRY(MatchNumbers());
  }
  SW_TRY(AddStates());
  return AddGroups();
}

Status ReadOptimizer(Reading* reading) {
  if (reading->family.Find(Item::kOptimizer) == nullptr) {
    const std::vector<Entry>& entries = reading->entries;
    const bool spread = std::any_of(entries.begin(), entries.end(), [](const Entry& entry) {
      return entry.spread.first.kind != RankTensor::Kind::kPlain;
    });
    const auto scales = QuantizationTensors(reading->out);
    if (!scales.empty()) reading->out.warnings.push_back(KeptWithWeights(scales.size()));
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const RankTensor& tensor = entries[i].spread.first;
      Param& param = reading->out.params[i];
      const bool plain = tensor.kind == RankTensor::Kind::kPlain;
      const bool trained = IsFloating(tensor.dtype) && ItemSize(tensor.dtype) > 1 &&
                           !(plain && spread) && !scales.contains(param.name);
      param.kind = trained ? ParamKind::kTrainable : ParamKind::kBuffer;
    }
    return {};
  }
  return Optimizer(reading).Read();
}

}  // namespace shardwright::checkpoints::dtensor
