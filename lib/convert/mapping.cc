// SPDX-License-Identifier: Apache-2.0
#include "convert/mapping.h"

#include <algorithm>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "checkpoints/torchtitan_fused_qkv.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/file.h"

namespace shardwright::convert {
namespace {

/// The parts of "NAME:FROM:TO".
struct MapName {
  std::string map;
  std::string from;
  std::string to;
};

Result<MapName> TakeApart(const std::string& text) {
  // A folder name may contain a colon, so search for schemes after the last slash.
  const std::size_t slash = text.rfind('/');
  const std::size_t first = text.find(':', slash == std::string::npos ? 0 : slash);
  MapName name;
  name.map = text.substr(0, first);
  if (first != std::string::npos) {
    const std::size_t second = text.find(':', first + 1);
    if (second == std::string::npos) {
      name.to = text.substr(first + 1);
    } else {
      name.from = text.substr(first + 1, second - first - 1);
      name.to = text.substr(second + 1);
    }
    if (name.to.empty() || name.to.find(':') != std::string::npos ||
        (second != std::string::npos && name.from.empty())) {
      name.map.clear();
    }
  }
  if (!name.map.empty()) return name;
  return Fail(Errc::kUsage, "--map ", text, ": MAP, MAP:TO or MAP:FROM:TO expected");
}

Result<checkpoints::ModelSizes> ParseSizes(std::string_view text) {
  checkpoints::ModelSizes sizes;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(item.size() + 1, text.size()));
    const std::size_t sign = item.find('=');
    const std::uint64_t value = sign == std::string_view::npos
                                    ? 0
                                    : NumberIn<std::uint64_t>(item.substr(sign + 1)).value_or(0);
    if (value == 0 || !sizes.emplace(item.substr(0, sign), value).second) {
      return Fail(Errc::kUsage, "--map-sizes: NAME=NUMBER,... expected, found ",
                  Quoted(std::string(item)));
    }
  }
  return sizes;
}

std::string SizesText(const checkpoints::ModelSizes& sizes) {
  std::string text;
  for (const auto& [name, value] : sizes) {
    text += (text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  }
  return text;
}

}  // namespace

void SetTarget(const checkpoints::Format& format, const checkpoints::TargetSpec& spec,
               MapsAsked* asked) {
  if (format.sides != nullptr) {
    const std::span<const std::string_view> sides = format.sides(spec);
    asked->sides.assign(sides.begin(), sides.end());
  }
  const std::string* const only = spec.Find("only");
  asked->weights_alone = format.only_weights && (only == nullptr || *only == "weight");
}

nlohmann::ordered_json MapUsed::Json() const {
  nlohmann::ordered_json json = {{"name", name}, {"from", from}, {"to", to}};
  for (const auto& [size, value] : sizes) json["sizes"][size] = value;
  if (!why.empty()) json["why"] = why;
  return json;
}

