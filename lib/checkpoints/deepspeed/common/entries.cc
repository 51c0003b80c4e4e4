// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/entries.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "checkpoints/model/name_parts.h"
#include "engine/tensor/shape.h"

namespace shardwright::checkpoints {
namespace {

using pickle::Node;

/// Keys that bitsandbytes adds below the name of a quantised weight.
constexpr std::array<std::string_view, 5> kQuantised = {"absmax", "quant_map", "nested_absmax",
                                                        "nested_quant_map", "quant_state"};
/// Keys that bitsandbytes adds next to an 8-bit weight.
constexpr std::array<std::string_view, 2> kNextToWeight = {"SCB", "weight_format"};

/// Maximum length of names that ClueOf parses.
constexpr std::size_t kLongestName = 1024;

template <std::size_t kSize>
bool IsIn(const std::array<std::string_view, kSize>& list, std::string_view text) {
  return std::find(list.begin(), list.end(), text) != list.end();
}

/// Information about an entry that its name reveals.
struct NameClue {
  bool entry = false;
  std::string quantised;  ///< the weight to which this quantisation state belongs, or empty
};

using KeySet = std::unordered_set<std::string_view>;

KeySet KeySetOf(const Node* dict) {
  KeySet keys;
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    if (dict->key(i)->is_string()) keys.insert(dict->key(i)->text);
  }
  return keys;
}

NameClue ClueOf(const KeySet& keys, const std::string& name) {
  NameClue out;
  if (name.size() > kLongestName) return out;
  const std::size_t last = name.rfind('.');
  const std::string_view end = std::string_view(name).substr(last == name.npos ? 0 : last + 1);
  out.entry = end == "_extra_state" || IsIn(kNextToWeight, end);
  for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
    // A parameter or buffer is not a module, so names below its name are parts of it.
    const std::string holder = name.substr(0, dot);
    const std::string_view below = std::string_view(name).substr(dot + 1);
    const bool weight = holder == "weight" || holder.ends_with(".weight");
    if (weight && IsIn(kQuantised, below.substr(0, below.find('.')))) out.quantised = holder;
    out.entry = out.entry || !out.quantised.empty() || keys.contains(holder);
  }
  return out;
}

}  // namespace

namespace {

/// Returns a name with "#" in place of each part that is a number.
std::string WithoutNumbers(std::string_view name) {
  std::string out;
  ForEachPart(name, [&](std::string_view part, std::size_t end) {
    out += IsListIndex(part) ? "#" : part;
    if (end < name.size()) out += '.';
    return true;
  });
  return out;
}

}  // namespace

FrozenLists FrozenLists::Of(const Node* root, std::uint64_t stage) {
  FrozenLists out;
  const Node* shapes = root->Find("frozen_param_shapes");
  if (shapes == nullptr) return out;
  // Stages 2 and 3 list frozen parameters unless exclude_frozen_parameters was set.
  out.left_out = shapes->is_none() && stage >= 2;
  out.listed = shapes->is_dict();
  for (std::size_t i = 0; out.listed && i < shapes->entry_count(); ++i) {
    if (shapes->key(i)->is_string()) out.names.insert(shapes->key(i)->text);
  }
  const Node* kinds = FindIn(root, kKinds);
  if (kinds == nullptr || !kinds->is_dict()) return out;
  for (std::size_t i = 0; i < kinds->entry_count(); ++i) {
    if (!kinds->key(i)->is_string() || !kinds->value(i)->is_string()) continue;
    const std::string& name = kinds->key(i)->text;
    out.kinds.emplace(name, kinds->value(i)->text);
    if (kinds->value(i)->text == "undecided") out.names.erase(name);
  }
  return out;
}

std::string_view FrozenLists::KindOf(const std::string& name) const {
  const auto found = kinds.find(name);
  return found == kinds.end() ? std::string_view() : std::string_view(found->second);
}

