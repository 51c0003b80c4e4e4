// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::reader {
namespace {

std::string GroupName(std::size_t g) { return "group " + std::to_string(g); }

/// Reads the master weights of a rank: one flat tensor per group.
Status ReadMasters(Reading* reading, const Document& document, const Node* list,
                   const std::string& key, Shard* out) {
  if (list == nullptr || !list->is_list()) {
    return Fail(Errc::kBadInput, reading->file_name(out->file), ": ", key,
                ": list expected, found ", (list == nullptr ? "nothing" : pickle::Describe(list)));
  }
  for (std::size_t g = 0; g < list->items.size(); ++g) {
    ShardGroup group;
    SW_TRY_ASSIGN(group.fp32, reading->map.PlaceOf(out->file, document, list->items[g],
                                                   key + "[" + std::to_string(g) + "]"));
    out->groups.push_back(std::move(group));
  }
  return {};
}

/// Returns true for a tensor as long as the group's master weights, possibly without padding.
/// \pre the shard is from ZeRO rank 0, which has a full partition or all elements
bool IsPartition(const ShardGroup& group, const pickle::Tensor& tensor) {
  const std::uint64_t masters = group.fp32.elems;
  const std::uint64_t elems = Elems(tensor.shape);
  if (masters == 0 || elems == 0) return true;  // offloaded, which a later check reports
  const auto padded = PartitionElems(masters, 1);
  return tensor.shape.size() == 1 && elems >= masters && padded && elems <= *padded;
}

/// Decides on a state of ZeRO rank 0. Reports omitted states and adds them to ShardGroup::dropped.
void DecideState(Reading* reading, const std::string& where, const std::string& state,
                 const Node* value, const Node* groups, ShardGroup* group) {
  const StateHandling handling = HandlingOf(*reading, state, groups);
  if (handling == StateHandling::kLeftOut) {
    LeaveOut(reading, where, state, groups);
    group->dropped.insert(state);
    return;
  }
  if (const std::string why = WhyUnknown(state, value); !why.empty()) {
    Bind(reading, where, state, why, groups);
    group->dropped.insert(state);
    return;
  }
  if (!value->is_tensor()) return;
  const pickle::Tensor& tensor = *value->tensor;
  if (handling == StateHandling::kCut && (IsNumber(tensor.shape) || IsPartition(*group, tensor)))
    return;
  Bind(reading, where, state,
       "its shape is " + ToString(tensor.shape) + ", that of the partition " +
           ToString(Shape{group->fp32.elems}),
       groups);
  group->dropped.insert(state);
}

/// Reads the optimizer states of one group of a rank.
/// \param groups  the optimizer's param_groups, or null
/// \param first  the shard of rank 0, or null while reading that shard
Status ReadStates(Reading* reading, const Document& document, const Node* states,
                  const Node* groups, const Shard* first, std::size_t g, Shard* out) {
  if (states == nullptr || states->is_none()) return {};  // never stepped
  const std::string where = reading->file_name(out->file) + ": " + GroupName(g);
  if (!states->is_dict()) {
    return Fail(Errc::kBadInput, where, ": dict of states expected, found ",
                pickle::Describe(states));
  }
  ShardGroup& group = out->groups[g];
  const Shape flat{group.fp32.elems};
  auto entries = StatesOf(states);
  if (!entries) return Within(where, std::move(entries).error());
  for (const auto& [state, value] : *entries) {
    if (first == nullptr) DecideState(reading, where, state, value, groups, &group);
    const ShardGroup& deciding = first == nullptr ? group : first->groups[g];
    if (deciding.dropped.contains(state)) continue;
    SW_TRY_ASSIGN(std::optional<Scalar> scalar,
                  ScalarOf(reading, out->file, document, state, value, flat));
    if (scalar) {
      group.scalars.push_back(*std::move(scalar));
      continue;
    }
    SW_TRY(CheckStateName(*reading, out->file, state));
    SW_TRY_ASSIGN(const Place place,
                  reading->map.PlaceOf(out->file, document, value,
                                       GroupName(g) + ": state \"" + state + "\""));
    group.states.emplace_back(state, place);
  }
  std::sort(group.states.begin(), group.states.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::sort(group.scalars.begin(), group.scalars.end(),
            [](const Scalar& a, const Scalar& b) { return a.state < b.state; });
  return {};
}

/// Reads states of all groups. `base` is {"state", "param_groups"}, or a list of states if elastic.
Status ReadAllStates(Reading* reading, const Document& document, const Node* base,
                     const Shard* first, Shard* out) {
  const std::string& name = reading->file_name(out->file);
  if (base == nullptr || (!base->is_dict() && !base->is_list())) {
    return Fail(Errc::kBadInput, name, ": optimizer state: dict expected, found ",
                (base == nullptr ? "nothing" : pickle::Describe(base)));
  }
  out->elastic = base->is_list();
  if (out->elastic && base->items.size() != out->groups.size()) {
    return Fail(Errc::kBadInput, name, ": states for ", base->items.size(),
                " groups, but master weights for ", out->groups.size());
  }
  const Node* states = out->elastic ? nullptr : base->Find("state");
  const Node* options = out->elastic ? nullptr : base->Find("param_groups");
  for (std::size_t g = 0; g < out->groups.size(); ++g) {
    const Node* group =
        out->elastic ? base->items[g] : FindInt(states, static_cast<std::int64_t>(g));
    SW_TRY(ReadStates(reading, document, group, options, first, g, out));
  }
  return {};
}

/// Reads param_slice_mappings: the start of each parameter in this rank's partition.
Status ReadSlices(const Reading& reading, const Node* mappings, Shard* out) {
  if (mappings == nullptr || !mappings->is_list()) return {};
  const std::string where = reading.file_name(out->file) + ": param_slice_mappings";
  if (mappings->items.size() != out->groups.size()) {
    return Fail(Errc::kBadInput, where, ": ", out->groups.size(), " groups expected, found ",
                mappings->items.size());
  }
  for (std::size_t g = 0; g < mappings->items.size(); ++g) {
    const Node* dict = mappings->items[g];
    if (!dict->is_dict()) continue;
    for (std::size_t i = 0; i < dict->entry_count(); ++i) {
      const Node* address = dict->value(i);
      auto name = pickle::AsString(dict->key(i));
      auto start = pickle::AsCount(FindPath(address->state, {"start"}));
      auto elems = pickle::AsCount(FindPath(address->state, {"numel"}));
      if (!name || !start || !elems) {
        return Fail(Errc::kBadInput, where, "[", g, "]: name and fragment address expected, found ",
                    pickle::Describe(address));
      }
      out->groups[g].slices.push_back({std::string(*name), *start, *elems});
    }
  }
  return {};
}

Status ReadCounts(const Reading& reading, const Node* inner, Shard* out) {
  const std::string& name = reading.file_name(out->file);
  if (const Node* counts = inner->Find("partition_count"); counts != nullptr) {
    if (auto one = pickle::AsCount(counts)) {
      out->partition_count = {*one};
    } else {
      auto list = pickle::AsShape(counts);
      if (!list) return Within(name + ": partition_count", std::move(list).error());
      out->partition_count = *std::move(list);
    }
  } else {
    out->partition_count = {reading.ranks};
  }
  if (out->partition_count.size() != 1 && out->partition_count.size() != out->groups.size()) {
    return Fail(Errc::kBadInput, name, ": partition_count: ", out->groups.size(),
                " groups expected, found ", out->partition_count.size());
  }
  if (const Node* pads = inner->Find("param_alignment_paddings");
      pads != nullptr && pads->is_list()) {
    for (const Node* group : pads->items) {
      auto list = pickle::AsShape(group);
      if (!list) return Within(name + ": param_alignment_paddings", std::move(list).error());
      out->alignments.push_back(*std::move(list));
    }
    if (out->alignments.size() != out->groups.size()) {
      return Fail(Errc::kBadInput, name, ": param_alignment_paddings: ", out->groups.size(),
                  " groups expected, found ", out->alignments.size());
    }
  }
  return {};
}

Status ReadStage(const Reading& reading, const Node* inner, Shard* out) {
  const Node* stage = inner->Find("zero_stage");
  if (stage == nullptr) {
    // BF16_Optimizer and old releases of stage 1 do not write a stage.
    out->stage = 1;
    out->bf16_optimizer = inner->Find("loss_scaler") == nullptr;
    return {};
  }
  auto number = StageOf(stage);
  if (!number)
    return Within(reading.file_name(out->file) + ": zero_stage", std::move(number).error());
  out->stage = *number;
  if (out->stage < 1 || out->stage > 3) {
    return Fail(Errc::kBadInput, reading.file_name(out->file),
                ": zero_stage: 1 to 3 expected, found ", out->stage);
  }
  return {};
}

/// Returns the state dict of the trainer's optimizer within ZeRO's state dict.
const Node* BaseOf(const Node* inner, bool zero3) {
  return inner->Find(zero3 ? "optimizer_state_dict" : "base_optimizer_state");
}

Result<const Node*> InnerOf(const Reading& reading, std::uint32_t file, const Document& document) {
  const std::string& path = reading.source.files[file].path;
  const Node* inner = document.root->Find("optimizer_state_dict");
  if (inner == nullptr || !inner->is_dict()) {
    return Fail(Errc::kBadInput, path, ": optimizer_state_dict: dict expected, found ",
                (inner == nullptr ? "nothing" : pickle::Describe(inner)));
  }
  if (inner->Find("ds_zero_partition_groups") != nullptr) {
    return Fail(Errc::kUnsupported, path, ": written with AutoEP, which is not supported");
  }
  if (inner->Find("local_sub_partitions_of_fp32_groups") != nullptr) {
    return Fail(Errc::kUnsupported, path,
                ": ZeRO stage 1 of DeepSpeed before 0.3.17 is not supported: load and save the "
                "checkpoint with a newer release");
  }
  return inner;
}

/// Removes dropped states and scalars from a group.
void EraseDropped(const std::set<std::string>& dropped, ShardGroup* group) {
  std::erase_if(group->states, [&](const auto& entry) { return dropped.contains(entry.first); });
  std::erase_if(group->scalars, [&](const Scalar& entry) { return dropped.contains(entry.state); });
}

const Scalar* FindScalar(const ShardGroup& group, std::string_view state) {
  const auto at = std::find_if(group.scalars.begin(), group.scalars.end(),
                               [&](const Scalar& scalar) { return scalar.state == state; });
  return at == group.scalars.end() ? nullptr : &*at;
}

bool HasTensor(const ShardGroup& group, std::string_view state) {
  return std::any_of(group.states.begin(), group.states.end(),
                     [&](const auto& entry) { return entry.first == state; });
}

/// Drops numbers that differ between ranks, because a group on other ranks can have only
/// one. CheckAgreement compares steps: ranks with different steps are not one checkpoint.
void DropRanksOwn(Reading* reading, const std::string& files, const Node* options, std::size_t g,
                  ShardGroup* first, ShardGroup* other) {
  const auto drop = [&](const std::string& state, const std::string& a, const std::string& b) {
    Bind(reading, files + ": " + GroupName(g), state, "each rank has its own: " + a + " and " + b,
         options);
    first->dropped.insert(state);
  };
  for (const Scalar& scalar : first->scalars) {
    if (scalar.state == layout::kStep) continue;
    const Scalar* same = FindScalar(*other, scalar.state);
    if (same != nullptr && !(*same == scalar)) drop(scalar.state, Show(scalar), Show(*same));
    if (scalar.is_tensor && HasTensor(*other, scalar.state))
      drop(scalar.state, Show(scalar), "a partition");
  }
  for (const Scalar& scalar : other->scalars) {
    if (scalar.is_tensor && HasTensor(*first, scalar.state))
      drop(scalar.state, "a partition", Show(scalar));
  }
  EraseDropped(first->dropped, other);
  EraseDropped(first->dropped, first);
}

/// Checks that all shards of an mp rank have the same groups.
Status CheckGroups(const Reading& reading, const Shard& first, const Shard& other) {
  if (first.groups.size() == other.groups.size()) return {};
  return Fail(
      Errc::kBadInput, reading.file_name(first.file), " and ", reading.file_name(other.file),
      ": the number of groups differs: ", first.groups.size(), " and ", other.groups.size());
}

/// Checks other values that must be equal in all shards of an mp rank.
Status CheckAgreement(const Reading& reading, const Shard& first, const Shard& other) {
  const std::string files = reading.file_name(first.file) + " and " + reading.file_name(other.file);
  const auto differ = [&](const std::string& what, const std::string& a, const std::string& b) {
    return Fail(Errc::kBadInput, files, ": ", what, " differs: ", a, " and ", b);
  };
  if (first.stage != other.stage || first.bf16_optimizer != other.bf16_optimizer) {
    const auto shown = [](const Shard& s) {
      return s.bf16_optimizer ? std::string("none") : std::to_string(s.stage);
    };
    return differ("zero_stage", shown(first), shown(other));
  }
  if (first.partition_count != other.partition_count) {
    return differ("partition_count", ToString(first.partition_count),
                  ToString(other.partition_count));
  }
  if (first.elastic != other.elastic) {
    return differ("the form of base_optimizer_state", first.elastic ? "list" : "dict",
                  other.elastic ? "list" : "dict");
  }
  if (first.alignments != other.alignments) {
    return Fail(Errc::kBadInput, files, ": param_alignment_paddings differ");
  }
  for (std::size_t g = 0; g < first.groups.size(); ++g) {
    const ShardGroup& a = first.groups[g];
    const ShardGroup& b = other.groups[g];
    const std::string group = GroupName(g);
    const auto type = [](const Place& place) { return std::string(Name(place.dtype)); };
    if (a.fp32.dtype != b.fp32.dtype) {
      return differ("the master weights' type of " + group, type(a.fp32), type(b.fp32));
    }
    const std::size_t states = std::min(a.states.size(), b.states.size());
    for (std::size_t i = 0; i < states; ++i) {
      if (a.states[i].first != b.states[i].first) {
        return differ("the states of " + group, a.states[i].first, b.states[i].first);
      }
      if (a.states[i].second.dtype != b.states[i].second.dtype) {
        return differ("the type of \"" + a.states[i].first + "\" of " + group,
                      type(a.states[i].second), type(b.states[i].second));
      }
    }
    if (a.states.size() != b.states.size()) {
      return differ("the number of states of " + group, std::to_string(a.states.size()),
                    std::to_string(b.states.size()));
    }
    if (a.scalars.size() != b.scalars.size()) {
      return differ("the number of states of " + group, std::to_string(a.scalars.size()),
                    std::to_string(b.scalars.size()));
    }
    for (std::size_t i = 0; i < a.scalars.size(); ++i) {
      if (!(a.scalars[i] == b.scalars[i])) {
        const bool step = a.scalars[i].state == "step";
        return differ("\"" + a.scalars[i].state + "\" of " + group, Show(a.scalars[i]),
                      Show(b.scalars[i]) + (step ? "; the files come from two saves" : ""));
      }
    }
  }
  return {};
}

}  // namespace

Result<Shard> ReadShard(Reading* reading, std::uint32_t file, std::optional<Passed>* keep,
                        Shard* first) {
  SW_TRY_ASSIGN(const Document document, Open(*reading, file));
  SW_TRY_ASSIGN(const Node* inner, InnerOf(*reading, file, document));
  Shard out;
  out.file = file;
  SW_TRY(ReadStage(*reading, inner, &out));
  const bool zero3 = out.stage == 3;
  if (zero3 != reading->grid.zero3()) {
    return Fail(Errc::kBadInput, reading->file_name(file), ": a shard of ZeRO stage ", out.stage,
                " does not match the stage of ", reading->file_name(reading->models.front().file));
  }
  const std::string masters = zero3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
  SW_TRY(ReadMasters(reading, document, inner->Find(masters), masters, &out));
  const Node* base = BaseOf(inner, zero3);
  if (first != nullptr) SW_TRY(CheckGroups(*reading, *first, out));
  SW_TRY(ReadAllStates(reading, document, base, first, &out));
  SW_TRY(ReadCounts(*reading, inner, &out));
  if (!zero3) SW_TRY(ReadSlices(*reading, inner->Find("param_slice_mappings"), &out));
  if (first != nullptr) {
    const std::string files = reading->file_name(first->file) + " and " + reading->file_name(file);
    const Node* options = FindPath(base, {"param_groups"});
    for (std::size_t g = 0; g < out.groups.size(); ++g) {
      DropRanksOwn(reading, files, options, g, &first->groups[g], &out.groups[g]);
    }
    const Node* rank0 = BaseOf(reading->state.optimizer.back().document.root, zero3);
    CompareOptions(reading, FindPath(rank0, {"param_groups"}), options, files);
    SW_TRY(CheckAgreement(*reading, *first, out));
    // Their nodes are freed with the document.
    for (ShardGroup& group : out.groups) group.scalars.clear();
  }
  if (keep != nullptr) {
    Passed passed;
    passed.document = document;
    for (std::uint32_t i = 0; i < document.storages.size(); ++i) {
      passed.members.push_back(reading->map.MemberOf(file, document, i));
    }
    *keep = std::move(passed);
  }
  return out;
}

namespace {

/// Compares the shards of the mp ranks with those of the rank that has the most groups.
Status CompareStages(Reading* reading) {
  const Shard& front = reading->shards.front().front();
  const bool zero3 = front.stage == 3;
  std::vector<GroupList> lists;
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    const Shard& here = reading->shards[mp].front();
    const bool fewer = here.groups.size() != front.groups.size();
    if (front.stage != here.stage || front.bf16_optimizer != here.bf16_optimizer ||
        (zero3 && fewer)) {
      return Fail(Errc::kBadInput, reading->file_name(front.file), " and ",
                  reading->file_name(here.file),
                  ": stage or number of groups differs: ", front.stage, ", ", front.groups.size(),
                  " and ", here.stage, ", ", here.groups.size());
    }
    const Node* base = BaseOf(reading->state.optimizer[mp].document.root, zero3);
    lists.push_back({here.file, here.groups.size(), FindPath(base, {"param_groups"})});
  }
  SW_TRY(MatchGroups(reading, lists));
  const GroupList& all = lists[reading->state.options_rank];
  for (const GroupList& own : lists) {
    if (&own == &all || own.count != all.count) continue;
    CompareOptions(reading, all.groups, own.groups,
                   reading->file_name(all.file) + " and " + reading->file_name(own.file));
  }
  return {};
}

}  // namespace

