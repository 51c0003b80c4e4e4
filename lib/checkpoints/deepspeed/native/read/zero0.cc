// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"

// Without ZeRO the optimizer identifies parameters only by number. The reader finds their
// names from torch's own names if they were saved, from the packing of the weights in one
// storage (FP16_Optimizer), or from module order and shapes if only one assignment fits.

namespace shardwright::checkpoints::reader {
namespace {

enum class Form : std::uint8_t { kNone, kTorch, kUnfused, kFused };

/// The optimizer of one mp rank.
struct Optimizer {
  std::uint64_t mp = 0;
  std::uint32_t file = 0;
  Form form = Form::kNone;
  const Node* root = nullptr;
  const Node* state = nullptr;   ///< dict by number
  const Node* groups = nullptr;  ///< list
};

/// One optimizer group: the parameters' numbers, and their shapes if known.
struct PlainGroup {
  std::vector<std::int64_t> ids;
  std::vector<std::optional<Shape>> shapes;
  std::optional<std::vector<std::string>> names;
};

tl::unexpected<Error> Unknown(const Reading& reading, const Optimizer& optimizer,
                              const std::string& what) {
  return Fail(Errc::kUnsupported, reading.source.files[optimizer.file].path,
              ": the checkpoint does not record which optimizer state belongs to which parameter: ",
              what, " (save it with ZeRO stage 1, or give the optimizer named parameters)");
}

const Node* ListAt(const Node* node, std::size_t i) {
  return node != nullptr && node->is_list() && i < node->items.size() ? node->items[i] : nullptr;
}

Result<Optimizer> FindOptimizer(const Reading& reading, std::uint64_t mp) {
  Optimizer out;
  out.mp = mp;
  out.file = reading.models[mp].file;
  out.root = reading.state.optimizer[mp].document.root;
  if (out.root->is_none()) return out;
  const std::string where = reading.file_name(out.file) + ": optimizer";
  if (!out.root->is_dict()) {
    return Fail(Errc::kUnsupported, where, ": dict expected, found ", pickle::Describe(out.root));
  }
  const Node* base = out.root;
  out.form = Form::kTorch;
  if (out.root->Find("fp32_groups_flat") != nullptr) out.form = Form::kFused;
  if (out.root->Find("fp32_groups") != nullptr) out.form = Form::kUnfused;
  if (out.form != Form::kTorch) base = out.root->Find("optimizer_state_dict");
  out.state = FindPath(base, {"state"});
  out.groups = FindPath(base, {"param_groups"});
  if (out.state == nullptr || !out.state->is_dict() || out.groups == nullptr ||
      !out.groups->is_list()) {
    return Fail(
        Errc::kUnsupported, where,
        ": neither a torch optimizer nor one of DeepSpeed's: no \"state\" and \"param_groups\"");
  }
  return out;
}

/// Infers the shape of a parameter from states of that shape.
Result<std::optional<Shape>> ShapeOfStates(const Reading& reading, const Node* states,
                                           const Node* groups) {
  if (states == nullptr || !states->is_dict()) return std::optional<Shape>();
  const Shape* found = nullptr;
  SW_TRY_ASSIGN(const auto entries, StatesOf(states));
  for (const auto& [name, node] : entries) {
    if (!node->is_tensor() || name == layout::kStep ||
        HandlingOf(reading, name, groups) != StateHandling::kCut)
      continue;
    // Single numbers are ignored unless the parameter is one. Some optimizers stack
    // several moments in one state. The smallest other state has the parameter's shape.
    const Shape& shape = node->tensor->shape;
    const auto worse = [](const Shape& a) { return std::pair(Elems(a) < 2, Elems(a)); };
    if (found == nullptr || worse(shape) < worse(*found)) found = &shape;
  }
  return found == nullptr ? std::optional<Shape>() : *found;
}

Result<PlainGroup> ReadGroup(const Reading& reading, const Optimizer& optimizer, std::size_t g) {
  PlainGroup out;
  const std::string where =
      reading.file_name(optimizer.file) + ": optimizer group " + std::to_string(g);
  const Node* group = optimizer.groups->items[g];
  auto ids = pickle::AsShape(FindPath(group, {"params"}));
  if (!ids) return Within(where, std::move(ids).error());
  for (const std::uint64_t id : *ids) out.ids.push_back(static_cast<std::int64_t>(id));
  if (const Node* names = group->Find("param_names"); names != nullptr && names->is_list()) {
    if (names->items.size() != out.ids.size()) {
      return Fail(Errc::kBadInput, where, ": ", out.ids.size(), " names expected, found ",
                  names->items.size());
    }
    out.names.emplace();
    for (const Node* name : names->items) {
      SW_TRY_ASSIGN(const std::string_view text, pickle::AsString(name));
      out.names->emplace_back(text);
    }
  }
  const Node* masters = ListAt(optimizer.root->Find("fp32_groups"), g);
  if (optimizer.form == Form::kUnfused &&
      (masters == nullptr || !masters->is_list() || masters->items.size() != out.ids.size())) {
    return Fail(Errc::kBadInput, where, ": fp32_groups: ", out.ids.size(),
                " master weights expected");
  }
  for (std::size_t i = 0; i < out.ids.size(); ++i) {
    const Node* master = ListAt(masters, i);
    if (optimizer.form == Form::kUnfused && master->is_tensor()) {
      out.shapes.emplace_back(master->tensor->shape);
    } else {
      const Node* states = FindInt(optimizer.state, out.ids[i]);
      SW_TRY_ASSIGN(std::optional<Shape> shape, ShapeOfStates(reading, states, optimizer.groups));
      out.shapes.push_back(std::move(shape));
    }
  }
  return out;
}

/// Returns the possible parameters of an mp rank's optimizer, in named_parameters order.
std::vector<std::uint32_t> Candidates(const Reading& reading, std::uint64_t mp) {
  std::vector<std::uint32_t> out;
  for (std::uint32_t i = 0; i < reading.out.params.size(); ++i) {
    const Param& param = reading.out.params[i];
    const std::vector<std::uint64_t>& stages = reading.params[i].stages;
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    if (std::find(stages.begin(), stages.end(), reading.stage_of(mp)) == stages.end()) continue;
    out.push_back(i);
  }
  // A pipeline module registers its tied modules before its layers.
  std::stable_partition(out.begin(), out.end(), [&](std::uint32_t param) {
    return reading.out.params[param].name.starts_with("tied_modules.");
  });
  return out;
}

/// Returns the positions of `wanted` in `there`, in order. Empty unless exactly one choice fits.
/// \param fits  set to false if no choice fits
std::vector<std::size_t> EmbedOnce(const std::vector<Shape>& wanted,
                                   const std::vector<Shape>& there, bool* fits) {
  std::vector<std::size_t> first;
  for (std::size_t i = 0; i < there.size() && first.size() < wanted.size(); ++i) {
    if (there[i] == wanted[first.size()]) first.push_back(i);
  }
  *fits = first.size() == wanted.size();
  if (!*fits) return {};
  std::vector<std::size_t> last(wanted.size());
  std::size_t left = wanted.size();
  for (std::size_t i = there.size(); i-- > 0 && left > 0;) {
    if (there[i] == wanted[left - 1]) last[--left] = i;
  }
  return first == last ? first : std::vector<std::size_t>();
}

Result<std::vector<std::uint32_t>> ByName(const Reading& reading, const Optimizer& optimizer,
                                          const PlainGroup& group) {
  std::vector<std::uint32_t> out;
  for (const std::string& name : *group.names) {
    const auto at = reading.by_name.find(name);
    if (at == reading.by_name.end()) {
      return Fail(Errc::kUnsupported, reading.file_name(optimizer.file),
                  ": optimizer: parameter \"", name, "\" is not in module");
    }
    if (reading.out.params[at->second].kind == ParamKind::kBuffer) {
      return Fail(Errc::kUnsupported, reading.file_name(optimizer.file), ": optimizer: \"", name,
                  "\" is not a parameter but a buffer or an entry of the state dict");
    }
    out.push_back(at->second);
  }
  return out;
}

/// Returns the reason why the states of a parameter do not determine its shape.
std::string WhyShapeless(const Reading& reading, const Optimizer& optimizer) {
  for (std::size_t i = 0; i < optimizer.state->entry_count(); ++i) {
    const Node* states = optimizer.state->value(i);
    if (!states->is_dict()) continue;
    const auto entries = StatesOf(states);
    if (!entries) continue;
    for (const auto& [state, value] : *entries) {
      if (HandlingOf(reading, state, optimizer.groups) != StateHandling::kBound) continue;
      return "state \"" + state + "\" does not have its shape" +
             KnownAs(reading, state, optimizer.groups);
    }
  }
  return "it has no states yet";
}

/// Names the parameters of all groups by module order and shapes.
Result<std::vector<std::vector<std::uint32_t>>> ByShape(const Reading& reading,
                                                        const Optimizer& optimizer,
                                                        const std::vector<PlainGroup>& groups) {
  const std::vector<std::uint32_t> candidates = Candidates(reading, optimizer.mp);
  const std::uint64_t tp = reading.tp_of(optimizer.mp);
  const auto shape_of = [&](std::uint32_t param) { return reading.params[param].shards[tp]; };
  if (groups.size() == 1 && groups[0].ids.size() == candidates.size()) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      const std::optional<Shape>& shape = groups[0].shapes[i];
      if (!shape || *shape == shape_of(candidates[i])) continue;
      return Unknown(reading, optimizer,
                     "parameter " + std::to_string(i) + " of the optimizer has shape " +
                         ToString(*shape) + ", \"" + reading.out.params[candidates[i]].name +
                         "\" has " + ToString(shape_of(candidates[i])));
    }
    return std::vector<std::vector<std::uint32_t>>{candidates};
  }
  std::map<Shape, std::size_t> owner;  // the only group with parameters of this shape
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const std::optional<Shape>& shape : groups[g].shapes) {
      if (!shape) return Unknown(reading, optimizer, WhyShapeless(reading, optimizer));
      if (const auto [at, fresh] = owner.emplace(*shape, g); !fresh && at->second != g) {
        return Unknown(reading, optimizer,
                       "groups " + std::to_string(at->second) + " and " + std::to_string(g) +
                           " both have shape " + ToString(*shape));
      }
    }
  }
  std::vector<std::vector<std::uint32_t>> out(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::vector<std::uint32_t> mine;
    std::vector<Shape> there;
    std::vector<Shape> wanted;
    for (const std::uint32_t param : candidates) {
      const auto at = owner.find(shape_of(param));
      if (at == owner.end() || at->second != g) continue;
      mine.push_back(param);
      there.push_back(at->first);
    }
    for (const std::optional<Shape>& shape : groups[g].shapes) wanted.push_back(*shape);
    bool fits = false;
    const std::vector<std::size_t> places = EmbedOnce(wanted, there, &fits);
    if (!fits || places.size() != wanted.size()) {
      return Unknown(reading, optimizer,
                     "group " + std::to_string(g) + ": " + (fits ? "more than one way" : "no way") +
                         " to match its " + std::to_string(wanted.size()) +
                         " shapes with the module's parameters");
    }
    for (const std::size_t place : places) out[g].push_back(mine[place]);
  }
  return out;
}

