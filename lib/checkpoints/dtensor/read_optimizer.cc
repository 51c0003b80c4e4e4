// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/dtensor/read_internal.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/pickled/wrappers.h"
#include "checkpoints/tp_rules/quantized.h"
#include "engine/layout/states.h"
#include "files/pickle/writer.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

using pickle::Kind;
using pickle::Node;

constexpr std::string_view kNames = "param_names";  // of torch_checkpointing's groups

class Optimizer {
 public:
  explicit Optimizer(Reading* reading)
      : reading_(*reading), files_(reading->family.Find(Item::kOptimizer)->files) {}

  Status Read();

 private:
  Result<std::string> TakeGroups(std::uint32_t file, const torch_pt::Document& document,
                                 const Node* groups, std::vector<std::vector<Scalar>>* tensors);
  Status ReadGroups(std::uint32_t file, const torch_pt::Document& document);
  Status ReadIds(std::uint32_t file, const Node* group, std::vector<std::uint32_t>* members);
  Result<std::string> IdOf(std::uint32_t file, const Node* node);
  Status CheckGroups(std::uint32_t file, const torch_pt::Document& document);
  Status ReadRank(std::uint64_t rank);
  Status ReadSlots(std::uint64_t rank, std::uint32_t file, const torch_pt::Document& document,
                   const Node* slots, TensorReader* tensors, Kept* kept);
  Status ReadSlot(std::uint64_t rank, std::uint32_t file, const torch_pt::Document& document,
                  const std::string& state, const Node* value, TensorReader* tensors, Kept* kept);
  std::vector<std::uint32_t> Candidates() const;
  /// Removes candidates that the optimizer does not have (persistent buffers), if the
  /// shapes of its states fit exactly one selection. Otherwise returns all of them.
  std::vector<std::uint32_t> ByShapes(std::vector<std::uint32_t> candidates) const;
  Status MatchNames();
  Status MatchNumbers();
  bool IsFlat() const;
  Status AddStates();
  Status AddState(const Kept& kept, std::uint32_t index);
  Status MatchFlat();
  bool StatelessAreFrozen();
  Status AddGroups();
  void MarkTrained(std::uint32_t entry, std::int32_t group);

  Error At(std::uint32_t file, const std::string& what, Errc code = Errc::kBadInput) const {
    return {code, reading_.file_name(file) + ": " + what};
  }
  /// Returns the error for an optimizer of another form than torch's own.
  Error OtherForm(std::uint32_t file, const std::string& what) const {
    return At(file, what, Errc::kUnsupported);
  }

  Reading& reading_;
  const std::vector<std::uint32_t>& files_;
  bool named_ = false;
  std::vector<Kept> kept_;                                // by position in the groups' lists
  std::unordered_map<std::string, std::uint32_t> by_id_;  // into kept_
  std::vector<std::vector<std::uint32_t>> members_;       // by group: indices into kept_
  std::vector<const Node*> options_;                      // by group
  std::vector<std::vector<Scalar>> tensors_;              // by group: options that are tensors
  std::string groups_text_;                               // groups of the first rank, to compare
  std::vector<std::vector<std::uint32_t>> entries_;       // by kept: its entries
};

Result<std::string> Optimizer::IdOf(std::uint32_t file, const Node* node) {
  if (node->is_string()) return node->text;
  if (node->kind == Kind::kInt) return std::to_string(node->integer);
  return tl::unexpected<Error>(OtherForm(file, "a parameter's id is " + pickle::Describe(node)));
}

Status Optimizer::ReadIds(std::uint32_t file, const Node* group,
                          std::vector<std::uint32_t>* members) {
  const Node* ids = group->Find(kNames);
  if (ids == nullptr) ids = group->Find("params");
  if (ids == nullptr || !ids->is_list()) {
    return tl::unexpected<Error>(OtherForm(file, "a group without a list of its parameters"));
  }
  for (const Node* id : ids->items) {
    const bool named = id->is_string();
    if (kept_.empty()) named_ = named;
    if (named != named_)
      return tl::unexpected<Error>(OtherForm(file, "ids that are names and numbers"));
    Kept kept;
    SW_TRY_ASSIGN(kept.id, IdOf(file, id));
    if (!named && kept.id != std::to_string(kept_.size())) {
      return tl::unexpected<Error>(
          OtherForm(file, "ids of parameters are not 0, 1, 2, ...: " + kept.id + " in place of " +
                              std::to_string(kept_.size())));
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
                ": hyper-parameters that are no plain values: ", dumped.error().message);
  }
  return text + dumped->bytes;
}

Status Optimizer::ReadGroups(std::uint32_t file, const torch_pt::Document& document) {
  const Node* groups = document.root->Find("param_groups");
  if (groups == nullptr || !groups->is_list()) {
    return tl::unexpected<Error>(OtherForm(file, "no parameter groups"));
  }
  for (const Node* group : groups->items) {
    if (!group->is_dict()) return tl::unexpected<Error>(OtherForm(file, "a group that is no dict"));
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
      At(file, "its hyper-parameters or parameter groups are not those of " +
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
                                            ": files of two saves?"));
}

