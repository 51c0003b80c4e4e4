// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>
#include <unordered_set>

#include "checkpoints/name_maps/map_internal.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::maps {
namespace {

/// Suggests a rule for an uncovered parameter: its name, with {layer} in place of the number.
std::string RuleFor(const MapSide& from, const MapSide& to, const Param& param) {
  std::string form;
  bool captured = false;
  for (std::size_t i = 0; i < param.name.size(); ++i) {
    std::size_t end = i;
    while (end < param.name.size() && param.name[end] >= '0' && param.name[end] <= '9') ++end;
    const bool number = end > i && i > 0 && param.name[i - 1] == '.' &&
                        (end == param.name.size() || param.name[end] == '.');
    if (number && !captured) {
      form += "{layer}";
      captured = true;
      i = end - 1;
    } else {
      form += param.name[i];
    }
  }
  const std::string other = captured ? "...{layer}..." : "...";
  return "{\"" + from.name + "\": \"" + form + "\", \"" + to.name + "\": \"" + other +
         "\"} if only the name differs, or with objects of names and axes if the form differs";
}

bool IsDerived(const MapSide& side, const std::string& name) {
  return std::any_of(side.derived.begin(), side.derived.end(),
                     [&](const NameForm& form) { return form.Match(name).has_value(); });
}

/// Measures how well the rules of a naming scheme cover the parameters.
struct Fit {
  std::uint32_t side = 0;
  std::size_t covered = 0;
  std::size_t meant = 0;             // by a rule other than "{*rest}"
  const Param* uncovered = nullptr;  // the first uncovered parameter, or null
};

Fit FitOf(const ModelMap::Impl& map, std::uint32_t side, const std::vector<Param>& params) {
  const NameFinder finder(map, side);
  Fit fit;
  fit.side = side;
  for (const Param& param : params) {
    const auto found = finder.Find(param.name);
    if (found || IsDerived(map.sides[side], param.name)) {
      ++fit.covered;
      const bool any =
          found && map.rules[found->rule].sides[side]->tensors[found->tensor].name.takes_all();
      fit.meant += any ? 0 : 1;
    } else if (fit.uncovered == nullptr) {
      fit.uncovered = &param;
    }
  }
  return fit;
}

/// Sorts best first: complete coverage, then more names with specific rules, then more names.
void Sort(std::vector<Fit>* fits) {
  std::stable_sort(fits->begin(), fits->end(), [](const Fit& a, const Fit& b) {
    return std::tuple(a.uncovered == nullptr, a.meant, a.covered) >
           std::tuple(b.uncovered == nullptr, b.meant, b.covered);
  });
}

/// Applies a map.
class Mapper {
 public:
  Mapper(const ModelMap& map, const MapUse& use, Checkpoint source, const Patterns& patterns)
      : map_(map.impl()), use_(use), source_(std::move(source)), patterns_(patterns) {}

  Result<Mapped> Run();

 private:
  Result<std::uint32_t> SideOf(const std::string& name) const;
  Status ChooseSides();
  std::string Sides() const;
  Status MakeInstances();
  Status AddMember(std::uint32_t param, FoundRule found);
  bool IsSame(const MapRule& rule) const;
  Status CheckOneToOne(const std::vector<NewParam>& params) const;