/// FP16_Optimizer: names the parameters by their weights, which are views of one flat storage.
Result<std::vector<std::uint32_t>> ByPacking(const Reading& reading, const Optimizer& optimizer,
                                             std::size_t g, std::uint64_t elems) {
  std::map<std::uint32_t, std::vector<std::pair<std::uint64_t, std::uint32_t>>> members;
  const std::vector<std::uint32_t> candidates = Candidates(reading, optimizer.mp);
  for (const std::uint32_t param : candidates) {
    for (const Weight& weight : reading.params[param].weights) {
      if (reading.mp_of(weight.stage, weight.tp) != optimizer.mp) continue;
      members[weight.place.member].emplace_back(weight.place.offset / ItemSize(weight.place.dtype),
                                                param);
    }
  }
  const auto packed = [&](const std::vector<std::pair<std::uint64_t, std::uint32_t>>& views) {
    std::uint64_t at = 0;
    for (const auto& [offset, param] : views) {
      if (offset != at) return false;
      at += Elems(reading.params[param].shards[reading.tp_of(optimizer.mp)]);
    }
    return at == elems;
  };
  std::vector<std::vector<std::uint32_t>> found;
  for (auto& [member, views] : members) {
    std::sort(views.begin(), views.end());
    if (views.size() < 2 || !packed(views)) continue;
    found.emplace_back();
    for (const auto& [offset, param] : views) found.back().push_back(param);
  }
  if (found.size() == 1) return found.front();
  if (found.empty() && optimizer.groups->items.size() == 1) {
    std::uint64_t sum = 0;
    for (const std::uint32_t param : candidates) {
      sum += Elems(reading.params[param].shards[reading.tp_of(optimizer.mp)]);
    }
    if (sum == elems) return candidates;
  }
  return Unknown(reading, optimizer,
                 "group " + std::to_string(g) + " of " + std::to_string(elems) + " elements fits " +
                     std::to_string(found.size()) + " storages of the module");
}

