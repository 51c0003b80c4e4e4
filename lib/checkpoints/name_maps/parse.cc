// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/name_maps/map_internal.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::checkpoints::maps {
namespace {

using shardwright::json::Find;
using shardwright::json::Json;

constexpr std::size_t kCells = 4096;  // maximum combinations of segments in a rule

/// Returns true for names of maps, schemes, sizes and axes: [a-z][a-z0-9_]*.
bool IsWord(std::string_view text) {
  const auto letter = [](char c) { return c >= 'a' && c <= 'z'; };
  return !text.empty() && letter(text.front()) &&
         std::all_of(text.begin(), text.end(),
                     [&](char c) { return letter(c) || (c >= '0' && c <= '9') || c == '_'; });
}

Result<std::string> WordOf(const Json& value, const std::string& what) {
  if (value.is_string() && IsWord(value.get_ref<const std::string&>())) {
    return value.get<std::string>();
  }
  return BadInput(what, ": a word of lower-case letters, digits and _ expected, found ",
                  value.dump());
}

Status CheckMembers(const Json& object, std::initializer_list<std::string_view> known) {
  if (!object.is_object()) return BadInput("object expected");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return BadInput("key ", Quoted(key), " is not known");
    }
  }
  const Json* note = Find(object, "note");
  if (note != nullptr && !note->is_string()) return BadInput("key \"note\": string expected");
  return {};
}

Result<std::vector<std::string>> Texts(const Json& object, const char* key) {
  std::vector<std::string> texts;
  const Json* list = Find(object, key);
  if (list == nullptr) return texts;
  const std::string what = "key " + Quoted(key) + ": list of strings expected";
  if (!list->is_array()) return BadInput(what);
  for (const Json& one : *list) {
    if (!one.is_string()) return BadInput(what);
    texts.push_back(one.get<std::string>());
  }
  return texts;
}

std::vector<std::string> Words(std::string_view text) {
  std::vector<std::string> words;
  while (!(text = Trimmed(text)).empty()) {
    const std::size_t end = std::min(text.find(' '), text.size());
    words.emplace_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return words;
}

Result<std::uint64_t> NumberOf(std::string_view text) {
  const std::uint64_t number = NumberIn<std::uint64_t>(text).value_or(0);
  if (number == 0) return BadInput(Quoted(text), ": a number of at least 1 expected");
  return number;
}

Status ParseSizes(const Json& root, ModelMap::Impl* map) {
  if (const Json* sizes = Find(root, "sizes")) {
    if (!sizes->is_object()) return BadInput("key \"sizes\": object expected");
    for (const auto& [name, size] : sizes->items()) {
      if (!IsWord(name)) return BadInput("size ", Quoted(name), ": not a word");
      SW_TRY(CheckMembers(size, {"config", "value", "note"}));
      SW_TRY_ASSIGN(map->sizes[name], Texts(size, "config"));
      if (const Json* value = Find(size, "value")) {
        SW_TRY_ASSIGN(map->constants[name],
                      json::WholeOf(*value, 1, std::uint64_t{1} << 32, "size " + Quoted(name)));
      }
    }
  }
  SW_TRY_ASSIGN(const std::vector<std::string> relations, Texts(root, "relations"));
  for (const std::string& text : relations) {
    const std::vector<std::string> words = Words(text);
    const bool form = words.size() >= 3 && words[1] == "=";
    if (!form) return BadInput("relation ", Quoted(text), ": SIZE = SIZE SIZE... expected");
    Relation& relation = map->relations.emplace_back();
    relation.product = words[0];
    relation.factors.assign(words.begin() + 2, words.end());
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (i != 1 && !map->sizes.contains(words[i])) {
        return BadInput("relation ", Quoted(text), ": unknown size ", Quoted(words[i]));
      }
    }
  }
  return {};
}

