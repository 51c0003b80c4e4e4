// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <unordered_map>

#include "checkpoints/name_maps/map_internal.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::maps {
namespace {

/// Stands for format state that may contain old parameter names. It cannot
/// be used after a rename, so it only lists its contents for the report.
struct UnderOldNames : OwnState {
  std::shared_ptr<const OwnState> before;  // owns the nodes that groups may use as options

  std::vector<std::uint32_t> Members() const override { return {}; }
  std::vector<std::string> Contents() const override { return before->Contents(); }
};

/// Builds the new checkpoint.
class Assembler {
 public:
  Assembler(const ModelMap::Impl& map, std::uint32_t to, Checkpoint source,
            std::vector<NewParam> params, const Patterns& patterns)
      : map_(map),
        side_(map.sides[to]),
        patterns_(patterns),
        old_(std::move(source)),
        new_(std::move(params)) {}

  Result<Checkpoint> Run();

 private:
  const Param& Old(const Piece& piece) const { return old_.params[piece.param]; }
  tl::unexpected<Error> CannotJoin(const NewParam& made, const std::string& what) const;
  Status Order();
  Result<Param> MakeParam(const NewParam& made);
  Status MakeExpert(const NewParam& made, Param* param) const;
  Status Tie(const NewParam& made, Param* param) const;
  Status MakeRules();
  Status MakeGroups();
  Status IndexTensors();
  Status MakeTensors(const NewParam& made);
  Status AddFragments(const Piece& piece, const layout::LogicalTensor& from,
                      layout::LogicalTensor* tensor);
  layout::CutPtr Composed(const layout::CutPtr& outer, const layout::CutPtr& inner);

  const ModelMap::Impl& map_;
  const MapSide& side_;
  const Patterns& patterns_;
  Checkpoint old_;
  Checkpoint out_;
  std::vector<NewParam> new_;
  std::vector<std::vector<std::uint32_t>> tensors_;  // by index of the old parameter
  std::map<std::pair<const layout::Cut*, const layout::Cut*>, layout::CutPtr> composed_;
};

tl::unexpected<Error> Assembler::CannotJoin(const NewParam& made, const std::string& what) const {
  std::vector<std::string> names;
  for (const Piece& piece : made.pieces) names.push_back(Old(piece).name);
  return Fail(Errc::kUnsupported, Quoted(made.name), ": cannot be made from ", FirstFew(names),
              ": ", what);
}

/// Returns a sort key for a parameter's position in the model: for each loop over layers
/// or experts around it the loop's position and the iteration, then its own position.
std::optional<std::vector<std::uint64_t>> PlaceIn(const std::vector<NameForm>& order,
                                                  const std::string& name) {
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto captures = order[i].Match(name);
    if (!captures) continue;
    std::vector<std::uint64_t> place;
    for (const std::string& capture : order[i].captures()) {
      const std::string prefix = order[i].UpTo(capture);
      std::size_t begin = i;
      while (begin > 0 && order[begin - 1].Has(capture) &&
             order[begin - 1].UpTo(capture) == prefix) {
        --begin;
      }
      place.push_back(begin);
      // Captured texts have no order, so such parameters keep their relative order.
      place.push_back(order[i].Counts(capture) ? std::stoull(captures->at(capture)) : 0);
    }
    place.push_back(i);
    return place;
  }
  return std::nullopt;
}

/// Sorts new parameters in the order of the target scheme, or else keeps the old order.
Status Assembler::Order() {
  struct Key {
    std::vector<std::uint64_t> place;
    std::uint32_t first = 0;
    std::uint32_t index = 0;
  };
  std::vector<Key> keys;
  bool told = !side_.order.empty();
  bool reshaped = false;
  for (std::uint32_t i = 0; i < new_.size(); ++i) {
    Key& key = keys.emplace_back();
    key.index = i;
    key.first = std::numeric_limits<std::uint32_t>::max();
    for (const Piece& piece : new_[i].pieces) key.first = std::min(key.first, piece.param);
    auto place = PlaceIn(side_.order, new_[i].name);
    told = told && place.has_value();
    if (place) key.place = *std::move(place);
    reshaped = reshaped || new_[i].pieces.size() > 1 ||
               (i > 0 && new_[i - 1].pieces.front().param == new_[i].pieces.front().param);
  }
  std::sort(keys.begin(), keys.end(), [&](const Key& a, const Key& b) {
    if (told && a.place != b.place) return a.place < b.place;
    return std::pair(a.first, a.index) < std::pair(b.first, b.index);
  });
  std::vector<NewParam> sorted;
  sorted.reserve(new_.size());
  for (const Key& key : keys) sorted.push_back(std::move(new_[key.index]));
  new_ = std::move(sorted);
  // Without groups it would also be unknown which parameters are trained.
  if (told && !old_.groups.empty()) out_.order_unknown.clear();
  if (!told && reshaped && out_.order_unknown.empty()) {
    out_.order_unknown = map_.origin + " does not specify the parameter order of naming scheme " +
                         Quoted(side_.name);
  }
  return {};
}