  const ModelMap::Impl& map_;
  const MapUse& use_;
  Checkpoint source_;
  const Patterns& patterns_;
  std::uint32_t from_ = 0;
  std::uint32_t to_ = 0;
  Mapped out_;
  std::vector<Instance> instances_;
  std::map<std::pair<std::uint32_t, Captures>, std::size_t> by_captures_;
};

std::string Mapper::Sides() const {
  std::vector<std::string> names;
  for (const MapSide& side : map_.sides) names.push_back(side.name);
  return Joined(names, ", ");
}

Result<std::uint32_t> Mapper::SideOf(const std::string& name) const {
  for (std::uint32_t i = 0; i < map_.sides.size(); ++i) {
    if (map_.sides[i].name == name) return i;
  }
  return Fail(Errc::kUsage, "map ", map_.name, " has no naming scheme ", Quoted(name), "; it has ",
              Sides());
}

/// Determines the naming schemes of the source and of the result.
Status Mapper::ChooseSides() {
  if (!use_.from.empty()) SW_TRY(SideOf(use_.from));
  std::optional<std::uint32_t> to;
  if (!use_.to.empty()) {
    SW_TRY_ASSIGN(to, SideOf(use_.to));
  } else if (map_.sides.size() > 2) {
    return Fail(Errc::kUsage, "map ", map_.name, " has several naming schemes (", Sides(),
                "): choose one with --map ", map_.name, ":SCHEME");
  }
  std::vector<Fit> fits;
  for (std::uint32_t side = 0; side < map_.sides.size(); ++side) {
    if (!use_.from.empty() && map_.sides[side].name != use_.from) continue;
    fits.push_back(FitOf(map_, side, source_.params));
  }
  Sort(&fits);
  const Fit& best = fits.front();
  if (fits.size() > 1 && best.uncovered == nullptr && fits[1].uncovered == nullptr &&
      fits[1].meant == best.meant) {
    return Fail(Errc::kUsage, "the names of the checkpoint fit several naming schemes of map ",
                map_.name, ", ", map_.sides[best.side].name, " and ", map_.sides[fits[1].side].name,
                ": choose them with --map ", map_.name, ":FROM:TO");
  }
  from_ = best.side;
  if (from_ == to && best.uncovered != nullptr && fits.size() > 1) from_ = fits[1].side;
  to_ = to.value_or(from_ == 0 ? 1 : 0);
  if (to_ == from_) {
    return Fail(Errc::kUsage, "the checkpoint already has the names of naming scheme ",
                map_.sides[to_].name, " of map ", map_.name);
  }
  const Param* uncovered = best.side == from_ ? best.uncovered : fits[1].uncovered;
  if (uncovered == nullptr) return {};
  return Fail(Errc::kUnsupported, Quoted(uncovered->name), " ", ToString(uncovered->shape),
              ": no rule of ", map_.origin, " covers it in naming scheme ", map_.sides[from_].name,
              "; add one such as ", RuleFor(map_.sides[from_], map_.sides[to_], *uncovered));
}

/// Returns true if a rule has one tensor with the same factors in both schemes, so sizes match.
bool Mapper::IsSame(const MapRule& rule) const {
  const SideForm& a = *rule.sides[from_];
  const SideForm& b = *rule.sides[to_];
  if (a.rename || a.tensors.size() != 1 || b.tensors.size() != 1) return false;
  const auto equal = [](const Factor& x, const Factor& y) {
    return x.axis == y.axis && x.segment == y.segment && !x.captured && !y.captured && !x.padded;
  };
  const auto& x = a.tensors.front().dims;
  const auto& y = b.tensors.front().dims;
  return std::equal(x.begin(), x.end(), y.begin(), y.end(),
                    [&](const std::vector<Factor>& p, const std::vector<Factor>& q) {
                      return std::equal(p.begin(), p.end(), q.begin(), q.end(), equal);
                    });
}

Status Mapper::AddMember(std::uint32_t param, FoundRule found) {
  const MapRule& rule = map_.rules[found.rule];
  const std::string& name = source_.params[param].name;
  if (!rule.sides[to_]) {
    return Fail(Errc::kUnsupported, Quoted(name), ": ", rule.origin,
                " has no form for naming scheme ", map_.sides[to_].name);
  }
  Member member{param, found.tensor, 0};
  for (const std::vector<Factor>& dim : rule.sides[from_]->tensors[found.tensor].dims) {
    for (const Factor& factor : dim) {
      if (!factor.captured) continue;
      const auto at = found.captures.find(rule.axes[factor.axis].name);
      member.place = std::stoull(at->second);  // has at most 9 digits
      found.captures.erase(at);
    }
  }
  const auto [at, fresh] =
      by_captures_.emplace(std::pair(found.rule, found.captures), instances_.size());
  if (fresh) {
    Instance& instance = instances_.emplace_back();
    instance.rule = found.rule;
    instance.captures = std::move(found.captures);
    instance.same = IsSame(rule);
  }
  instances_[at->second].members.push_back(member);
  return {};
}

Status Mapper::MakeInstances() {
  const NameFinder finder(map_, from_);
  for (std::uint32_t i = 0; i < source_.params.size(); ++i) {
    const Param& param = source_.params[i];
    if (auto found = finder.Find(param.name)) {
      SW_TRY(AddMember(i, *std::move(found)));
    } else {
      out_.left_behind.push_back(param.name);
    }
  }
  return {};
}

/// Checks that the inverse map yields the old name: the same rule must cover both names.
Status Mapper::CheckOneToOne(const std::vector<NewParam>& params) const {
  const NameFinder finder(map_, to_);
  const NameFinder back(map_, from_);
  std::unordered_set<std::string> names;
  for (const NewParam& param : params) {
    if (!names.insert(param.name).second) {
      return Fail(Errc::kBadInput, map_.origin, ": two parameters would be named ",
                  Quoted(param.name));
    }
    const auto found = finder.Find(param.name);
    const auto old = back.Find(source_.params[param.pieces.front().param].name);
    if (found && old && found->rule == old->rule) continue;
    return Fail(Errc::kBadInput, map_.origin, ": ", Quoted(param.name),
                " cannot be mapped back: another rule covers it too");
  }
  return {};
}

Result<Mapped> Mapper::Run() {
  SW_TRY(ChooseSides());
  SW_TRY(MakeInstances());
  out_.sizes = use_.sizes;
  out_.sizes.insert(use_.config.begin(), use_.config.end());
  SW_TRY(SolveSizes(map_, from_, source_, use_.sizes, &instances_, &out_.sizes));
  std::map<std::string, layout::CutPtr> cuts;
  std::vector<NewParam> params;
  for (const Instance& instance : instances_) {
    SW_TRY_ASSIGN(std::vector<NewParam> made,
                  MakeParams(map_, from_, to_, instance, source_, &cuts));
    std::move(made.begin(), made.end(), std::back_inserter(params));
  }
  SW_TRY(CheckOneToOne(params));
  // Padding is specific to the source program, so it is removed.
  std::erase_if(source_.map.tensors, [](const layout::LogicalTensor& tensor) {
    return layout::IsPadding(tensor.state);
  });
  // Parameters that are left behind lose their tensors.
  std::erase_if(source_.map.tensors, [&](const layout::LogicalTensor& tensor) {
    return std::find(out_.left_behind.begin(), out_.left_behind.end(), tensor.name) !=
           out_.left_behind.end();
  });
  out_.from = map_.sides[from_].name;
  out_.to = map_.sides[to_].name;
  SW_TRY_ASSIGN(out_.checkpoint,
                Assemble(map_, to_, std::move(source_), std::move(params), patterns_));
  return std::move(out_);
}

}  // namespace
}  // namespace shardwright::checkpoints::maps

namespace shardwright::checkpoints {

std::vector<std::string> SidesOf(const ModelMap& map, const Checkpoint& checkpoint) {
  std::vector<maps::Fit> fits;
  for (std::uint32_t side = 0; side < map.impl().sides.size(); ++side) {
    const maps::Fit fit = maps::FitOf(map.impl(), side, checkpoint.params);
    if (fit.uncovered == nullptr) fits.push_back(fit);
  }
  maps::Sort(&fits);
  std::vector<std::string> sides;
  sides.reserve(fits.size());
  for (const maps::Fit& fit : fits) sides.push_back(map.impl().sides[fit.side].name);
  return sides;
}

Result<Mapped> ApplyMap(const ModelMap& map, const MapUse& use, Checkpoint source,
                        const Patterns& patterns) {
  return maps::Mapper(map, use, std::move(source), patterns).Run();
}

}  // namespace shardwright::checkpoints