void UnlistedParameters::AddTrained(const std::string& name) {
  trained_.insert(WithoutNumbers(name));
}

bool UnlistedParameters::Contains(const std::string& name) const {
  const std::string_view last = std::string_view(name).substr(name.rfind('.') + 1);
  const bool usual =
      last == "weight" || last == "bias" || last.ends_with("_weight") || last.ends_with("_bias");
  return usual || name.find(".parametrizations.") != name.npos ||
         trained_.contains(WithoutNumbers(name));
}

std::unordered_set<std::string> EntryNames(const Node* dict, const std::string& prefix,
                                           const FrozenLists& frozen,
                                           const std::function<bool(const std::string&)>& known,
                                           bool knows_trained) {
  std::unordered_set<std::string> sure;
  std::unordered_set<std::string> rest;
  bool left_out = frozen.left_out;
  const KeySet keys = KeySetOf(dict);
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    if (!dict->key(i)->is_string() || !dict->value(i)->is_tensor()) continue;
    const std::string& key = dict->key(i)->text;
    const std::string name = prefix + key;
    if (known(name) || frozen.names.contains(name)) continue;
    if (const std::string_view kind = frozen.KindOf(name); !kind.empty()) {
      if (kind == "entry") sure.insert(name);
      continue;
    }
    const NameClue clue = ClueOf(keys, key);
    // Releases before 0.19 do not list trained parameters without elements.
    const bool empty = Elems(dict->value(i)->tensor->shape) == 0;
    if (frozen.listed && empty && !clue.entry) continue;
    (clue.entry || frozen.listed ? sure : rest).insert(name);
    // A quantisation state without its weight: the save excluded frozen weights.
    const bool gone = !clue.quantised.empty() && !keys.contains(clue.quantised);
    left_out = left_out || (gone && !frozen.listed);
  }
  if (left_out && knows_trained) sure.merge(rest);
  return sure;
}

OpaqueEntry& AddOpaque(EntryList* list, const std::string& name, const std::string& after,
                       std::uint64_t tp, std::uint64_t tps, OpaqueEntry::Value value) {
  const auto [at, fresh] = list->by_name.emplace(name, list->entries.size());
  if (fresh) {
    OpaqueEntry entry;
    entry.name = name;
    entry.after = after;
    entry.by_tp.resize(tps);
    list->entries.push_back(std::move(entry));
  }
  OpaqueEntry& entry = list->entries[at->second];
  if (entry.by_tp[tp].from == nullptr) entry.by_tp[tp] = std::move(value);
  return entry;
}

Result<const Node*> EntryTaker::Take(const OpaqueEntry& entry, std::uint64_t tp) {
  const OpaqueEntry::Value* value = tp < entry.by_tp.size() ? &entry.by_tp[tp] : nullptr;
  for (const OpaqueEntry::Value& other : entry.by_tp) {
    if (value == nullptr || value->from == nullptr) value = &other;
  }
  if (value == nullptr || value->from == nullptr) {
    return Fail(Errc::kInternal, "\"", entry.name, "\": an entry without a value");
  }
  std::unique_ptr<Graft>& graft = grafts_[value->from.get()];
  if (graft == nullptr) {
    graft = std::make_unique<Graft>(document_, value->from->document, value->from->members);
  }
  auto taken = graft->Take(value->node);
  if (!taken) return Within("\"" + entry.name + "\"", std::move(taken).error());
  return taken;
}