Status Assembler::MakeExpert(const NewParam& made, Param* param) const {
  param->expert.reset();
  if (!made.expert) return {};
  std::optional<std::uint32_t> layer;
  for (const Piece& piece : made.pieces) {
    const std::optional<ExpertId>& old = Old(piece).expert;
    if (!old) return {};
    if (layer && *layer != old->layer) {
      return CannotJoin(made, "they belong to experts of several layers");
    }
    layer = old->layer;
  }
  param->expert = {*layer, static_cast<std::uint32_t>(*made.expert), made.expert_module};
  return {};
}

/// Keeps an alias if it is converted in exactly the same way as the parameter that it aliases.
Status Assembler::Tie(const NewParam& made, Param* param) const {
  const Piece& piece = made.pieces.front();
  for (const NewParam& other : new_) {
    if (other.pieces.size() != 1 || Old(other.pieces.front()).name != param->alias_of) continue;
    const layout::CutPtr& cut = other.pieces.front().cut;
    const bool same = cut == piece.cut || (cut && piece.cut && *cut == *piece.cut);
    if (made.pieces.size() == 1 && same && other.shape == made.shape) {
      param->alias_of = other.name;
      return {};
    }
  }
  return CannotJoin(
      made, "it is tied to " + Quoted(param->alias_of) + ", which the map converts differently");
}

Result<Param> Assembler::MakeParam(const NewParam& made) {
  const Param& first = Old(made.pieces.front());
  Param param = first;
  param.name = made.name;
  param.shape = made.shape;
  for (const Piece& piece : made.pieces) {
    const Param& old = Old(piece);
    std::string differ;
    if (old.kind != first.kind) differ = "some are trained, frozen or buffers, and others are not";
    if (old.group != first.group) differ = "they are in different parameter groups";
    if (old.dtype != first.dtype) differ = "their dtypes differ";
    if (old.scalars != first.scalars) {
      differ = old.scalars.size() == first.scalars.size()
                   ? "their optimizer steps differ (" + Quoted(first.name) + " and " +
                         Quoted(old.name) + ")"
                   : "the optimizer has stepped some and not others";
    }
    if (old.layer != first.layer || old.tied_layers != first.tied_layers) {
      differ = "they are in different pipeline layers";
    }
    if (old.alias_of.empty() != first.alias_of.empty() ||
        (!old.alias_of.empty() && made.pieces.size() > 1)) {
      differ = "one is an alias of another parameter";
    }
    if (!old.left_out_holder.empty() && made.reshaped) {
      differ = "the parameter that one is tied to was left out of the files";
    }
    if (!differ.empty()) return CannotJoin(made, differ);
  }
  SW_TRY(MakeExpert(made, &param));
  if (!param.alias_of.empty()) SW_TRY(Tie(made, &param));
  return param;
}

/// Sets the tensor-parallel rules: those for the new names if there are
/// any; otherwise a parameter that was only renamed keeps its rule.
Status Assembler::MakeRules() {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  std::unordered_map<std::string, const Param*> holders;
  for (const Param& param : out_.params) {
    if (!param.alias_of.empty()) continue;
    names.push_back(param.name);
    shapes.push_back(param.shape);
    holders.emplace(param.name, &param);
  }
  const Patterns chosen = patterns_.ForModel(names, shapes);
  for (std::size_t i = 0; i < new_.size(); ++i) {
    Param& param = out_.params[i];
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(Ruled ruled, DecideRule({}, chosen, param.name, std::span(&param.shape, 1)));
    const bool known = ruled.rule.split != layout::Split::kUnknown;
    if (known || new_[i].reshaped) param.rule = std::move(ruled.rule);
    if (!known) param.rule.padded = false;  // row padding belonged to the source program
  }
  for (Param& param : out_.params) {
    if (!param.alias_of.empty()) param.rule = holders.at(param.alias_of)->rule;
  }
  return {};
}

Status Assembler::MakeGroups() {
  std::vector<std::uint32_t> place(old_.params.size());  // position in its group, from 1; 0: none
  bool ascending = true;
  for (const Group& group : old_.groups) {
    ascending = ascending && std::is_sorted(group.params.begin(), group.params.end());
    for (std::uint32_t i = 0; i < group.params.size(); ++i) place[group.params[i]] = i + 1;
  }
  out_.groups = old_.groups;
  for (Group& group : out_.groups) group.params.clear();
  std::vector<std::uint32_t> first(new_.size());
  for (std::uint32_t i = 0; i < new_.size(); ++i) {
    for (const Piece& piece : new_[i].pieces) {
      const std::uint32_t at = place[piece.param];
      if (&piece != &new_[i].pieces.front() && (at == 0) != (first[i] == 0)) {
        return CannotJoin(new_[i], "some are in a parameter group and others not");
      }
      first[i] = first[i] == 0 ? at : std::min(first[i], at);
    }
    const std::int32_t group = out_.params[i].group;
    if (first[i] == 0 || group < 0) continue;
    out_.groups[static_cast<std::size_t>(group)].params.push_back(i);
  }
  for (Group& group : out_.groups) {
    if (!ascending) {
      std::stable_sort(group.params.begin(), group.params.end(),
                       [&](std::uint32_t a, std::uint32_t b) { return first[a] < first[b]; });
    }
    if (!group.moe) continue;
    const auto experts =
        std::count_if(group.params.begin(), group.params.end(),
                      [&](std::uint32_t i) { return out_.params[i].expert.has_value(); });
    if (static_cast<std::size_t>(experts) == group.params.size()) continue;
    if (experts > 0) {
      return Fail(Errc::kUnsupported, map_.origin,
                  ": only some parameters of an expert group would still belong to single experts");
    }
    group.moe = false;
    group.options = nullptr;
  }
  return {};
}

