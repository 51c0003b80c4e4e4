// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/universal/foreign_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints::atoms {

using layout::Split;

namespace {

// A part of a tensor in a model file.
struct Stored {
  layout::Placement at;
  layout::CutPtr order;  // as PlacedPart::order
};

// Returns true if checksums prove that whole tensors on all ranks are equal.
bool SameBytes(const layout::ShardMap& map, const std::vector<std::vector<Stored>>& ranks) {
  const layout::Member* first = nullptr;
  for (const std::vector<Stored>& parts : ranks) {
    if (parts.size() != 1 || parts.front().order != nullptr) return false;
    const layout::Array& array = map.arrays[parts.front().at.array];
    const layout::Region& region = array.regions.front();
    const layout::Member& member = map.members[region.member];
    if (region.offset != 0 || region.elems * ItemSize(array.dtype) != member.bytes ||
        !member.crc32 || member.bytes == 0) {
      return false;
    }
    if (first == nullptr) first = &member;
    if (member.bytes != first->bytes || member.crc32 != first->crc32) return false;
  }
  return true;
}

// Adds a tensor stored in the model files, by rank in parts, and its fragments.
Status AddFromModels(Foreign* foreign, Param param, std::string_view state,
                     const std::vector<Shape>& shards,
                     const std::vector<std::vector<Stored>>& places) {
  const std::uint64_t tp = foreign->tp();
  if (tp > 1 && param.kind == ParamKind::kBuffer && SameBytes(foreign->out().map, places)) {
    // universal_checkpoint_info has no list for buffers; its default would cut them.
    param.rule.split = Split::kReplicated;
    param.rule.origin = "equal on all ranks";
    param.shape = shards.front();
  } else {
    SW_TRY_ASSIGN(Ruled ruled, RuleOf(*foreign, param.name, shards, nullptr));
    param.rule = std::move(ruled.rule);
    param.shape = std::move(ruled.whole);
  }
  layout::LogicalTensor tensor;
  tensor.name = param.name;
  tensor.state = state;
  tensor.dtype = param.dtype;
  tensor.shape = param.shape;
  for (std::uint64_t rank = 0; rank < tp; ++rank) {
    auto cut = layout::MakeCut(param.rule, param.shape, tp, rank);
    if (!cut) return Within("\"" + param.name + "\"", std::move(cut).error());
    const auto whole = std::make_shared<const layout::Cut>(*std::move(cut));
    for (const Stored& part : places[rank]) {
      layout::Fragment fragment;
      fragment.cut = part.order == nullptr ? whole : layout::Cut::Compose(whole, part.order);
      fragment.at = part.at;
      const bool copies = layout::FirstCopy(param.rule, tp, rank) != rank;
      const bool partial = param.rule.split == Split::kAverage && tp > 1;
      fragment.role = partial  ? layout::Role::kPartial
                      : copies ? layout::Role::kReplica
                               : layout::Role::kOwner;
      tensor.fragments.push_back(std::move(fragment));
    }
  }
  Checkpoint& out = foreign->out();
  out.map.tensors.push_back(std::move(tensor));
  foreign->by_name.emplace(param.name, static_cast<std::uint32_t>(out.params.size()));
  out.params.push_back(std::move(param));
  return {};
}

// Adds a weight or buffer of every tensor-parallel rank's `module`.
Status AddWhole(Foreign* foreign, Param param, std::string_view state) {
  std::vector<Shape> shards;
  std::vector<std::vector<PlacedPart>> ranks;
  for (std::uint64_t rank = 0; rank < foreign->tp(); ++rank) {
    const Model& model = foreign->models[rank];
    const Node* node = model.root->Find("module")->Find(param.name);
    SW_TRY_ASSIGN(
        std::vector<PlacedPart> parts,
        foreign->reading.map.PartsOf(model.file, foreign->reading.state.model_states[rank].document,
                                     node, "\"" + param.name + "\""));
    param.dtype = node->tensor->dtype;
    shards.push_back(node->tensor->shape);
    ranks.push_back(std::move(parts));
  }
  std::vector<std::vector<Stored>> stored;
  for (const std::vector<PlacedPart>& parts : ranks) {
    stored.emplace_back();
    for (const PlacedPart& part : parts) {
      stored.back().push_back({{.array = foreign->reading.map.AddWhole(part.place),
                                .vector_offset = 0,
                                .chunk = layout::kOneHolder,
                                .region_offset = 0},
                               part.order});
    }
  }
  return AddFromModels(foreign, std::move(param), state, shards, stored);
}

// Pieces of frozen parameters at stage 3, by tensor-parallel
// rank and name. Every ZeRO rank's model file has one.
using Shares = std::vector<std::map<std::string, std::vector<Place>>>;

Result<Shares> ReadShares(Foreign* foreign) {
  Shares shares(foreign->tp());
  for (std::uint64_t rank = 0; rank < foreign->tp(); ++rank) {
    const Node* shapes = foreign->models[rank].root->Find("frozen_param_shapes");
    if (shapes == nullptr || !shapes->is_dict() || shapes->items.empty()) continue;
    for (std::uint64_t d = 0; d < foreign->reading.topology.dp; ++d) {
      const auto file = foreign->folder.stage3_models().find({rank, d});
      if (file == foreign->folder.stage3_models().end()) {
        return reader::Missing(foreign->reading, {reader::ModelFileName(true, d, rank)});
      }
      SW_TRY_ASSIGN(const auto document, reader::Open(foreign->reading, file->second));
      const Node* mine = document.root->Find("frozen_param_fragments");
      for (std::size_t i = 0; i < shapes->entry_count(); ++i) {
        SW_TRY_ASSIGN(const std::string_view name, pickle::AsString(shapes->key(i)));
        const Node* share = mine == nullptr ? nullptr : mine->Find(name);
        SW_TRY_ASSIGN(const Place place,
                      foreign->reading.map.PlaceOf(file->second, document, share,
                                                   "frozen \"" + std::string(name) + "\""));
        shares[rank][std::string(name)].push_back(place);
      }
    }
  }
  return shares;
}

Status AddFrozenShares(Foreign* foreign, const Shares& shares, Param param) {
  std::vector<Shape> shards;
  std::vector<std::vector<Stored>> places;
  for (std::uint64_t rank = 0; rank < foreign->tp(); ++rank) {
    const Model& model = foreign->models[rank];
    const Node* shapes = model.root->Find("frozen_param_shapes");
    auto shape = pickle::AsShape(shapes == nullptr ? nullptr : shapes->Find(param.name));
    if (!shape) {
      return Within(foreign->name_of(model) + ": frozen_param_shapes: \"" + param.name + "\"",
                    std::move(shape).error());
    }
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(*shape));
    const std::vector<Place>& parts = shares[rank].at(param.name);
    std::vector<layout::Region> regions;
    regions.reserve(parts.size());
    for (const Place& part : parts) regions.push_back(foreign->reading.map.RegionOf(part));
    param.dtype = parts.front().dtype;
    const std::uint64_t share = CeilDiv(std::max<std::uint64_t>(elems, 1), parts.size());
    places.push_back({{{.array = foreign->reading.map.AddArray(param.dtype, std::move(regions)),
                        .vector_offset = 0,
                        .chunk = share,
                        .region_offset = 0},
                       nullptr}});
    shards.push_back(*std::move(shape));
  }
  return AddFromModels(foreign, std::move(param), layout::kFrozen, shards, places);
}

