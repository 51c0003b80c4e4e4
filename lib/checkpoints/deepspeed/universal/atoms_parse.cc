// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "checkpoints/deepspeed/universal/atoms_internal.h"
#include "engine/layout/mesh_rule.h"
#include "engine/tensor/shape.h"
#include "support/base/limits.h"
#include "support/json/json.h"

namespace shardwright::checkpoints {
namespace {

using layout::Split;
using Json = nlohmann::json;

Result<const Json*> Need(const Json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end()) return BadInput("key \"", key, "\" is missing");
  return &*it;
}

Result<std::uint64_t> Count(const Json& value, const char* key, std::uint64_t most) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most) {
    return BadInput("key \"", key, "\": integer up to ", most, " expected, found ", value.dump());
  }
  return value.get<std::uint64_t>();
}

constexpr std::uint64_t kAny = std::uint64_t{1} << 63;
constexpr std::uint64_t kIndex = (std::uint64_t{1} << 31) - 1;

Result<std::uint64_t> NeedCount(const Json& object, const char* key, std::uint64_t most) {
  SW_TRY_ASSIGN(const Json* value, Need(object, key));
  return Count(*value, key, most);
}

Result<std::string> NeedText(const Json& object, const char* key) {
  SW_TRY_ASSIGN(const Json* value, Need(object, key));
  if (!value->is_string()) return BadInput("key \"", key, "\": string expected");
  if (value->get_ref<const std::string&>().size() > limits::kNameBytes) {
    return BadInput("key \"", key, "\": at most ", limits::kNameBytes, " bytes expected, found ",
                    value->get_ref<const std::string&>().size());
  }
  return value->get<std::string>();
}

Result<std::string> TextOr(const Json& object, const char* key) {
  if (!object.contains(key)) return std::string();
  return NeedText(object, key);
}

Result<bool> FlagOr(const Json& object, const char* key) {
  const auto it = object.find(key);
  if (it == object.end()) return false;
  if (!it->is_boolean()) return BadInput("key \"", key, "\": true or false expected");
  return it->get<bool>();
}

Result<DType> NeedDType(const Json& object, const char* key) {
  SW_TRY_ASSIGN(const std::string name, NeedText(object, key));
  const std::optional<DType> dtype = DTypeFromName(name);
  if (!dtype) return BadInput("key \"", key, "\": \"", name, "\" is not a dtype");
  return *dtype;
}

// Returns the list under `key`, or nothing if an optional list is missing.
Result<const Json*> ListOf(const Json& object, const char* key, bool needed) {
  const auto it = object.find(key);
  if (it == object.end() && !needed) return nullptr;
  if (it == object.end() || !it->is_array()) {
    return BadInput("key \"", key, "\": list expected");
  }
  return &*it;
}

template <class T>
Result<std::vector<T>> Counts(const Json& list, const char* key, std::uint64_t most) {
  std::vector<T> counts;
  if (!list.is_array()) return BadInput("key \"", key, "\": list expected");
  for (const Json& item : list) {
    SW_TRY_ASSIGN(const std::uint64_t one, Count(item, key, most));
    counts.push_back(static_cast<T>(one));
  }
  return counts;
}

template <class T>
Result<std::vector<T>> CountsOf(const Json& object, const char* key, std::uint64_t most,
                                bool needed) {
  SW_TRY_ASSIGN(const Json* list, ListOf(object, key, needed));
  if (list == nullptr) return std::vector<T>{};
  return Counts<T>(*list, key, most);
}

template <class T>
Result<std::vector<std::vector<T>>> Tables(const Json& object, const char* key,
                                           std::uint64_t most) {
  std::vector<std::vector<T>> tables;
  SW_TRY_ASSIGN(const Json* list, ListOf(object, key, false));
  if (list == nullptr) return tables;
  for (const Json& item : *list) {
    SW_TRY_ASSIGN(std::vector<T> row, Counts<T>(item, key, most));
    tables.push_back(std::move(row));
  }
  return tables;
}