namespace {

constexpr std::string_view kAuto = "auto";

/// Reads one map by name or from a file. Collective; rank 0 reads.
Result<MapChoice> ReadMap(comm::Comm& comm, const std::string& map) {
  MapChoice choice;
  SW_TRY_ASSIGN(const MapName name, TakeApart(map));
  choice.use.from = name.from;
  choice.use.to = name.to;
  choice.text = name.map;
  if (name.map == kAuto) return choice;
  if (name.map.ends_with(".json") || name.map.find('/') != std::string::npos) {
    SW_TRY_ASSIGN(choice.text,
                  comm.OnRootText([&] { return os::ReadWholeText(name.map, limits::kJsonBytes); }));
    SW_TRY_ASSIGN(choice.map, checkpoints::ModelMap::Parse(choice.text, name.map));
  } else {
    SW_TRY_ASSIGN(choice.map, checkpoints::ModelMap::BuiltIn(name.map));
  }
  return choice;
}

/// Parses one map of MapsOfRecipes.
Result<MapChoice> ReadRecipe(const json::Json& recipe, const std::string& where) {
  const json::Json* map = recipe.is_object() ? json::Find(recipe, "map") : nullptr;
  const json::Json* from = recipe.is_object() ? json::Find(recipe, "from") : nullptr;
  const json::Json* to = recipe.is_object() ? json::Find(recipe, "to") : nullptr;
  if (map == nullptr || from == nullptr || to == nullptr || !from->is_string() ||
      !to->is_string() || !(map->is_string() || map->is_object())) {
    return Fail(Errc::kBadInput, where,
                ": \"maps\": every entry must have \"map\", \"from\" and \"to\"");
  }
  MapChoice choice;
  choice.use.from = from->get<std::string>();
  choice.use.to = to->get<std::string>();
  if (map->is_string()) {
    choice.text = map->get<std::string>();
    SW_TRY_ASSIGN(choice.map, checkpoints::ModelMap::BuiltIn(choice.text));
  } else {
    choice.text = map->dump();
    SW_TRY_ASSIGN(choice.map, checkpoints::ModelMap::Parse(choice.text, where));
  }
  const json::Json* sizes = json::Find(recipe, "sizes");
  if (sizes == nullptr) return choice;
  if (!sizes->is_object()) {
    return Fail(Errc::kBadInput, where, ": \"sizes\" of a map: object expected");
  }
  for (const auto& [name, size] : sizes->items()) {
    SW_TRY_ASSIGN(choice.use.config[name],
                  json::WholeOf(size, 1, std::uint64_t{1} << 53, where + ": size " + Quoted(name)));
  }
  return choice;
}

/// Checks that each size is one of the maps, or of the split of fused optimizer parameters.
Status CheckSizes(const std::vector<MapChoice>& choices,
                  const checkpoints::Checkpoint& checkpoint) {
  std::set<std::string> known;
  const auto add = [&](const checkpoints::ModelMap& map) {
    for (const std::string& name : map.sizes()) known.insert(name);
  };
  for (const MapChoice& choice : choices) {
    if (choice.map) add(*choice.map);
  }
  if (!checkpoint.fused.empty()) {
    SW_TRY_ASSIGN(const auto split, checkpoints::ModelMap::BuiltIn(checkpoints::kFusedMap));
    add(split);
  }
  for (const MapChoice& choice : choices) {
    for (const auto& [name, value] : choice.use.sizes) {
      if (known.contains(name)) continue;
      return Fail(Errc::kUsage, "--map-sizes: unknown size ", Quoted(name), "; known sizes: ",
                  Joined(std::vector<std::string>(known.begin(), known.end()), ", "));
    }
  }
  return {};
}

/// A map that matches the config, and the reason why it matches.
struct Found {
  checkpoints::ModelMap map;
  std::string to;
  std::string why;
};

/// Finds the maps of the model family in the config.
Result<std::vector<Found>> FindFamily(const checkpoints::KnownConfig& facts, const MapsAsked& asked,
                                      const checkpoints::Patterns& patterns,
                                      const checkpoints::Checkpoint& checkpoint) {
  std::vector<Found> found;
  for (const std::string& name : checkpoints::ModelMap::BuiltInNames()) {
    SW_TRY_ASSIGN(checkpoints::ModelMap map, checkpoints::ModelMap::BuiltIn(name));
    auto why = map.ToldBy(facts.values);
    if (why) found.push_back({std::move(map), "", *std::move(why) + " of " + facts.origin});
  }
  if (!found.empty()) return found;
  if (facts.origin.empty()) {
    SW_TRY_ASSIGN(const std::vector<std::string> flags,
                  MapFlagsFor(checkpoint, asked, patterns, ""));
    return Fail(Errc::kUsage, "--map auto: cannot detect the model family of ", checkpoint.tag,
                ": the checkpoint does not record it, and there is no config.json next to it or in "
                "a folder huggingface; copy the model's config.json there, or pass ",
                flags.empty() ? "--map MAP:TO" : Joined(flags, " or "));
  }
  const auto type = facts.values.find("model_type");
  const std::string what =
      type == facts.values.end() ? "this model config" : "model_type " + Quoted(type->second);
  return Fail(Errc::kUnsupported, "--map auto: ", facts.origin, ": no map matches ", what,
              "; available maps: ", Joined(checkpoints::ModelMap::BuiltInNames(), ", "),
              "; select one with --map MAP:TO");
}

/// Returns possible naming schemes of the target, in order of preference. The map may lack some.
Result<std::vector<std::string>> WantedSides(const checkpoints::ModelMap& map,
                                             const std::string& given, const MapsAsked& asked) {
  if (!given.empty()) return std::vector<std::string>{given};
  std::vector<std::string> sides = asked.sides;
  if (asked.like != nullptr) sides = checkpoints::SidesOf(map, *asked.like);
  if (!sides.empty()) return sides;
  const std::string why =
      asked.like != nullptr
          ? StrCat("the names of ", asked.like->tag, " match no naming scheme of map ", map.name())
          : "the target accepts any naming scheme";
  return Fail(Errc::kUsage, "--map auto: ", why,
              "; select one with --map auto:TO, where TO is one of ", Joined(map.sides(), ", "));
}

/// Finds the one map of the model's family that leads to the wanted naming
/// scheme. Returns nothing if the names follow that scheme already.
Result<std::optional<Found>> FindMap(const checkpoints::MapUse& use, const MapsAsked& asked,
                                     const checkpoints::KnownConfig& facts,
                                     const checkpoints::ModelSizes& given,
                                     const checkpoints::Patterns& patterns,
                                     const checkpoints::Checkpoint& checkpoint, Sink& sink) {
  SW_TRY_ASSIGN(std::vector<Found> family, FindFamily(facts, asked, patterns, checkpoint));
  std::vector<Found> fitting;
  std::optional<Error> refused;
  for (Found& one : family) {
    const Result<std::vector<std::string>> sides = WantedSides(one.map, use.to, asked);
    if (!sides) {
      if (!refused) refused = sides.error();
      continue;
    }
    const std::vector<std::string>& wanted = *sides;
    const std::vector<std::string> has = checkpoints::SidesOf(one.map, checkpoint);
    const std::vector<std::string> all = one.map.sides();
    for (const std::string& side : wanted) {
      if (std::find(has.begin(), has.end(), side) == has.end()) continue;
      sink.Note(StrCat("--map auto: the names already follow the naming scheme ", side, " of map ",
                       one.map.name(), " (", one.why, ")"),
                0);
      return std::optional<Found>();
    }
    const auto to = std::find_first_of(wanted.begin(), wanted.end(), all.begin(), all.end());
    Status fits = Fail(Errc::kUnsupported, "no naming scheme ", Joined(wanted, " or "), "; it has ",
                       Joined(all, ", "));
    if (to != wanted.end()) {
      const checkpoints::MapUse trial{use.from, *to, given, one.map.SizesIn(facts.values)};
      const auto mapped = checkpoints::ApplyMap(one.map, trial, checkpoint, patterns);
      fits = mapped ? Status() : tl::unexpected(mapped.error());
      one.to = *to;
    }
    if (fits) {
      fitting.push_back(std::move(one));
    } else if (!refused) {
      refused = Within(StrCat("--map auto: map ", one.map.name(), " (", one.why, ")"), fits.error())
                    .value();
    }
  }
  if (fitting.empty()) return tl::unexpected(*std::move(refused));
  if (fitting.size() > 1) {
    return Fail(Errc::kUsage, "--map auto: the maps ", fitting[0].map.name(), " and ",
                fitting[1].map.name(), " both match (", fitting[0].why,
                "); select one with --map MAP:TO");
  }
  return std::optional<Found>(std::move(fitting.front()));
}

}  // namespace