/// Parses "told_by": a list of objects, each with a list of values for every key.
Status ParseToldBy(const Json& root, ModelMap::Impl* map) {
  const Json* list = Find(root, "told_by");
  if (list == nullptr) return {};
  const auto bad = [] {
    return BadInput(
        "key \"told_by\": list of objects expected, each with a list of values for each key");
  };
  if (!list->is_array()) return bad();
  for (const Json& object : *list) {
    if (!object.is_object() || object.empty()) return bad();
    Told& told = map->told_by.emplace_back();
    for (const auto& [key, values] : object.items()) {
      if (!values.is_array() || values.empty()) return bad();
      for (const Json& value : values) {
        if (!value.is_string() && !value.is_boolean() && !value.is_number_unsigned()) return bad();
        told[key].push_back(value.is_string() ? value.get<std::string>() : value.dump());
      }
    }
  }
  return {};
}

Result<std::vector<NameForm>> NameForms(const Json& object, const char* key) {
  SW_TRY_ASSIGN(const std::vector<std::string> texts, Texts(object, key));
  std::vector<NameForm> forms;
  for (const std::string& text : texts) {
    SW_TRY_ASSIGN(NameForm form, NameForm::Parse(text));
    forms.push_back(std::move(form));
  }
  return forms;
}

Status ParseSides(const Json& root, ModelMap::Impl* map) {
  const Json* sides = Find(root, "sides");
  if (sides == nullptr || !sides->is_array() || sides->size() < 2 || sides->size() > 16) {
    return BadInput("key \"sides\": list of 2 to 16 naming schemes expected");
  }
  for (const Json& object : *sides) {
    SW_TRY(CheckMembers(object, {"name", "order", "derived", "note"}));
    MapSide& side = map->sides.emplace_back();
    const Json* name = Find(object, "name");
    if (name == nullptr) return BadInput("a naming scheme has no name");
    SW_TRY_ASSIGN(side.name, WordOf(*name, "name of a naming scheme"));
    for (std::size_t i = 0; i + 1 < map->sides.size(); ++i) {
      if (map->sides[i].name == side.name)
        return BadInput("two naming schemes are named ", Quoted(side.name));
    }
    SW_TRY_ASSIGN(side.order, NameForms(object, "order"));
    SW_TRY_ASSIGN(side.derived, NameForms(object, "derived"));
  }
  return {};
}

/// Parses one rule.
class RuleParser {
 public:
  RuleParser(const ModelMap::Impl& map, MapRule* rule) : map_(map), rule_(*rule) {}
  Status Run(const Json& object);

 private:
  Status ParseStacks(const Json& stacks);
  Result<SideForm> ParseSide(const Json& object);
  Status ParseDims(std::string_view text, TensorForm* form);
  Result<Factor> ParseFactor(std::string_view text);
  std::uint32_t SymbolOf(const std::string& name);
  Result<std::uint32_t> AxisOf(const std::string& name);
  Status CheckSide(const SideForm& form) const;
  Status CheckNames() const;

  const ModelMap::Impl& map_;
  MapRule& rule_;
};

std::uint32_t RuleParser::SymbolOf(const std::string& name) {
  const auto at = std::find(rule_.symbols.begin(), rule_.symbols.end(), name);
  const auto index = static_cast<std::uint32_t>(at - rule_.symbols.begin());
  if (at == rule_.symbols.end()) rule_.symbols.push_back(name);
  return index;
}

Result<std::uint32_t> RuleParser::AxisOf(const std::string& name) {
  for (std::uint32_t i = 0; i < rule_.axes.size(); ++i) {
    if (rule_.axes[i].name == name) return i;
  }
  if (!IsWord(name)) return BadInput("axis ", Quoted(name), ": not a word");
  if (rule_.axes.size() == limits::kTensorRank) return BadInput("too many axes");
  Axis& axis = rule_.axes.emplace_back();
  axis.name = name;
  axis.size.symbol = SymbolOf(name);
  return static_cast<std::uint32_t>(rule_.axes.size() - 1);
}