Result<std::vector<std::vector<std::uint32_t>>> OrderOf(Reading* reading,
                                                        const Optimizer& optimizer) {
  std::vector<std::vector<std::uint32_t>> out;
  const std::size_t count = optimizer.groups->items.size();
  if (optimizer.form == Form::kFused) {
    const Node* masters = optimizer.root->Find("fp32_groups_flat");
    for (std::size_t g = 0; g < count; ++g) {
      SW_TRY_ASSIGN(const Place flat,
                    reading->map.PlaceOf(optimizer.file, reading->models[optimizer.mp].document,
                                         ListAt(masters, g), "fp32_groups_flat"));
      SW_TRY_ASSIGN(std::vector<std::uint32_t> order,
                    ByPacking(*reading, optimizer, g, flat.elems));
      out.push_back(std::move(order));
    }
    return out;
  }
  std::vector<PlainGroup> groups;
  for (std::size_t g = 0; g < count; ++g) {
    SW_TRY_ASSIGN(PlainGroup group, ReadGroup(*reading, optimizer, g));
    groups.push_back(std::move(group));
  }
  const bool named = std::all_of(groups.begin(), groups.end(),
                                 [](const PlainGroup& group) { return group.names.has_value(); });
  if (!named) return ByShape(*reading, optimizer, groups);
  for (const PlainGroup& group : groups) {
    SW_TRY_ASSIGN(std::vector<std::uint32_t> order, ByName(*reading, optimizer, group));
    out.push_back(std::move(order));
  }
  return out;
}