Status Optimizer::ReadSlots(std::uint64_t rank, std::uint32_t file,
                            const torch_pt::Document& document, const Node* slots,
                            TensorReader* tensors, Kept* kept) {
  if (!slots->is_dict()) {
    return tl::unexpected<Error>(At(file, Quoted(kept->id) + ": its state is no dict"));
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
        At(file, Quoted(kept->id) + " " + state + ": only other ranks have it"));
  }
  return {};
}

Status Optimizer::ReadRank(std::uint64_t rank) {
  const std::uint32_t file = files_[rank];
  SW_TRY_ASSIGN(const torch_pt::Document document, Open(reading_, file));
  const Node* root = document.root;
  const Node* states = root->Find("state");
  if (states == nullptr || !states->is_dict()) {
    return tl::unexpected<Error>(OtherForm(file, "no state of an optimizer"));
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
      return tl::unexpected<Error>(At(file, "state of " + Quoted(id) + ", which is in no group"));
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
  return tl::unexpected<Error>(At(file, "state of " + Plural(with_state, "parameter") +
                                            ", other ranks have it of " + std::to_string(wanted)));
}

/// Returns entries that may be parameters if only their order identifies them: tensors
/// distributed over ranks, or else, if there are none, all tensors of a floating-point type.
std::vector<std::uint32_t> Optimizer::Candidates() const {
  std::vector<std::uint32_t> spread;
  std::vector<std::uint32_t> floating;
  for (std::uint32_t i = 0; i < reading_.entries.size(); ++i) {
    const Entry& entry = reading_.entries[i];
    if (!entry.alias_of.empty()) continue;
    if (entry.spread.first.kind != RankTensor::Kind::kPlain) spread.push_back(i);
    if (IsFloating(entry.spread.first.dtype)) floating.push_back(i);
  }
  return spread.empty() ? floating : spread;
}

Status Optimizer::MatchNames() {
  std::vector<std::string_view> model;
  std::vector<std::string_view> optimizer;
  for (const Entry& entry : reading_.entries) model.push_back(entry.name);
  for (const Kept& kept : kept_) optimizer.push_back(kept.id);
  const auto matched = checkpoints::MatchNames(model, optimizer);
  for (const Kept& kept : kept_) {
    const auto same = matched.find(kept.id);
    const auto found = same == matched.end() ? reading_.by_name.end()
                                             : reading_.by_name.find(std::string(same->second));
    if (found != reading_.by_name.end() && same->second != kept.id) {
      reading_.own.optimizer_names.emplace(same->second, kept.id);
    }
    if (found == reading_.by_name.end()) {
      return tl::unexpected<Error>(OtherForm(
          files_.front(), "parameter " + Quoted(kept.id) + " is not in the model's files"));
    }
    std::uint32_t entry = found->second;
    if (const std::string& holder = reading_.entries[entry].alias_of; !holder.empty()) {
      entry = reading_.by_name.at(holder);
    }
    entries_.push_back({entry});
  }
  return {};
}

std::vector<std::uint32_t> Optimizer::ByShapes(std::vector<std::uint32_t> candidates) const {
  const auto fits = [&](const Kept& kept, std::uint32_t entry) {
    const Shape& shape = reading_.entries[entry].spread.first.shape;
    return std::ranges::all_of(kept.slots, [&](const auto& slot) {
      return slot.second.is_scalar || slot.second.is_nested ||
             slot.second.spread.first.shape == shape;
    });
  };
  // Exactly one selection fits if the earliest and the latest are equal.
  std::vector<std::uint32_t> earliest;
  for (std::size_t at = 0; at < candidates.size() && earliest.size() < kept_.size(); ++at) {
    if (fits(kept_[earliest.size()], candidates[at])) earliest.push_back(candidates[at]);
  }
  std::vector<std::uint32_t> latest;
  for (std::size_t at = candidates.size(); at > 0 && latest.size() < kept_.size(); --at) {
    const Kept& kept = kept_[kept_.size() - 1 - latest.size()];
    if (fits(kept, candidates[at - 1])) latest.push_back(candidates[at - 1]);
  }
  std::reverse(latest.begin(), latest.end());
  const bool one = earliest.size() == kept_.size() && earliest == latest;
  return one ? earliest : candidates;
}

Status Optimizer::MatchNumbers() {
  if (members_.size() > 1) {
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()), ": ",
                Plural(members_.size(), "parameter group"),
                " without names: which parameter is in which group is not in the files");
  }
  std::vector<std::uint32_t> candidates = Candidates();
  if (candidates.size() > kept_.size()) candidates = ByShapes(std::move(candidates));
  if (candidates.size() != kept_.size()) {
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()), ": the optimizer has ",
                Plural(kept_.size(), "parameter"), " without names, the model ", candidates.size(),
                ": which is which is not in the files");
  }
  for (const std::uint32_t entry : candidates) entries_.push_back({entry});
  return {};
}