Status RuleParser::ParseStacks(const Json& stacks) {
  if (!stacks.is_object()) return BadInput("key \"stacks\": object expected");
  for (const auto& [name, list] : stacks.items()) {
    if (!IsWord(name)) return BadInput("stack ", Quoted(name), ": not a word");
    Axis& axis = rule_.axes.emplace_back();
    axis.name = name;
    SW_TRY_ASSIGN(const std::vector<std::string> segments, Texts(stacks, name.c_str()));
    if (segments.size() < 2)
      return BadInput("stack ", Quoted(name), ": at least 2 segments expected");
    for (const std::string& text : segments) {
      const std::size_t sign = text.find('=');
      Segment& segment = axis.segments.emplace_back();
      segment.name = text.substr(0, sign);
      const std::string size = sign == std::string::npos ? "1" : text.substr(sign + 1);
      for (std::size_t i = 0; i + 1 < axis.segments.size(); ++i) {
        if (axis.segments[i].name == segment.name)
          return BadInput("a segment appears twice: ", Quoted(text));
      }
      if (!IsWord(segment.name)) return BadInput("segment ", Quoted(text), ": NAME=SIZE expected");
      if (map_.sizes.contains(size)) {
        segment.size.symbol = SymbolOf(size);
      } else {
        SW_TRY_ASSIGN(segment.size.number, NumberOf(size));
      }
    }
  }
  return {};
}

Result<Factor> RuleParser::ParseFactor(std::string_view text) {
  Factor factor;
  if (text.starts_with('{') && text.ends_with('}')) {
    factor.captured = true;
    text = text.substr(1, text.size() - 2);
  } else if (text.ends_with('+')) {
    factor.padded = true;
    text.remove_suffix(1);
  }
  const std::size_t dot = text.find('.');
  SW_TRY_ASSIGN(factor.axis, AxisOf(std::string(text.substr(0, dot))));
  const Axis& axis = rule_.axes[factor.axis];
  const bool plain = dot == std::string_view::npos;
  if ((factor.captured || factor.padded) && (!plain || !axis.segments.empty())) {
    return BadInput(Quoted(text), ": a stack can be neither captured nor padded");
  }
  if (plain) return factor;
  for (std::uint32_t i = 0; i < axis.segments.size(); ++i) {
    if (axis.segments[i].name == text.substr(dot + 1)) factor.segment = i;
  }
  if (!factor.segment) return BadInput(Quoted(text), ": the stack has no such segment");
  return factor;
}

Status RuleParser::ParseDims(std::string_view text, TensorForm* form) {
  form->text = text;
  bool open = false;
  std::vector<bool> seen;
  std::vector<Factor> named;
  std::string spaced;
  for (const char c : text) {
    spaced += c == '(' || c == ')' ? std::string{' ', c, ' '} : std::string(1, c);
  }
  for (const std::string& word : Words(spaced)) {
    if (word == "(" || word == ")") {
      if (open == (word == "(")) return BadInput(Quoted(text), ": parentheses do not match");
      open = word == "(";
      if (open) form->dims.emplace_back();
      continue;
    }
    SW_TRY_ASSIGN(const Factor factor, ParseFactor(word));
    seen.resize(rule_.axes.size());
    if (seen[factor.axis]) return BadInput(Quoted(text), ": an axis appears twice");
    seen[factor.axis] = true;
    if (factor.captured && !form->name.Counts(rule_.axes[factor.axis].name)) {
      return BadInput(Quoted(form->name.text()), ": its name does not capture the number ",
                      Quoted(word));
    }
    if (factor.padded && open)
      return BadInput(Quoted(text), ": a padded axis must be a dimension of its own");
    if (factor.captured && !open) {
      named.push_back(factor);
      continue;
    }
    if (!open) form->dims.emplace_back();
    form->dims.back().push_back(factor);
  }
  if (open) return BadInput(Quoted(text), ": parentheses do not match");
  if (!named.empty() && form->dims.empty()) return BadInput(Quoted(text), ": dimension expected");
  // An axis that the name captures is not a tensor dimension; its single index comes first.
  if (!named.empty())
    form->dims.front().insert(form->dims.front().begin(), named.begin(), named.end());
  return {};
}