Status ReadShards(Reading* reading) {
  if (reading->grid.shard.empty()) {
    // Without ZeRO the model states contain the optimizer.
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
      Passed passed = reading->state.model_states[mp];
      const Node* optimizer = passed.document.root->Find("optimizer");
      passed.document.root = optimizer != nullptr ? optimizer : passed.document.arena->None();
      reading->state.optimizer.push_back(std::move(passed));
    }
    return {};
  }
  reading->shards.resize(reading->mp_ranks);
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    std::vector<Shard>& shards = reading->shards[mp];
    shards.reserve(reading->ranks);  // ReadShard keeps a pointer to the first
    for (std::uint64_t rank = 0; rank < reading->ranks; ++rank) {
      std::optional<Passed> kept;
      SW_TRY_ASSIGN(Shard shard,
                    ReadShard(reading, reading->grid.shard.at({mp, rank}),
                              rank == 0 ? &kept : nullptr, rank == 0 ? nullptr : &shards.front()));
      if (kept) {
        reading->shard_roots.push_back(kept->document.root);
        kept->document.root = kept->document.root->Find("optimizer_state_dict");
        reading->state.optimizer.push_back(*std::move(kept));
      }
      shards.push_back(std::move(shard));
    }
    for (Shard& shard : shards) {
      for (std::size_t g = 0; g < shard.groups.size(); ++g) {
        EraseDropped(shards.front().groups[g].dropped, &shard.groups[g]);
      }
    }
  }
  return CompareStages(reading);
}

}  // namespace shardwright::checkpoints::reader