nlohmann::ordered_json MapUsed::Recipe() const {
  nlohmann::ordered_json json = Json();
  if (map == name) {
    json["map"] = map;
    return json;
  }
  const Result<json::Json> parsed = json::Parse(map, name);
  SW_CHECK(parsed);  // it was parsed before
  json["map"] = *parsed;
  return json;
}

Result<std::vector<MapChoice>> MapsOfRecipes(const std::string& recipes, const std::string& where) {
  std::vector<MapChoice> choices;
  if (recipes.empty()) return choices;
  SW_TRY_ASSIGN(const json::Json list, json::Parse(recipes, where));
  if (!list.is_array()) return Fail(Errc::kBadInput, where, ": \"maps\": list expected");
  for (const json::Json& recipe : list) {
    SW_TRY_ASSIGN(MapChoice choice, ReadRecipe(recipe, where));
    choices.push_back(std::move(choice));
  }
  return choices;
}

Result<std::vector<MapChoice>> ReadMaps(comm::Comm& comm, const MapsAsked& asked) {
  std::vector<MapChoice> choices;
  if (asked.maps == std::vector<std::string>{"none"}) return choices;
  for (const std::string& map : asked.maps) {
    SW_TRY_ASSIGN(MapChoice choice, ReadMap(comm, map));
    choices.push_back(std::move(choice));
  }
  if (choices.empty()) return choices;
  const bool finds = std::any_of(choices.begin(), choices.end(),
                                 [](const MapChoice& choice) { return !choice.map; });
  if (finds && choices.size() > 1) {
    return Fail(Errc::kUsage, "--map auto cannot be combined with another --map");
  }
  SW_TRY_ASSIGN(const checkpoints::ModelSizes given, ParseSizes(asked.sizes));
  for (MapChoice& choice : choices) choice.use.sizes = given;
  return choices;
}