Result<SideForm> RuleParser::ParseSide(const Json& object) {
  SideForm form;
  if (object.is_string()) {
    form.rename = true;
    TensorForm& tensor = form.tensors.emplace_back();
    SW_TRY_ASSIGN(tensor.name, NameForm::Parse(object.get_ref<const std::string&>()));
    return form;
  }
  if (!object.is_object() || object.empty())
    return BadInput("a name, or an object of tensors expected");
  for (const auto& [name, dims] : object.items()) {
    TensorForm& tensor = form.tensors.emplace_back();
    SW_TRY_ASSIGN(tensor.name, NameForm::Parse(name));
    if (!dims.is_string()) return BadInput(Quoted(name), ": string of axes expected");
    SW_TRY(ParseDims(dims.get_ref<const std::string&>(), &tensor));
  }
  return form;
}

/// Returns the tensor's cells: the combinations of segments that it covers, as numbers.
std::vector<std::uint32_t> CellsOf(const MapRule& rule, const TensorForm& tensor) {
  std::vector<std::uint32_t> cells = {0};
  for (std::uint32_t a = 0; a < rule.axes.size(); ++a) {
    const auto count = static_cast<std::uint32_t>(rule.axes[a].segments.size());
    if (count == 0) continue;
    std::optional<std::uint32_t> only;
    for (const std::vector<Factor>& dim : tensor.dims) {
      for (const Factor& factor : dim) {
        if (factor.axis == a) only = factor.segment;
      }
    }
    std::vector<std::uint32_t> longer;
    for (const std::uint32_t cell : cells) {
      for (std::uint32_t s = only.value_or(0); s < (only ? *only + 1 : count); ++s) {
        longer.push_back(cell * count + s);
      }
    }
    cells = std::move(longer);
  }
  return cells;
}

/// Checks that every tensor has every axis once, and that the tensors partition all segments.
Status RuleParser::CheckSide(const SideForm& form) const {
  std::size_t all = 1;
  for (const Axis& axis : rule_.axes) {
    all *= std::max<std::size_t>(axis.segments.size(), 1);
    if (all > kCells) return BadInput("more than ", kCells, " segments");
  }
  std::vector<bool> held(all);
  for (const TensorForm& tensor : form.tensors) {
    std::vector<bool> seen(rule_.axes.size());
    for (const std::vector<Factor>& dim : tensor.dims) {
      for (const Factor& factor : dim) seen[factor.axis] = true;
    }
    const auto missing = std::find(seen.begin(), seen.end(), false);
    if (missing != seen.end()) {
      const Axis& axis = rule_.axes[static_cast<std::size_t>(missing - seen.begin())];
      return BadInput(Quoted(tensor.name.text()), ": lacks the axis ", Quoted(axis.name));
    }
    for (const std::uint32_t cell : CellsOf(rule_, tensor)) {
      if (held[cell])
        return BadInput(Quoted(tensor.name.text()), ": repeats elements of another tensor");
      held[cell] = true;
    }
  }
  const auto count = static_cast<std::size_t>(std::count(held.begin(), held.end(), true));
  if (count == all) return {};
  return BadInput("its tensors hold ", count, " of ", all, " segments");
}

/// Checks that all names of a rule have the same captures, except those that are axes.
Status RuleParser::CheckNames() const {
  std::optional<std::set<std::string>> all;
  for (const std::optional<SideForm>& form : rule_.sides) {
    if (!form) continue;
    for (const TensorForm& tensor : form->tensors) {
      std::set<std::string> mine(tensor.name.captures().begin(), tensor.name.captures().end());
      for (const std::vector<Factor>& dim : tensor.dims) {
        for (const Factor& factor : dim) {
          if (factor.captured) mine.erase(rule_.axes[factor.axis].name);
        }
      }
      if (!all) all = mine;
      if (*all != mine) {
        return BadInput(Quoted(tensor.name.text()),
                        ": its captures differ from those of the rule's other names");
      }
    }
  }
  return {};
}

