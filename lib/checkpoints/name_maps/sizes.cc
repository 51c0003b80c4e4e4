// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/name_maps/map_internal.h"
#include "support/base/checked.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::checkpoints::maps {
namespace {

using Sizes = std::vector<std::optional<std::uint64_t>>;

std::optional<std::uint64_t> ValueOf(const SizeOf& size, const Sizes& sizes) {
  return size.symbol ? sizes[*size.symbol] : size.number;
}

/// A factor of a dimension's extent: a sum of sizes, at most one of which may be unknown.
struct Term {
  std::uint64_t known = 0;
  std::optional<std::uint32_t> open;  ///< symbol of the unknown size
  bool several = false;               ///< more than one size is unknown
};

Term TermOf(const MapRule& rule, const Factor& factor, const Sizes& sizes) {
  Term term;
  const Axis& axis = rule.axes[factor.axis];
  const auto add = [&](const SizeOf& size) {
    const std::optional<std::uint64_t> value = ValueOf(size, sizes);
    if (value) {
      term.known += *value;
    } else {
      term.several = term.several || term.open.has_value();
      term.open = size.symbol;
    }
  };
  if (factor.captured) {
    term.known = 1;
  } else if (factor.segment) {
    add(axis.segments[*factor.segment].size);
  } else if (axis.segments.empty()) {
    add(axis.size);
  } else {
    for (const Segment& segment : axis.segments) add(segment.size);
  }
  return term;
}

/// Solves for sizes until an iteration finds no further one.
class Solver {
 public:
  Solver(const ModelMap::Impl& map, std::uint32_t side, const Checkpoint& source,
         const ModelSizes& given, std::vector<Instance>* instances, ModelSizes* known)
      : map_(map),
        side_(side),
        source_(source),
        given_(given),
        instances_(*instances),
        known_(*known) {}

  Status Run();

 private:
  Status Relate(bool* progress);
  Status SolveInstance(Instance* instance, bool* progress);
  Status SolveDim(Instance* instance, const Member& member, std::size_t dim, bool* progress);
  Status SetSymbol(Instance* instance, std::uint32_t symbol, std::uint64_t value);
  void SetCaptured(Instance* instance) const;
  Status SetPadded(Instance* instance);
  Status CheckKnown(const Instance& instance) const;
  const TensorForm& FormOf(const Instance& instance, const Member& member) const {
    return map_.rules[instance.rule].sides[side_]->tensors[member.tensor];
  }
  tl::unexpected<Error> Contradiction(const Instance& instance, const Member& member) const;