Result<std::vector<std::string>> MapFlagsFor(const checkpoints::Checkpoint& checkpoint,
                                             const MapsAsked& asked,
                                             const checkpoints::Patterns& patterns,
                                             const std::string& config) {
  // A config that cannot be parsed determines nothing.
  const checkpoints::KnownConfig facts =
      checkpoints::MergeConfigs(config, checkpoint).value_or(checkpoints::KnownConfig());
  // Returns the flag for the size that an error asks for.
  const auto sizes_in = [](const Error& error) {
    const std::size_t flag = error.message.rfind(checkpoints::kSizesFlag);
    return flag == std::string::npos ? std::string() : error.message.substr(flag);
  };
  // Names and the config first: they need no copy of the checkpoint.
  std::vector<std::pair<checkpoints::ModelMap, std::string>> leading;  // map, target scheme
  bool known = false;                                                  // by the config
  for (const std::string& name : checkpoints::ModelMap::BuiltInNames()) {
    SW_TRY_ASSIGN(const checkpoints::ModelMap map, checkpoints::ModelMap::BuiltIn(name));
    const std::vector<std::string> has = checkpoints::SidesOf(map, checkpoint);
    const bool done = std::ranges::any_of(has, [&](const std::string& side) {
      return std::ranges::find(asked.sides, side) != asked.sides.end();
    });
    if (done) return std::vector<std::string>();
    const std::vector<std::string> all = map.sides();
    const auto to = std::ranges::find_first_of(asked.sides, all);
    if (has.empty() || to == asked.sides.end()) continue;
    known = known || map.ToldBy(facts.values).has_value();
    leading.emplace_back(map, *to);
  }
  std::vector<std::string> flags;
  if (leading.empty()) return flags;
  std::string of_split;
  if (!checkpoint.fused.empty() && !asked.weights_alone) {
    const auto split = checkpoints::SplitFused(checkpoint, {}, patterns);
    if (!split) of_split = sizes_in(split.error());
  }
  const checkpoints::Checkpoint model = checkpoints::WithoutFused(checkpoint);
  for (const auto& [map, to] : leading) {
    const auto mapped = checkpoints::ApplyMap(map, {"", to, {}}, model, patterns);
    const std::string sizes = mapped ? "" : sizes_in(mapped.error());
    if (!mapped && sizes.empty()) continue;  // the shapes do not fit
    flags.push_back(StrCat("--map ", map.name(), ":", to, of_split.empty() ? sizes : of_split));
  }
  if (known && !flags.empty()) return std::vector<std::string>{"--map auto"};
  return flags;
}

Result<OtherNames> FindOtherNames(const checkpoints::Checkpoint& checkpoint,
                                  const checkpoints::Patterns& patterns,
                                  const checkpoints::Format& format,
                                  const checkpoints::TargetSpec& spec,
                                  const std::function<Result<std::string>()>& config) {
  OtherNames names;
  MapsAsked asked;
  SetTarget(format, spec, &asked);
  if (asked.sides.empty() || checkpoint.origin == format.name) return names;
  SW_TRY_ASSIGN(const std::string known, config());
  SW_TRY_ASSIGN(names.flags, MapFlagsFor(checkpoint, asked, patterns, known));
  names.what = StrCat("the tensor names of ", checkpoint.tag,
                      " are not the names that readers of the ", format.name, " format expect");
  return names;
}

namespace {

/// Splits the parameters that the optimizer has fused, or fuses them again.
Result<MapUsed> UseFused(std::string_view to, checkpoints::ModelSizes sizes,
                         const checkpoints::KnownConfig& facts,
                         const checkpoints::Patterns& patterns, checkpoints::Checkpoint* checkpoint,
                         Sink& sink) {
  SW_TRY_ASSIGN(const checkpoints::ModelMap map,
                checkpoints::ModelMap::BuiltIn(checkpoints::kFusedMap));
  sizes.merge(map.SizesIn(facts.values));
  const bool splits = to == checkpoints::kFusedSplit;
  const auto run = splits ? checkpoints::SplitFused : checkpoints::FuseOptimizer;
  SW_TRY_ASSIGN(checkpoints::Unfused made, run(std::move(*checkpoint), sizes, patterns));
  *checkpoint = std::move(made.checkpoint);
  MapUsed used;
  used.name = used.map = checkpoints::kFusedMap;
  used.from = splits ? checkpoints::kFusedSaved : checkpoints::kFusedSplit;
  used.to = to;
  used.sizes = std::move(made.sizes);
  sink.Note(
      StrCat("map ", used.name, ": ", used.from, " to ", used.to, ", with ", SizesText(used.sizes)),
      0);
  return used;
}

/// Checks that weights mean the same under the names to which a map translates.
Status CheckValues(const checkpoints::ModelMap& map, const checkpoints::Checkpoint& checkpoint) {
  constexpr std::string_view kExperts = "experts";  // between forms of one program
  if (checkpoint.own_values.empty() || map.name() == kExperts) return {};
  return Fail(Errc::kUnsupported, "map ", map.name(), ": ", checkpoint.tag, ": ",
              checkpoint.own_values,
              ", which other programs do not; --map none keeps names and values");
}

}  // namespace