Result<std::string> FromHex(const std::string& text, const char* key) {
  std::string bytes;
  if (text.size() % 2 != 0 || text.size() > 2 * limits::kNameBytes) {
    return BadInput("key \"", key, "\": hexadecimal bytes expected");
  }
  unsigned value = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) {
      return BadInput("key \"", key, "\": hexadecimal bytes expected");
    }
    value = value * 16 + static_cast<unsigned>(digit ? c - '0' : c - 'a' + 10);
    if (i % 2 == 1) {
      bytes += static_cast<char>(value);
      value = 0;
    }
  }
  return bytes;
}

Result<layout::Cut> ParseCut(const Json& object) {
  SW_TRY_ASSIGN(Shape view, CountsOf<std::uint64_t>(object, "view", kAny, true));
  SW_TRY_ASSIGN(Shape shard, CountsOf<std::uint64_t>(object, "shard", kAny, true));
  SW_TRY_ASSIGN(const Json* list, ListOf(object, "boxes", true));
  std::vector<layout::Box> boxes;
  for (const Json& item : *list) {
    layout::Box box;
    SW_TRY_ASSIGN(box.at_view, CountsOf<std::uint64_t>(item, "at_view", kAny, true));
    SW_TRY_ASSIGN(box.at_shard, CountsOf<std::uint64_t>(item, "at_shard", kAny, true));
    SW_TRY_ASSIGN(box.sizes, CountsOf<std::uint64_t>(item, "sizes", kAny, true));
    boxes.push_back(std::move(box));
  }
  return layout::Cut::Make(std::move(view), std::move(shard), std::move(boxes));
}

/// \param is_axis  parses a rule in "axes", which is not itself one for a mesh
Result<layout::SplitRule> ParseSplitRule(const Json& object, bool is_axis = false) {
  constexpr std::pair<std::string_view, Split> kSplits[] = {{"replicated", Split::kReplicated},
                                                            {"average", Split::kAverage},
                                                            {"dim", Split::kDim},
                                                            {"sub", Split::kSub},
                                                            {"mesh", Split::kMesh},
                                                            {"listed", Split::kListed},
                                                            {"unknown", Split::kUnknown}};
  layout::SplitRule rule;
  SW_TRY_ASSIGN(const std::string split, NeedText(object, "split"));
  const auto* known = std::find_if(std::begin(kSplits), std::end(kSplits),
                                   [&](const auto& entry) { return entry.first == split; });
  if (known == std::end(kSplits)) return BadInput("key \"split\": \"", split, "\" is not known");
  rule.split = known->second;
  if (rule.split == Split::kDim || rule.split == Split::kSub) {
    SW_TRY_ASSIGN(const std::uint64_t dim, NeedCount(object, "dim", limits::kTensorRank));
    rule.dim = static_cast<std::uint32_t>(dim);
  }
  SW_TRY_ASSIGN(rule.view, CountsOf<std::uint64_t>(object, "view", kAny, false));
  SW_TRY_ASSIGN(rule.sub_sizes, CountsOf<std::uint64_t>(object, "sizes", kAny, false));
  SW_TRY_ASSIGN(rule.widths, Tables<std::uint64_t>(object, "widths", kAny));
  SW_TRY_ASSIGN(rule.granule, CountsOf<std::uint64_t>(object, "granule", kAny, false));
  SW_TRY_ASSIGN(rule.uneven, FlagOr(object, "uneven"));
  SW_TRY_ASSIGN(rule.padded, FlagOr(object, "padded"));
  SW_TRY_ASSIGN(rule.origin, TextOr(object, "origin"));
  if (is_axis && object.contains("ranks")) {
    SW_TRY_ASSIGN(rule.axis_ranks, NeedCount(object, "ranks", limits::kRanks));
  }
  if (rule.split == Split::kMesh) {
    if (is_axis) return BadInput("key \"axes\": an axis of a mesh is not a mesh itself");
    SW_TRY_ASSIGN(const Json* axes, ListOf(object, "axes", true));
    for (const Json& item : *axes) {
      SW_TRY_ASSIGN(layout::SplitRule axis, ParseSplitRule(item, true));
      rule.axes.push_back(std::move(axis));
    }
    SW_TRY(layout::CheckMesh(rule));
  }
  SW_TRY_ASSIGN(const Json* cuts, ListOf(object, "cuts", false));
  for (std::size_t i = 0; cuts != nullptr && i < cuts->size(); ++i) {
    SW_TRY_ASSIGN(layout::Cut cut, ParseCut((*cuts)[i]));
    rule.cuts.push_back(std::move(cut));
  }
  return rule;
}