// Returns the name that has the data of a tied one. It is in shared_params, or else
// an earlier name in `module` of a tensor with the same view of the same storage.
std::string HolderOf(const Model& model, const Ties& ties,
                     const std::unordered_map<std::string, std::string>& placeholders,
                     const Node* module, std::size_t at) {
  const std::string& name = module->key(at)->text;
  for (const auto& [alias, holder] : ties.aliases) {
    if (alias == name) return holder;
  }
  const Node* node = module->value(at);
  if (const auto tied = placeholders.find(name); tied != placeholders.end()) return tied->second;
  if (model.shapes.contains(name) || !node->is_tensor() || node->tensor->shape == Shape{0}) {
    return "";
  }
  for (std::size_t i = 0; i < at; ++i) {
    const Node* other = module->value(i);
    if (!other->is_tensor() || !module->key(i)->is_string()) continue;
    if (other->tensor->storage == node->tensor->storage &&
        other->tensor->offset == node->tensor->offset &&
        other->tensor->shape == node->tensor->shape &&
        other->tensor->strides == node->tensor->strides && !other->tensor->shape.empty()) {
      return module->key(i)->text;
    }
  }
  return "";
}

// Sorts parameters into the order of the module, and updates the groups.
void SortLike(const std::vector<std::string>& order, Checkpoint* out) {
  std::unordered_map<std::string, std::size_t> place;
  for (std::size_t i = 0; i < order.size(); ++i) place.emplace(order[i], i);
  for (std::size_t i = 0; i < out->params.size(); ++i)
    place.emplace(out->params[i].name, order.size() + i);
  std::vector<std::uint32_t> sorted(out->params.size());
  for (std::uint32_t i = 0; i < sorted.size(); ++i) sorted[i] = i;
  std::stable_sort(sorted.begin(), sorted.end(), [&](std::uint32_t a, std::uint32_t b) {
    return place.at(out->params[a].name) < place.at(out->params[b].name);
  });
  std::vector<Param> params;
  std::vector<std::uint32_t> moved(sorted.size());
  for (std::uint32_t i = 0; i < sorted.size(); ++i) {
    moved[sorted[i]] = i;
    params.push_back(std::move(out->params[sorted[i]]));
  }
  out->params = std::move(params);
  for (Group& group : out->groups) {
    for (std::uint32_t& index : group.params) index = moved[index];
  }
}