Result<std::vector<MapUsed>> UseMaps(const std::vector<MapChoice>& choices, const MapsAsked& asked,
                                     const std::string& config,
                                     const checkpoints::Patterns& patterns,
                                     checkpoints::Checkpoint* checkpoint, Sink& sink) {
  SW_TRY_ASSIGN(const checkpoints::KnownConfig facts,
                checkpoints::MergeConfigs(config, *checkpoint));
  checkpoint->facts = facts.values;
  if (std::ranges::all_of(choices, [](const MapChoice& one) { return one.map.has_value(); })) {
    SW_TRY(CheckSizes(choices, *checkpoint));
  } else if (facts.origin.empty()) {
    // Without the family no map is found. Fail before a size is missed for the split.
    SW_TRY(FindFamily(facts, asked, patterns, *checkpoint));
  }
  std::vector<MapUsed> all;
  std::optional<checkpoints::Checkpoint> fused;  // state before the split
  if (!checkpoint->fused.empty() && !choices.empty() && asked.weights_alone) {
    *checkpoint = checkpoints::WithoutFused(std::move(*checkpoint));
  } else if (!checkpoint->fused.empty() && !choices.empty()) {
    fused = *checkpoint;
    SW_TRY_ASSIGN(MapUsed used, UseFused(checkpoints::kFusedSplit, choices.front().use.sizes, facts,
                                         patterns, checkpoint, sink));
    all.push_back(std::move(used));
  }
  const std::size_t before = all.size();
  bool named = false;  // the user asked for the split
  for (MapChoice choice : choices) {
    std::string why;
    if (!choice.map) {
      SW_TRY_ASSIGN(auto found, FindMap(choice.use, asked, facts, choice.use.sizes, patterns,
                                        *checkpoint, sink));
      if (!found) continue;
      choice.map = std::move(found->map);
      choice.use.to = std::move(found->to);
      why = std::move(found->why);
      SW_TRY(CheckSizes({choice}, *checkpoint));
    }
    if (choice.map->name() == checkpoints::kFusedMap) {
      if (fused && all.size() == before && choice.use.to == checkpoints::kFusedSplit) {
        named = true;
        continue;
      }
      if (choice.use.to == checkpoints::kFusedSaved) {
        SW_TRY_ASSIGN(MapUsed used, UseFused(checkpoints::kFusedSaved, choice.use.sizes, facts,
                                             patterns, checkpoint, sink));
        all.push_back(std::move(used));
        continue;
      }
    }
    SW_TRY(CheckValues(*choice.map, *checkpoint));
    choice.use.config.merge(choice.map->SizesIn(facts.values));
    SW_TRY_ASSIGN(checkpoints::Mapped mapped,
                  checkpoints::ApplyMap(*choice.map, choice.use, std::move(*checkpoint), patterns));
    *checkpoint = std::move(mapped.checkpoint);
    checkpoint->facts.merge(choice.map->ConfigOf(mapped.sizes));
    MapUsed& used = all.emplace_back();
    used.name = choice.map->name();
    used.from = mapped.from;
    used.to = mapped.to;
    used.sizes = std::move(mapped.sizes);
    used.map = choice.text == kAuto ? used.name : choice.text;
    used.why = std::move(why);
    const std::string sizes = SizesText(used.sizes);
    sink.Note(StrCat("map ", used.name, ": ", used.from, " to ", used.to,
                     sizes.empty() ? "" : ", with " + sizes,
                     used.why.empty() ? "" : "; chosen by " + used.why),
              0);
    for (const std::string& name : mapped.left_behind) {
      used.left_behind.push_back(StrCat(Quoted(name), ": models with the naming scheme ", used.to,
                                        " compute it themselves"));
    }
  }
  if (fused && !named && all.size() == before) {  // no map was needed
    *checkpoint = *std::move(fused);
    all.clear();
  }
  return all;
}

}  // namespace shardwright::convert