Result<Scalar> ParseScalar(const Json& object, pickle::Arena& arena) {
  Scalar scalar;
  SW_TRY_ASSIGN(scalar.state, NeedText(object, "state"));
  if (object.contains("bytes")) {
    scalar.is_tensor = true;
    SW_TRY_ASSIGN(scalar.dtype, NeedDType(object, "dtype"));
    SW_TRY_ASSIGN(scalar.shape, CountsOf<std::uint64_t>(object, "shape", kAny, true));
    SW_TRY_ASSIGN(const std::string text, NeedText(object, "bytes"));
    SW_TRY_ASSIGN(scalar.bytes, FromHex(text, "bytes"));
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(scalar.shape));
    if (elems != 1 || scalar.bytes.size() != ItemSize(scalar.dtype)) {
      return BadInput("key \"bytes\": ", scalar.bytes.size(), " bytes for a ", Name(scalar.dtype),
                      " of shape ", ToString(scalar.shape));
    }
  } else if (object.contains("int") && object["int"].is_number_integer()) {
    scalar.value = arena.Int(object["int"].get<std::int64_t>());
  } else if (object.contains("bool") && object["bool"].is_boolean()) {
    scalar.value = arena.Bool(object["bool"].get<bool>());
  } else if (object.contains("float")) {
    SW_TRY_ASSIGN(const std::string text, NeedText(object, "float"));
    SW_TRY_ASSIGN(const std::string bytes, FromHex(text, "float"));
    if (bytes.size() != sizeof(double)) return BadInput("key \"float\": 16 digits expected");
    std::uint64_t bits = 0;
    for (char c : bytes) bits = bits << 8 | static_cast<unsigned char>(c);
    scalar.value = arena.Float(std::bit_cast<double>(bits));
  } else if (object.contains("none")) {
    scalar.value = arena.None();
  } else {
    return BadInput("the value is missing");
  }
  return scalar;
}