/// Place of one state of one parameter, or of a whole flat group.
struct Source {
  const Optimizer& optimizer;
  std::size_t group;
  std::int64_t id;  // key in "state"
  const Node* master;
};

/// Returns false for states that are neither numbers nor of the parameter's shape. Reports them.
bool KeepsState(Reading* reading, const Optimizer& optimizer, const std::string& state,
                const Node* value, const std::string& what, const Shape& shape) {
  const std::string where = reading->file_name(optimizer.file) + ": " + what;
  const StateHandling handling = HandlingOf(*reading, state, optimizer.groups);
  if (handling == StateHandling::kLeftOut) LeaveOut(reading, where, state, optimizer.groups);
  if (handling == StateHandling::kLeftOut) return false;
  if (const std::string why = WhyUnknown(state, value); !why.empty()) {
    Bind(reading, where, state, why, optimizer.groups);
    return false;
  }
  if (!value->is_tensor()) return true;
  const Shape& own = value->tensor->shape;
  if (handling == StateHandling::kCut && (own == shape || IsNumber(own))) return true;
  Bind(reading, where, state,
       "its shape is " + ToString(own) + ", that of the parameter " + ToString(shape),
       optimizer.groups);
  return false;
}

/// Maps master weights and states of one parameter. `offset` is its position in flat ones.
Status MapOne(Reading* reading, const Source& from, std::uint32_t param, std::uint64_t offset,
              const Shape& shape, const Group& options) {
  const Optimizer& optimizer = from.optimizer;
  const Document& document = reading->models[optimizer.mp].document;
  const std::string what = "optimizer state of \"" + reading->out.params[param].name + "\"";
  const auto add = [&](const Node* node, const std::string& state) -> Status {
    SW_TRY_ASSIGN(const std::vector<PlacedPart> parts,
                  reading->map.PartsOf(optimizer.file, document, node, what + " " + state));
    if (node->tensor->shape != shape) {
      return Fail(Errc::kBadInput, reading->file_name(optimizer.file), ": ", what, " ", state,
                  ": shape ", ToString(shape), " expected, found ", ToString(node->tensor->shape));
    }
    for (const PlacedPart& part : parts) {
      SW_TRY(AddFragment(reading, param, state, optimizer.mp,
                         {reading->map.AddWhole(part.place), offset, layout::kOneHolder, 0},
                         part.order));
    }
    return {};
  };
  if (from.master != nullptr) SW_TRY(add(from.master, std::string(layout::kMaster)));
  std::vector<Scalar> scalars;
  const Node* states = FindInt(optimizer.state, from.id);
  std::vector<std::pair<std::string, const Node*>> entries;
  if (states != nullptr && states->is_dict()) {
    SW_TRY_ASSIGN(entries, StatesOf(states));
  }
  for (const auto& [state, value] : entries) {
    if (!KeepsState(reading, optimizer, state, value, what, shape)) continue;
    SW_TRY_ASSIGN(std::optional<Scalar> scalar,
                  ScalarOf(reading, optimizer.file, document, state, value, shape));
    if (scalar) {
      scalars.push_back(*std::move(scalar));
    } else {
      SW_TRY(CheckStateName(*reading, optimizer.file, state));
      SW_TRY(add(value, state));
    }
  }
  std::sort(scalars.begin(), scalars.end(),
            [](const Scalar& a, const Scalar& b) { return a.state < b.state; });
  return SetScalars(reading, param,
                    WithGroupStep(*reading, optimizer.mp, std::move(scalars), options),
                    optimizer.file);
}