/// Returns true if states are flat vectors, as in FSDP1: plain tensors
/// of one dimension, while the model's tensors are distributed.
bool Optimizer::IsFlat() const {
  if (named_ || reading_.family.fsdp_version == 2) return false;
  const bool spread = std::any_of(
      reading_.entries.begin(), reading_.entries.end(),
      [](const Entry& entry) { return entry.spread.first.kind != RankTensor::Kind::kPlain; });
  if (!spread) return false;
  for (const Kept& kept : kept_) {
    for (const auto& [state, slot] : kept.slots) {
      if (slot.is_scalar || slot.is_nested) continue;
      return slot.spread.first.kind == RankTensor::Kind::kPlain;
    }
  }
  return reading_.family.fsdp_version == 1;
}

Status Optimizer::AddState(const Kept& kept, std::uint32_t index) {
  const Entry& entry = reading_.entries[index];
  Param& param = reading_.out.params[index];
  for (const auto& [state, slot] : kept.slots) {
    if (slot.is_nested) {
      reading_.out.bound.push_back(reading_.file_name(files_.front()) + ": optimizer state " +
                                   Quoted(state) + " of " + Quoted(entry.name) +
                                   " cannot be written in another layout: tensor or number "
                                   "expected, found a dict or list");
      continue;
    }
    if (slot.is_scalar) {
      param.scalars.push_back(slot.scalar);
      continue;
    }
    if (slot.spread.first.shape != entry.spread.first.shape) {
      if (state == layout::kFirstMoment || state == layout::kSecondMoment) {
        return tl::unexpected<Error>(At(
            files_.front(), Quoted(kept.id) + " " + state + " is " +
                                ToString(slot.spread.first.shape) + ", parameter " +
                                Quoted(entry.name) + " is " + ToString(entry.spread.first.shape)));
      }
      reading_.out.bound.push_back(
          reading_.file_name(files_.front()) + ": optimizer state " + Quoted(state) +
          " cannot be written in another layout: its shape is " +
          ToString(slot.spread.first.shape) + ", that of parameter " + Quoted(entry.name) + " is " +
          ToString(entry.spread.first.shape));
      continue;
    }
    SW_TRY(AddTensor(&reading_, slot.spread, entry.name, state, files_));
  }
  return {};
}

void Optimizer::MarkTrained(std::uint32_t entry, std::int32_t group) {
  Param& param = reading_.out.params[entry];
  param.kind = ParamKind::kTrainable;
  param.group = group;
}

Status Optimizer::AddStates() {
  std::set<std::uint32_t> seen;
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    const std::uint32_t entry = entries_[i].front();
    if (!seen.insert(entry).second) {
      return tl::unexpected<Error>(
          At(files_.front(), "parameter " + Quoted(reading_.entries[entry].name) + " has two ids"));
    }
    SW_TRY(AddState(kept_[i], entry));
  }
  return {};
}

/// Returns true if parameters without state are frozen. Warns if they count as trained.
bool Optimizer::StatelessAreFrozen() {
  std::vector<std::string> with;
  std::vector<std::string> without;
  for (std::size_t at = 0; at < kept_.size(); ++at) {
    for (const std::uint32_t entry : entries_[at]) {
      (kept_[at].has_state ? with : without).push_back(reading_.entries[entry].name);
    }
  }
  if (with.empty() || without.empty()) return false;
  if (AreFrozen(with, without)) return true;
  reading_.out.warnings.push_back(StatelessWarning(without));
  return false;
}

Status Optimizer::AddGroups() {
  const bool frozen = StatelessAreFrozen();
  for (std::size_t g = 0; g < members_.size(); ++g) {
    Group group;
    group.options = options_[g];
    group.tensors = tensors_[g];
    group.hyper = HyperOf(group.options, group.tensors);
    std::vector<std::string>& listed = reading_.own.listed.emplace_back();
    for (const std::uint32_t at : members_[g]) {
      for (const std::uint32_t entry : entries_[at]) {
        listed.push_back(reading_.entries[entry].name);
        // The group lists it even if it is frozen.
        if (frozen && !kept_[at].has_state) {
          reading_.out.params[entry].kind = ParamKind::kFrozen;
          continue;
        }
        MarkTrained(entry, static_cast<std::int32_t>(g));
        group.params.push_back(entry);
      }
    }
    reading_.out.groups.push_back(std::move(group));
  }
  return {};
}

Status Optimizer::MatchFlat() {
  if (members_.size() > 1) {
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()),
                ": flat vectors in several parameter groups");
  }
  for (const Kept& kept : kept_) {
    const bool nested = std::any_of(kept.slots.begin(), kept.slots.end(),
                                    [](const auto& slot) { return slot.second.is_nested; });
    if (!nested) continue;
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()),
                ": flat vectors with states that are dicts or lists");
  }
  auto entries = AddFlatStates(&reading_, Candidates(), kept_);
  if (!entries) return Within(reading_.file_name(files_.front()), std::move(entries).error());
  entries_ = *std::move(entries);
  return {};
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

}  // namespace

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