// Returns the names of tensors in `module` that are neither parameters nor buffers.
std::unordered_set<std::string> EntriesOf(const Foreign& foreign, const Ties& ties,
                                          const std::unordered_set<std::string>& buffers) {
  const Node* root = foreign.models.front().root;
  std::unordered_set<std::string> tied;
  for (const auto& [alias, holder] : ties.aliases) tied.insert({alias, holder});
  const auto known = [&](const std::string& name) {
    return foreign.by_name.contains(name) || buffers.contains(name) || tied.contains(name) ||
           ties.left_out.contains(name);
  };
  return EntryNames(root->Find("module"), "", FrozenLists::Of(root, foreign.reading.topology.zero),
                    known, true);
}

// Adds an entry of `module` that is not a tensor, for every rank that has it.
void AddOpaqueOf(Foreign* foreign, const std::string& name, const std::string& after) {
  EngineState& state = foreign->reading.state;
  for (std::uint64_t rank = 0; rank < foreign->tp(); ++rank) {
    const Node* module = foreign->models[rank].root->Find("module");
    const Node* value = FindIn(module, name);
    if (value == nullptr) continue;
    std::shared_ptr<const Passed>& from = foreign->kept[rank];
    if (from == nullptr) from = std::make_shared<const Passed>(state.model_states[rank]);
    AddOpaque(&foreign->reading.opaque, name, after, rank, foreign->tp(), {from, value});
  }
}

// Adds second names of tensors. Each pair ends with the name that has the data.
Status AddAliases(Foreign* foreign,
                  const std::vector<std::pair<std::string, std::string>>& aliases) {
  Checkpoint& out = foreign->out();
  const Model& model = foreign->models.front();
  for (const auto& [name, holder] : aliases) {
    const auto at = foreign->by_name.find(holder);
    if (at == foreign->by_name.end()) {
      std::string text = foreign->name_of(model);
      text.append(": \"").append(name).append("\" is tied to \"").append(holder);
      return Fail(Errc::kBadInput, text.append("\", which is missing"));
    }
    Param param = out.params[at->second];
    param.name = name;
    param.alias_of = holder;
    param.group = -1;
    param.scalars.clear();
    foreign->by_name.emplace(name, static_cast<std::uint32_t>(out.params.size()));
    out.params.push_back(std::move(param));
  }
  return {};
}

}  // namespace