  const ModelMap::Impl& map_;
  const std::uint32_t side_;
  const Checkpoint& source_;
  const ModelSizes& given_;
  std::vector<Instance>& instances_;
  ModelSizes& known_;
};

tl::unexpected<Error> Solver::Contradiction(const Instance& instance, const Member& member) const {
  const Param& param = source_.params[member.param];
  const MapRule& rule = map_.rules[instance.rule];
  std::string sizes;
  bool given = false;
  for (std::size_t s = 0; s < rule.symbols.size(); ++s) {
    if (!instance.sizes[s]) continue;
    given = given || given_.contains(rule.symbols[s]);
    sizes +=
        (sizes.empty() ? "" : ", ") + rule.symbols[s] + "=" + std::to_string(*instance.sizes[s]);
  }
  return Fail(given ? Errc::kUsage : Errc::kBadInput, Quoted(param.name), " ",
              ToString(param.shape), ": ", rule.origin, " expects ",
              Quoted(FormOf(instance, member).text), (sizes.empty() ? "" : " with " + sizes));
}

Status Solver::SetSymbol(Instance* instance, std::uint32_t symbol, std::uint64_t value) {
  instance->sizes[symbol] = value;
  const std::string& name = map_.rules[instance->rule].symbols[symbol];
  if (map_.sizes.contains(name)) known_.emplace(name, value);
  return {};
}

/// Applies relations such as "heads = kv_heads query": derives the only unknown size.
Status Solver::Relate(bool* progress) {
  for (const Relation& relation : map_.relations) {
    std::uint64_t product = 1;
    const std::string* open = nullptr;
    std::size_t opens = 0;
    for (const std::string& factor : relation.factors) {
      const auto at = known_.find(factor);
      if (at == known_.end()) {
        open = &factor;
        ++opens;
        continue;
      }
      SW_TRY_ASSIGN(product, CheckedMul(product, at->second));
    }
    const auto whole = known_.find(relation.product);
    if (opens > 1 || (opens == 1 && whole == known_.end())) continue;
    if (opens == 0 && whole == known_.end()) {
      known_.emplace(relation.product, product);
      *progress = true;
      continue;
    }
    if (opens == 0 ? whole->second != product : whole->second % product != 0) {
      const bool given = given_.contains(relation.product) ||
                         std::ranges::any_of(relation.factors, [&](const std::string& factor) {
                           return given_.contains(factor);
                         });
      return Fail(given ? Errc::kUsage : Errc::kBadInput, "sizes of the model: ", relation.product,
                  "=", whole->second, " is not ", Joined(relation.factors, " x "), ", ", product,
                  (opens == 0 ? "" : " times a whole number"));
    }
    if (opens == 1) {
      known_.emplace(*open, whole->second / product);
      *progress = true;
    }
  }
  return {};
}

/// Derives the only unknown size in a dimension. The extent is the product of the factors.
Status Solver::SolveDim(Instance* instance, const Member& member, std::size_t dim, bool* progress) {
  const MapRule& rule = map_.rules[instance->rule];
  const TensorForm& form = FormOf(*instance, member);
  const std::uint64_t extent = source_.params[member.param].shape[dim];
  std::uint64_t product = 1;
  std::optional<Term> open;
  for (const Factor& factor : form.dims[dim]) {
    if (factor.padded) return {};
    const Term term = TermOf(rule, factor, instance->sizes);
    if (term.open && (open || term.several)) return {};
    if (term.open) {
      open = term;
    } else {
      SW_TRY_ASSIGN(product, CheckedMul(product, term.known));
    }
  }
  if (!open) {
    if (product != extent) return Contradiction(*instance, member);
    return {};
  }
  if (product == 0 || extent % product != 0 || extent / product < open->known) {
    return Contradiction(*instance, member);
  }
  *progress = true;
  return SetSymbol(instance, *open->open, extent / product - open->known);
}

/// Sets the extent of a captured axis to the largest index in the names plus one.
void Solver::SetCaptured(Instance* instance) const {
  const MapRule& rule = map_.rules[instance->rule];
  for (const Member& member : instance->members) {
    for (const std::vector<Factor>& dim : FormOf(*instance, member).dims) {
      for (const Factor& factor : dim) {
        if (!factor.captured) continue;
        std::optional<std::uint64_t>& size = instance->sizes[*rule.axes[factor.axis].size.symbol];
        size = std::max(size.value_or(0), member.place + 1);
      }
    }
  }
}

Status Solver::SolveInstance(Instance* instance, bool* progress) {
  const MapRule& rule = map_.rules[instance->rule];
  for (std::uint32_t s = 0; s < rule.symbols.size(); ++s) {
    const auto known = known_.find(rule.symbols[s]);
    if (known == known_.end() || !map_.sizes.contains(rule.symbols[s])) continue;
    instance->sizes[s] = known->second;
  }
  SetCaptured(instance);
  for (const Member& member : instance->members) {
    const TensorForm& form = FormOf(*instance, member);
    if (form.dims.size() != source_.params[member.param].shape.size()) {
      return Contradiction(*instance, member);
    }
    for (std::size_t dim = 0; dim < form.dims.size(); ++dim) {
      SW_TRY(SolveDim(instance, member, dim, progress));
    }
  }
  return {};
}

/// Uses the stored extent for a padded axis of unknown extent, that is, assumes no padding.
Status Solver::SetPadded(Instance* instance) {
  for (const Member& member : instance->members) {
    const TensorForm& form = FormOf(*instance, member);
    for (std::size_t dim = 0; dim < form.dims.size(); ++dim) {
      const auto padded = std::find_if(form.dims[dim].begin(), form.dims[dim].end(),
                                       [](const Factor& factor) { return factor.padded; });
      if (padded == form.dims[dim].end()) continue;
      const std::uint64_t stored = source_.params[member.param].shape[dim];
      const std::uint32_t symbol = *map_.rules[instance->rule].axes[padded->axis].size.symbol;
      if (!instance->sizes[symbol]) SW_TRY(SetSymbol(instance, symbol, stored));
      if (*instance->sizes[symbol] > stored) return Contradiction(*instance, member);
    }
  }
  return {};
}

Status Solver::CheckKnown(const Instance& instance) const {
  const MapRule& rule = map_.rules[instance.rule];
  std::vector<std::string> open;
  for (std::size_t s = 0; s < rule.symbols.size(); ++s) {
    if (!instance.sizes[s] && map_.sizes.contains(rule.symbols[s])) open.push_back(rule.symbols[s]);
  }
  if (open.empty() && std::find(instance.sizes.begin(), instance.sizes.end(), std::nullopt) ==
                          instance.sizes.end()) {
    return {};
  }
  const Param& param = source_.params[instance.members.front().param];
  // The message names sizes with config.json keys first, because users know these.
  std::stable_partition(open.begin(), open.end(),
                        [&](const std::string& name) { return !map_.sizes.at(name).empty(); });
  if (open.empty()) {
    return Fail(Errc::kBadInput, Quoted(param.name), ": ", rule.origin,
                " leaves sizes undetermined; list them under \"sizes\"");
  }
  return Fail(
      Errc::kUsage, Quoted(param.name), " ", ToString(param.shape), ": ", rule.origin,
      " needs sizes that neither the shapes nor a config.json next to the checkpoint determine (",
      Joined(open, ", "), "): pass", kSizesFlag, open.front(), "=N");
}

Status Solver::Run() {
  for (const auto& [name, value] : map_.constants) {
    if (!known_.emplace(name, value).second && known_[name] != value) {
      return Fail(Errc::kUsage, "size ", name, " is ", value, " in the map, found ", known_[name]);
    }
  }
  for (Instance& instance : instances_) {
    instance.sizes.resize(map_.rules[instance.rule].symbols.size());
  }
  for (bool progress = true; progress;) {
    progress = false;
    SW_TRY(Relate(&progress));
    for (Instance& instance : instances_) {
      if (!map_.rules[instance.rule].sides[side_]->rename) {
        SW_TRY(SolveInstance(&instance, &progress));
      }
    }
  }
  for (Instance& instance : instances_) {
    if (map_.rules[instance.rule].sides[side_]->rename) continue;
    SW_TRY(SetPadded(&instance));
    if (!instance.same) SW_TRY(CheckKnown(instance));
  }
  for (const auto& [name, value] : map_.constants) known_.erase(name);
  return {};
}

}  // namespace