Status Assembler::IndexTensors() {
  std::unordered_map<std::string, std::uint32_t> params;
  for (std::uint32_t i = 0; i < old_.params.size(); ++i) params.emplace(old_.params[i].name, i);
  tensors_.resize(old_.params.size());
  for (std::uint32_t t = 0; t < old_.map.tensors.size(); ++t) {
    const auto at = params.find(old_.map.tensors[t].name);
    if (at == params.end()) {
      return Fail(Errc::kUnsupported, Quoted(old_.map.tensors[t].name),
                  ": it does not belong to a parameter of the model");
    }
    tensors_[at->second].push_back(t);
  }
  return {};
}

layout::CutPtr Assembler::Composed(const layout::CutPtr& outer, const layout::CutPtr& inner) {
  if (!outer) return inner;
  layout::CutPtr& both = composed_[{outer.get(), inner.get()}];
  if (!both) both = layout::Cut::Compose(outer, inner);
  return both;
}

Status Assembler::AddFragments(const Piece& piece, const layout::LogicalTensor& from,
                               layout::LogicalTensor* tensor) {
  for (const layout::Fragment& fragment : from.fragments) {
    layout::Fragment mapped = fragment;
    mapped.cut = Composed(piece.cut, fragment.cut);
    const std::uint64_t covered = mapped.cut->covered_elems();
    if (fragment.role == layout::Role::kPartial && covered != Elems(tensor->shape)) {
      return Fail(Errc::kUnsupported, Quoted(from.name),
                  ": its value differs between ranks, so it cannot become a part of ",
                  Quoted(tensor->name));
    }
    if (covered == 0 && fragment.cut->covered_elems() > 0) continue;
    tensor->fragments.push_back(std::move(mapped));
  }
  return {};
}

/// Makes the tensors of all states. All have the parameter's shape, so all use the same cuts.
Status Assembler::MakeTensors(const NewParam& made) {
  const std::vector<std::uint32_t>& states = tensors_[made.pieces.front().param];
  for (const std::uint32_t first : states) {
    const layout::LogicalTensor& model = old_.map.tensors[first];
    layout::LogicalTensor tensor{made.name, model.state, model.dtype, made.shape, {}};
    for (const Piece& piece : made.pieces) {
      const std::vector<std::uint32_t>& mine = tensors_[piece.param];
      const auto same = std::find_if(mine.begin(), mine.end(), [&](std::uint32_t t) {
        return old_.map.tensors[t].state == model.state;
      });
      if (same == mine.end() || mine.size() != states.size()) {
        return CannotJoin(made, "some have states that others lack (" + model.state + ")");
      }
      const layout::LogicalTensor& from = old_.map.tensors[*same];
      if (from.dtype != model.dtype) {
        return CannotJoin(made, "the dtypes of their " + model.state + " differ");
      }
      if (from.shape != Old(piece).shape && made.reshaped) {
        return CannotJoin(made,
                          "the shape of its " + model.state + " differs from that of the weight");
      }
      SW_TRY(AddFragments(piece, from, &tensor));
    }
    out_.map.tensors.push_back(std::move(tensor));
  }
  return {};
}

Result<Checkpoint> Assembler::Run() {
  out_.order_unknown = old_.order_unknown;
  SW_TRY(IndexTensors());
  SW_TRY(Order());
  for (const NewParam& made : new_) {
    SW_TRY_ASSIGN(Param param, MakeParam(made));
    out_.params.push_back(std::move(param));
  }
  SW_TRY(MakeRules());
  SW_TRY(MakeGroups());
  for (const NewParam& made : new_) SW_TRY(MakeTensors(made));
  old_.params = std::move(out_.params);
  old_.groups = std::move(out_.groups);
  old_.order_unknown = std::move(out_.order_unknown);
  old_.map.tensors = std::move(out_.map.tensors);
  old_.proved = false;
  old_.inferred = {};
  if (old_.own && !old_.own->OutlivesNames()) {
    auto own = std::make_shared<UnderOldNames>();
    own->before = std::move(old_.own);
    old_.own = std::move(own);
  } else if (old_.own) {
    if (auto kept = old_.own->WithoutNames(&old_.left_out)) old_.own = std::move(kept);
  }
  return std::move(old_);
}

}  // namespace

Result<Checkpoint> Assemble(const ModelMap::Impl& map, std::uint32_t to, Checkpoint source,
                            std::vector<NewParam> params, const Patterns& patterns) {
  return Assembler(map, to, std::move(source), std::move(params), patterns).Run();
}

}  // namespace shardwright::checkpoints::maps