Status AddRest(Foreign* foreign) {
  const Model& model = foreign->models.front();
  const Node* module = model.root->Find("module");
  if (module == nullptr || !module->is_dict()) return {};
  std::unordered_set<std::string> buffers;
  if (const Node* names = model.root->Find("buffer_names"); names != nullptr && names->is_list()) {
    for (const Node* name : names->items) buffers.insert(name->text);
  }
  SW_TRY_ASSIGN(const Shares shares, foreign->stage3 ? ReadShares(foreign) : Result<Shares>());
  const auto trained = [&](const std::string& name) { return model.shapes.contains(name); };
  const Node* listed = model.root->Find("frozen_param_shapes");
  const bool lists_frozen = listed != nullptr && listed->is_dict();
  auto ties = reader::TiesOf(model.root, module, trained, lists_frozen);
  if (!ties) return Within(foreign->name_of(model) + ": shared_params", std::move(ties).error());
  Checkpoint& out = foreign->out();
  out.frozen_unknown = !lists_frozen;
  const std::unordered_set<std::string> entries = EntriesOf(*foreign, *ties, buffers);
  std::unordered_map<std::string, std::string> placeholders;
  if (foreign->stage3) {
    placeholders = reader::TiedPlaceholders(module, [&](const std::string& name) {
      return trained(name) || (lists_frozen && listed->Find(name) != nullptr);
    });
  }
  const FrozenLists lists = FrozenLists::Of(model.root, foreign->reading.topology.zero);
  UnlistedParameters unlisted;
  std::unordered_set<std::string> tied;
  for (const auto& [name, shape] : model.shapes) unlisted.AddTrained(name);
  for (const auto& [alias, holder] : ties->aliases) tied.insert(holder);
  const auto is_undecided = [&](const std::string& name) {
    if (const std::string_view kind = lists.KindOf(name); !kind.empty()) {
      return kind == "undecided";
    }
    const bool told = lists.listed || lists.left_out || buffers.contains(name) ||
                      entries.contains(name) || tied.contains(name) ||
                      ties->left_out.contains(name);
    return !told && !unlisted.Contains(name);
  };
  std::vector<std::string> order;
  std::vector<std::pair<std::string, std::string>> aliases;
  for (std::size_t i = 0; i < module->entry_count(); ++i) {
    auto key = pickle::AsString(module->key(i));
    if (!key) return Within(foreign->name_of(model) + ": module", std::move(key).error());
    Param param;
    param.name = *key;
    if (!module->value(i)->is_tensor()) {
      AddOpaqueOf(foreign, param.name, order.empty() ? std::string() : order.back());
      continue;
    }
    order.push_back(param.name);
    if (foreign->by_name.contains(param.name)) continue;
    const auto holder = ties->left_out.find(param.name);
    if (holder != ties->left_out.end() && foreign->stage3) {
      out.warnings.push_back(reader::LeftOutToo(foreign->name_of(model), param.name));
    } else if (std::string other = HolderOf(model, *ties, placeholders, module, i);
               !other.empty()) {
      aliases.emplace_back(param.name, std::move(other));
    } else if (const bool undecided = is_undecided(param.name);
               undecided || buffers.contains(param.name) || entries.contains(param.name)) {
      param.kind = ParamKind::kBuffer;
      param.entry = undecided || !buffers.contains(param.name);
      param.undecided = undecided;
      SW_TRY(AddWhole(foreign, std::move(param), layout::kBuffer));
    } else {
      param.kind = ParamKind::kFrozen;
      if (holder != ties->left_out.end()) {
        param.left_out_holder = holder->second;
      } else {
        out.frozen_unknown = false;
      }
      SW_TRY(foreign->stage3 ? AddFrozenShares(foreign, shares, std::move(param))
                             : AddWhole(foreign, std::move(param), layout::kFrozen));
    }
  }
  SW_TRY(AddAliases(foreign, aliases));
  for (Param& param : out.params) {
    const bool trainable = param.kind == ParamKind::kTrainable && param.alias_of.empty();
    param.frozen_later = trainable && lists_frozen && listed->Find(param.name) != nullptr;
  }
  SortLike(order, &out);
  return {};
}

}  // namespace shardwright::checkpoints::atoms