Status SolveSizes(const ModelMap::Impl& map, std::uint32_t side, const Checkpoint& source,
                  const ModelSizes& given, std::vector<Instance>* instances, ModelSizes* known) {
  return Solver(map, side, source, given, instances, known).Run();
}

std::uint64_t ExtentOf(const Axis& axis, const Instance& instance) {
  if (axis.segments.empty()) return *ValueOf(axis.size, instance.sizes);
  std::uint64_t extent = 0;
  for (const Segment& segment : axis.segments) extent += *ValueOf(segment.size, instance.sizes);
  return extent;
}

Range RangeOf(const MapRule& rule, const Factor& factor, std::uint64_t place,
              const Instance& instance) {
  const Axis& axis = rule.axes[factor.axis];
  if (factor.captured) return {place, place + 1};
  if (!factor.segment) return {0, ExtentOf(axis, instance)};
  Range range;
  for (std::uint32_t s = 0; s <= *factor.segment; ++s) {
    range.first = range.last;
    range.last += *ValueOf(axis.segments[s].size, instance.sizes);
  }
  return range;
}

}  // namespace shardwright::checkpoints::maps

namespace shardwright::checkpoints {
namespace {

/// Returns a condition as text ("model_type=llama") if the config matches all of its keys.
std::optional<std::string> Agreement(const maps::Told& told, const ModelConfig& facts) {
  std::vector<std::string> agreed;
  for (const auto& [key, values] : told) {
    const auto fact = facts.find(key);
    if (fact == facts.end()) return std::nullopt;
    if (std::find(values.begin(), values.end(), fact->second) == values.end()) return std::nullopt;
    agreed.push_back(key + "=" + fact->second);
  }
  return Joined(agreed, " ");
}

}  // namespace

Result<ModelConfig> FactsIn(std::string_view config, const std::string& where) {
  SW_TRY_ASSIGN(const json::Json root, json::Parse(config, where));
  if (!root.is_object()) return Fail(Errc::kBadInput, where, ": object expected");
  ModelConfig facts;
  for (const auto& [key, value] : root.items()) {
    if (value.is_string()) {
      facts.emplace(key, value.get<std::string>());
    } else if (value.is_boolean() || value.is_number_unsigned()) {
      facts.emplace(key, value.dump());
    }
  }
  return facts;
}

std::optional<std::string> ModelMap::ToldBy(const ModelConfig& facts) const {
  for (const maps::Told& told : impl_->told_by) {
    if (auto agreement = Agreement(told, facts)) return agreement;
  }
  return std::nullopt;
}

ModelSizes ModelMap::SizesIn(const ModelConfig& facts) const {
  ModelSizes sizes;
  for (const auto& [name, keys] : impl_->sizes) {
    for (const std::string& key : keys) {
      const auto fact = facts.find(key);
      if (fact == facts.end()) continue;
      const std::uint64_t value = NumberIn<std::uint64_t>(fact->second).value_or(0);
      if (value == 0) continue;
      sizes.emplace(name, value);
      break;
    }
  }
  return sizes;
}

ModelConfig ModelMap::ConfigOf(const ModelSizes& sizes) const {
  ModelConfig facts;
  for (const auto& [name, value] : sizes) {
    const auto keys = impl_->sizes.find(name);
    if (keys == impl_->sizes.end() || keys->second.empty()) continue;
    facts.emplace(keys->second.front(), std::to_string(value));
  }
  return facts;
}

}  // namespace shardwright::checkpoints