Status RuleParser::Run(const Json& object) {
  if (!object.is_object()) return BadInput("object expected");
  if (const Json* stacks = Find(object, "stacks")) SW_TRY(ParseStacks(*stacks));
  rule_.sides.resize(map_.sides.size());
  std::size_t count = 0;
  std::size_t renames = 0;
  for (const auto& item : object.items()) {
    const std::string& key = item.key();
    const Json& value = item.value();
    if (key == "stacks") continue;
    if (key == "note") {
      if (!value.is_string()) return BadInput("key \"note\": string expected");
      continue;
    }
    const auto side = std::find_if(map_.sides.begin(), map_.sides.end(),
                                   [&](const MapSide& one) { return one.name == key; });
    if (side == map_.sides.end()) return BadInput("unknown naming scheme ", Quoted(key));
    auto form = ParseSide(value);
    if (!form) return Within(key, form.error());
    ++count;
    renames += form->rename ? 1 : 0;
    rule_.sides[static_cast<std::size_t>(side - map_.sides.begin())] = *std::move(form);
  }
  if (count < 2) return BadInput("at least two naming schemes expected");
  if (renames != 0 && renames != count) return BadInput("only some naming schemes specify shapes");
  for (std::size_t i = 0; renames == 0 && i < rule_.sides.size(); ++i) {
    if (!rule_.sides[i]) continue;
    const Status good = CheckSide(*rule_.sides[i]);
    if (!good) return Within(map_.sides[i].name, good.error());
  }
  return CheckNames();
}

Status ParseRoot(const Json& root, ModelMap::Impl* map) {
  SW_TRY(CheckMembers(root, {"$schema", "version", "map", "told_by", "sizes", "relations", "sides",
                             "rules", "note"}));
  if (const Json* version = Find(root, "version")) {
    SW_TRY(json::WholeOf(*version, 1, 1, "key \"version\""));
  }
  const Json* name = Find(root, "map");
  if (name == nullptr) return BadInput("key \"map\" is missing");
  SW_TRY_ASSIGN(map->name, WordOf(*name, "key \"map\""));
  SW_TRY(ParseToldBy(root, map));
  SW_TRY(ParseSizes(root, map));
  SW_TRY(ParseSides(root, map));
  const Json* rules = Find(root, "rules");
  if (rules == nullptr || !rules->is_array() || rules->empty()) {
    return BadInput("key \"rules\": list of rules expected");
  }
  for (const Json& object : *rules) {
    const std::string number = "rule " + std::to_string(map->rules.size() + 1);
    MapRule& rule = map->rules.emplace_back();
    rule.origin = map->origin + " " + number;
    const Status parsed = RuleParser(*map, &rule).Run(object);
    if (!parsed) return Within(number, parsed.error());
  }
  return {};
}

}  // namespace
}  // namespace shardwright::checkpoints::maps

namespace shardwright::checkpoints {

Result<ModelMap> ModelMap::Parse(std::string_view text, const std::string& origin) {
  SW_TRY_ASSIGN(const json::Json root, json::Parse(text, origin));
  auto impl = std::make_shared<Impl>();
  impl->origin = origin;
  const Status parsed = maps::ParseRoot(root, impl.get());
  if (!parsed) return Within(origin, parsed.error());
  ModelMap map;
  map.impl_ = std::move(impl);
  return map;
}

std::vector<std::string> ModelMap::BuiltInNames() {
  std::vector<std::string> names;
  for (const BuiltInMapFile& file : BuiltInMapFiles()) {
    std::string_view name = file.origin.substr(file.origin.rfind('/') + 1);
    names.emplace_back(name.substr(0, name.rfind('.')));
  }
  return names;
}

Result<ModelMap> ModelMap::BuiltIn(std::string_view name) {
  const std::vector<std::string> names = BuiltInNames();
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) {
    return Fail(Errc::kNotFound, "map ", Quoted(name),
                " does not exist; available maps: ", Joined(names, ", "));
  }
  const BuiltInMapFile& file = BuiltInMapFiles()[static_cast<std::size_t>(at - names.begin())];
  return Parse(file.text, std::string(file.origin));
}

const std::string& ModelMap::origin() const { return impl_->origin; }

const std::string& ModelMap::name() const { return impl_->name; }

std::vector<std::string> ModelMap::sides() const {
  std::vector<std::string> names;
  for (const maps::MapSide& side : impl_->sides) names.push_back(side.name);
  return names;
}

std::vector<std::string> ModelMap::sizes() const {
  std::vector<std::string> names;
  for (const auto& [name, keys] : impl_->sizes) names.push_back(name);
  return names;
}

}  // namespace shardwright::checkpoints
