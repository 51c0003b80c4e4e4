// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/dtensor/read_internal.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/pickled/unit_order.h"
#include "checkpoints/pickled/wrappers.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

// Matches the ids of the optimizer with the parameters of the model, and adds states and groups.

namespace shardwright::checkpoints::dtensor {

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
      if (IsWithAdapter(kept.id, same->second)) {
        reading_.out.running_names.emplace(same->second, kept.id);
      }
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
  FindTies();
  return {};
}

/// Finds tied entries of FSDP1: the optimizer lists only the first name. FSDP1 saves ShardedTensors
/// here. Tied DTensors of FSDP2 share their storage, so equal ones are different parameters.
void Optimizer::FindTies() {
  std::set<std::uint32_t> listed;
  for (const std::vector<std::uint32_t>& entries : entries_) {
    listed.insert(entries.begin(), entries.end());
  }
  std::vector<std::uint32_t> sharded;
  for (std::uint32_t i = 0; i < reading_.entries.size(); ++i) {
    const Entry& entry = reading_.entries[i];
    const bool of_fsdp1 = entry.spread.first.kind == RankTensor::Kind::kSharded;
    if (of_fsdp1 && entry.alias_of.empty()) sharded.push_back(i);
  }
  for (const auto& [entry, holder] : EqualEntries(reading_, sharded)) {
    if (!listed.contains(entry) && listed.contains(holder)) TieTo(&reading_, entry, holder);
  }
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
                " without names: the files do not record which parameter is in which group");
  }
  std::vector<std::uint32_t> candidates = Candidates();
  if (candidates.size() > kept_.size()) candidates = ByShapes(std::move(candidates));
  if (candidates.size() != kept_.size()) {
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()), ": the optimizer has ",
                Plural(kept_.size(), "parameter"), " without names, the model ", candidates.size(),
                ": the files do not record which is which");
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
  std::vector<std::string_view> names;
  for (const Entry& entry : reading_.entries) names.push_back(entry.name);
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
    // FSDP1 flattens each unit, so its lists do not have the order of the model's parameters.
    if (ListedByUnit(names, group.params)) std::sort(group.params.begin(), group.params.end());
    reading_.out.groups.push_back(std::move(group));
  }
  return {};
}

Status Optimizer::MatchFlat() {
  if (members_.size() > 1) {
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()),
                ": flat vectors in several parameter groups are not supported");
  }
  for (const Kept& kept : kept_) {
    const bool nested = std::any_of(kept.slots.begin(), kept.slots.end(),
                                    [](const auto& slot) { return slot.second.is_nested; });
    if (!nested) continue;
    return Fail(Errc::kUnsupported, reading_.file_name(files_.front()),
                ": flat vectors with states that are dicts or lists are not supported");
  }
  auto entries = AddFlatStates(&reading_, Candidates(), kept_);
  if (!entries) return Within(reading_.file_name(files_.front()), std::move(entries).error());
  entries_ = *std::move(entries);
  return {};
}

}  // namespace shardwright::checkpoints::dtensor