Result<Param> ParseParam(const Json& object, pickle::Arena& arena) {
  Param param;
  SW_TRY_ASSIGN(param.name, NeedText(object, "name"));
  SW_TRY_ASSIGN(const std::string kind, NeedText(object, "kind"));
  if (kind == "frozen") {
    param.kind = ParamKind::kFrozen;
  } else if (kind == "buffer") {
    param.kind = ParamKind::kBuffer;
  } else if (kind != "trainable") {
    return BadInput("key \"kind\": \"", kind, "\" is not known");
  }
  SW_TRY_ASSIGN(param.shape, CountsOf<std::uint64_t>(object, "shape", kAny, true));
  SW_TRY(CountElems(param.shape));
  SW_TRY_ASSIGN(param.dtype, NeedDType(object, "dtype"));
  SW_TRY_ASSIGN(param.alias_of, TextOr(object, "alias_of"));
  SW_TRY_ASSIGN(param.left_out_holder, TextOr(object, "left_out_holder"));
  SW_TRY_ASSIGN(param.entry, FlagOr(object, "entry"));
  SW_TRY_ASSIGN(param.undecided, FlagOr(object, "undecided"));
  SW_TRY_ASSIGN(param.frozen_later, FlagOr(object, "frozen_later"));
  SW_TRY_ASSIGN(const Json* rule, Need(object, "rule"));
  SW_TRY_ASSIGN(param.rule, ParseSplitRule(*rule));
  const Split split = param.rule.split;
  const bool blocks = split == Split::kSub || split == Split::kMesh || split == Split::kListed;
  if (param.rule.padded && (blocks || param.rule.dim != 0 || param.shape.empty())) {
    return BadInput("key \"padded\": a tensor that is sharded by rows expected");
  }
  if (object.contains("group")) {
    SW_TRY_ASSIGN(const std::uint64_t group, NeedCount(object, "group", kIndex));
    param.group = static_cast<std::int32_t>(group);
  }
  if (object.contains("layer")) {
    SW_TRY_ASSIGN(const std::uint64_t layer, NeedCount(object, "layer", kIndex));
    param.layer = static_cast<std::uint32_t>(layer);
  }
  SW_TRY_ASSIGN(param.tied_layers, CountsOf<std::uint32_t>(object, "tied_layers", kIndex, false));
  if (const auto it = object.find("expert"); it != object.end()) {
    SW_TRY_ASSIGN(const std::uint64_t layer, NeedCount(*it, "layer", kIndex));
    SW_TRY_ASSIGN(const std::uint64_t expert, NeedCount(*it, "expert", kIndex));
    param.expert = {static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(expert)};
  }
  SW_TRY_ASSIGN(const Json* scalars, ListOf(object, "scalars", false));
  for (std::size_t i = 0; scalars != nullptr && i < scalars->size(); ++i) {
    SW_TRY_ASSIGN(Scalar scalar, ParseScalar((*scalars)[i], arena));
    param.scalars.push_back(std::move(scalar));
  }
  return param;
}

Result<Topology> ParseTopology(const Json& object) {
  Topology topology;
  SW_TRY_ASSIGN(topology.zero, NeedCount(object, "zero", 3));
  for (const auto& [key, out] : {std::pair{"dp", &topology.dp}, std::pair{"tp", &topology.tp},
                                 std::pair{"pp", &topology.pp}, std::pair{"ep", &topology.ep}}) {
    SW_TRY_ASSIGN(*out, NeedCount(object, key, limits::kRanks));
    if (*out == 0) return BadInput("key \"", key, "\": at least 1 expected, found 0");
  }
  if (topology.mp() > limits::kRanks) return BadInput("keys \"tp\" and \"pp\": too many ranks");
  SW_TRY_ASSIGN(topology.dtype, NeedDType(object, "dtype"));
  SW_TRY_ASSIGN(topology.bf16_optimizer, FlagOr(object, "bf16_optimizer"));
  SW_TRY_ASSIGN(topology.sub_group, NeedCount(object, "sub_group", kAny));
  SW_TRY_ASSIGN(topology.round_robin, FlagOr(object, "round_robin"));
  SW_TRY_ASSIGN(topology.pipeline, FlagOr(object, "pipeline"));
  SW_TRY_ASSIGN(topology.stages, Tables<std::uint32_t>(object, "stages", kIndex));
  return topology;
}

Status ParseGroups(const Json& list, Checkpoint* out) {
  std::vector<bool> placed(out->params.size());
  for (const Json& item : list) {
    Group group;
    SW_TRY_ASSIGN(group.moe, FlagOr(item, "moe"));
    SW_TRY_ASSIGN(group.params, CountsOf<std::uint32_t>(item, "params", kIndex, true));
    for (std::uint32_t index : group.params) {
      if (index >= out->params.size() || placed[index] ||
          out->params[index].group != static_cast<std::int32_t>(out->groups.size())) {
        return BadInput("group ", out->groups.size(), ": parameter ", index,
                        " does not exist or is in another group");
      }
      placed[index] = true;
    }
    out->groups.push_back(std::move(group));
  }
  for (std::size_t i = 0; i < placed.size(); ++i) {
    if (out->params[i].group < 0 || placed[i] || !out->params[i].alias_of.empty()) continue;
    return BadInput("\"", out->params[i].name, "\" is in group ", out->params[i].group,
                    ", which does not list it");
  }
  return {};
}