Status MapGroup(Reading* reading, const Optimizer& optimizer, std::size_t g, const Group& options) {
  const std::vector<std::uint32_t>& params = reading->plain_order[optimizer.mp][g];
  SW_TRY_ASSIGN(const PlainGroup group, ReadGroup(*reading, optimizer, g));
  const bool fused = optimizer.form == Form::kFused;
  const Node* masters = ListAt(optimizer.root->Find(fused ? "fp32_groups_flat" : "fp32_groups"), g);
  std::uint64_t at = 0;
  std::uint64_t total = 0;
  for (const std::uint32_t param : params) {
    total += Elems(reading->params[param].shards[reading->tp_of(optimizer.mp)]);
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const Shape& own = reading->params[params[i]].shards[reading->tp_of(optimizer.mp)];
    if (fused) {
      const std::int64_t id = group.ids.empty() ? static_cast<std::int64_t>(g) : group.ids[0];
      SW_TRY(MapOne(reading, {optimizer, g, id, masters}, params[i], at, {total}, options));
      at += Elems(own);
    } else {
      SW_TRY(MapOne(reading, {optimizer, g, group.ids[i], ListAt(masters, i)}, params[i], 0, own,
                    options));
    }
  }
  return {};
}

}  // namespace

Status OrderWithoutZero(Reading* reading) {
  std::vector<bool> optimized(reading->out.params.size());
  std::vector<GroupList> lists;
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    SW_TRY_ASSIGN(const Optimizer optimizer, FindOptimizer(*reading, mp));
    lists.push_back({optimizer.file, 0, optimizer.groups});
    if (optimizer.form == Form::kNone) {
      reading->plain_order.emplace_back();
      continue;
    }
    reading->plain_weights = optimizer.form == Form::kTorch;
    SW_TRY_ASSIGN(auto order, OrderOf(reading, optimizer));
    for (const std::vector<std::uint32_t>& group : order) {
      for (const std::uint32_t param : group) optimized[param] = true;
    }
    lists.back().count = order.size();
    reading->plain_order.push_back(std::move(order));
  }
  SW_TRY(MatchGroups(reading, lists));
  for (std::size_t i = 0; i < optimized.size(); ++i) {
    Param& param = reading->out.params[i];
    if (param.kind == ParamKind::kTrainable && !optimized[i]) param.kind = ParamKind::kFrozen;
  }
  return {};
}

bool WeightsAreMasters(const Reading& reading) {
  const Result<Optimizer> optimizer = FindOptimizer(reading, 0);
  return optimizer && optimizer->form == Form::kTorch;
}

void MapNoOptimizer(Reading* reading) {
  Group group = MakeGroup(reading, nullptr);
  for (std::uint32_t i = 0; i < reading->out.params.size(); ++i) {
    Param& param = reading->out.params[i];
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    param.group = 0;
    group.params.push_back(i);
  }
  reading->plain_weights = WeightsAreMasters(*reading);
  reading->out.groups.push_back(std::move(group));
}

Status MapWithoutZero(Reading* reading) {
  const std::size_t groups = reading->own_groups.front().size();
  if (groups == 0) {
    reading->out.warnings.push_back(reading->file_name(reading->models.front().file) +
                                    ": no optimizer: every parameter is taken as frozen");
    return {};
  }
  for (std::size_t g = 0; g < groups; ++g) {
    SW_TRY_ASSIGN(const Optimizer all, FindOptimizer(*reading, reading->state.options_rank));
    Group group = MakeGroup(reading, all.groups->items[g]);
    std::vector<bool> listed(reading->out.params.size());
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
      const std::optional<std::size_t> own = reading->own_groups[mp][g];
      if (!own) continue;
      SW_TRY_ASSIGN(const Optimizer optimizer, FindOptimizer(*reading, mp));
      SW_TRY(MapGroup(reading, optimizer, *own, group));
      for (const std::uint32_t param : reading->plain_order[mp][*own]) {
        if (listed[param]) continue;
        listed[param] = true;
        reading->out.params[param].group = static_cast<std::int32_t>(g);
        group.params.push_back(param);
      }
    }
    reading->out.groups.push_back(std::move(group));
  }
  return {};
}

}  // namespace shardwright::checkpoints::reader