Status EntryTaker::PutInto(Node* dict, const std::vector<const OpaqueEntry*>& entries,
                           std::uint64_t tp,
                           const std::function<std::string(const std::string&)>& local) {
  if (entries.empty()) return {};
  const KeySet keys = KeySetOf(dict);
  std::map<std::string, std::vector<const OpaqueEntry*>> behind;
  for (const OpaqueEntry* entry : entries) {
    std::string after = entry->after.empty() ? std::string() : local(entry->after);
    if (!after.empty() && !keys.contains(after)) {
      after = dict->items.empty() ? std::string() : dict->key(dict->entry_count() - 1)->text;
    }
    behind[after].push_back(entry);
  }
  std::vector<const Node*> items;
  const auto put = [&](const std::string& after) -> Status {
    for (const OpaqueEntry* entry : behind[after]) {
      SW_TRY_ASSIGN(const Node* value, Take(*entry, tp));
      items.push_back(document_.arena.String(local(entry->name)));
      items.push_back(value);
    }
    return {};
  };
  SW_TRY(put(""));
  for (std::size_t i = 0; i < dict->entry_count(); ++i) {
    items.push_back(dict->key(i));
    items.push_back(dict->value(i));
    SW_TRY(put(dict->key(i)->text));
  }
  dict->items = std::move(items);
  return {};
}

Result<const Node*> EntriesNode(Document& document, const std::vector<OpaqueEntry>& entries,
                                std::uint64_t tp) {
  if (entries.empty()) return nullptr;
  pickle::Arena& arena = document.arena;
  EntryTaker taker(document);
  std::vector<const Node*> list;
  for (const OpaqueEntry& entry : entries) {
    Node* item = arena.Dict();
    Set(arena, item, "name", arena.String(entry.name));
    Set(arena, item, "after", arena.String(entry.after));
    std::vector<const Node*> layers;
    for (const std::uint32_t layer : entry.layers) layers.push_back(arena.Count(layer));
    Set(arena, item, "layers", arena.List(std::move(layers)));
    SW_TRY_ASSIGN(const Node* value, taker.Take(entry, tp));
    Set(arena, item, "value", value);
    list.push_back(item);
  }
  return arena.List(std::move(list));
}

namespace {

Result<std::uint32_t> SmallCount(const Node* node) {
  SW_TRY_ASSIGN(const std::uint64_t count, pickle::AsCount(node));
  if (count > std::numeric_limits<std::uint32_t>::max()) {
    return Fail(Errc::kBadInput, count, " is too large a number");
  }
  return static_cast<std::uint32_t>(count);
}

Status ParseEntry(const std::shared_ptr<const Passed>& from, const Node* item, std::uint64_t tp,
                  std::uint64_t tps, EntryList* entries) {
  SW_TRY_ASSIGN(const std::string_view name, pickle::AsString(FindIn(item, "name")));
  SW_TRY_ASSIGN(const std::string_view after, pickle::AsString(FindIn(item, "after")));
  const Node* value = FindIn(item, "value");
  const Node* layers = FindIn(item, "layers");
  if (value == nullptr || layers == nullptr || !layers->is_list()) {
    return Fail(Errc::kBadInput, "\"value\" and a list \"layers\" expected");
  }
  const std::size_t before = entries->entries.size();
  OpaqueEntry& entry =
      AddOpaque(entries, std::string(name), std::string(after), tp, tps, {from, value});
  if (entries->entries.size() == before) return {};
  for (const Node* layer : layers->items) {
    SW_TRY_ASSIGN(const std::uint32_t number, SmallCount(layer));
    entry.layers.push_back(number);
  }
  return {};
}

}  // namespace

Status ParseEntries(const std::shared_ptr<const Passed>& from, std::uint64_t tp, std::uint64_t tps,
                    EntryList* entries) {
  const Node* list = FindIn(from->document.root, kOpaqueEntries);
  if (list == nullptr) return {};
  if (!list->is_list()) {
    return Fail(Errc::kBadInput, kOpaqueEntries, ": list expected, found ", pickle::Describe(list));
  }
  for (const Node* item : list->items) {
    if (Status parsed = ParseEntry(from, item, tp, tps, entries); !parsed) {
      return Within(kOpaqueEntries, std::move(parsed).error());
    }
  }
  return {};
}

}  // namespace shardwright::checkpoints