Result<std::vector<std::string>> TextsOf(const Json& object, const char* key, bool needed) {
  std::vector<std::string> texts;
  SW_TRY_ASSIGN(const Json* list, ListOf(object, key, needed));
  for (std::size_t i = 0; list != nullptr && i < list->size(); ++i) {
    if (!(*list)[i].is_string()) {
      return BadInput("key \"", key, "\": list of strings expected");
    }
    texts.push_back((*list)[i].get<std::string>());
  }
  return texts;
}

Status ParseRoot(const Json& root, Checkpoint* out, Topology* to,
                 std::vector<std::vector<std::string>>* atoms) {
  if (!root.is_object()) return BadInput("object expected");
  SW_TRY_ASSIGN(const std::string format, NeedText(root, "format"));
  SW_TRY_ASSIGN(const std::uint64_t version, NeedCount(root, "version", kAny));
  if (format != "shardwright atoms") return BadInput("unknown format \"", format, "\"");
  if (version != 1) {
    return Fail(Errc::kUnsupported, "version ", version, ", 1 is the newest known");
  }
  SW_TRY_ASSIGN(const Json* topology, Need(root, "topology"));
  SW_TRY_ASSIGN(*to, ParseTopology(*topology));
  SW_TRY_ASSIGN(out->states, TextsOf(root, "states", true));
  SW_TRY_ASSIGN(out->frozen_unknown, FlagOr(root, "frozen_unknown"));
  SW_TRY_ASSIGN(out->order_unknown, TextOr(root, "order_unknown"));
  SW_TRY_ASSIGN(out->own_values, TextOr(root, "own_values"));
  SW_TRY_ASSIGN(const Json* params, ListOf(root, "params", true));
  std::unordered_set<std::string> names;
  for (const Json& item : *params) {
    Result<Param> param = ParseParam(item, *out->arena);
    if (!param) return Within("parameter " + std::to_string(out->params.size()), param.error());
    SW_TRY_ASSIGN(std::vector<std::string> mine, TextsOf(item, "atoms", false));
    const std::string needed(NeededState(param->kind));
    const bool has = std::find(mine.begin(), mine.end(), needed) != mine.end();
    if (has != param->alias_of.empty()) {
      return BadInput("\"", param->name, "\": key \"atoms\": \"", needed, "\" is ",
                      (has ? "listed for an alias" : "missing"));
    }
    atoms->push_back(std::move(mine));
    if (!names.insert(param->name).second) return BadInput("\"", param->name, "\" occurs twice");
    out->params.push_back(*std::move(param));
  }
  for (const Param& param : out->params) {
    if (!param.alias_of.empty() && !names.contains(param.alias_of)) {
      return BadInput("\"", param.name, "\" is an alias of \"", param.alias_of,
                      "\", which is missing");
    }
  }
  SW_TRY_ASSIGN(const Json* groups, ListOf(root, "groups", true));
  return ParseGroups(*groups, out);
}

}  // namespace

Status ParseAtoms(std::string_view text, Checkpoint* checkpoint, Topology* topology,
                  std::vector<std::vector<std::string>>* atoms) {
  if (text.size() > limits::kJsonBytes) {
    return Fail(Errc::kLimit, kAtomsFile, ": ", text.size(), " bytes, at most ", limits::kJsonBytes,
                " are read");
  }
  SW_TRY_ASSIGN(const Json root, json::Parse(text, std::string(kAtomsFile)));
  const Status parsed = ParseRoot(root, checkpoint, topology, atoms);
  if (!parsed) return Within(kAtomsFile, parsed.error());
  return {};
}

}  // namespace shardwright::checkpoints
