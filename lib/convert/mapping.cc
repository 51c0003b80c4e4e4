// SPDX-License-Identifier: Apache-2.0
#include "convert/mapping.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>

#include <nlohmann/json.hpp>

#include "checkpoints/model/links.h"
#include "checkpoints/torchtitan_fused_qkv.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"
#include "support/os/dir.h"
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
    std::uint64_t value = 0;
    const char* const begin = item.data() + std::min(sign, item.size() - 1) + 1;
    const char* const end = item.data() + item.size();
    const auto [at, error] = std::from_chars(begin, end, value);
    if (sign == std::string_view::npos || error != std::errc() || at != end || value == 0 ||
        !sizes.emplace(item.substr(0, sign), value).second) {
      return Fail(Errc::kUsage, "--map-sizes: NAME=NUMBER,... expected, found ",
                  Quoted(std::string(item)));
    }
  }
  return sizes;
}

std::string ParentOf(const std::string& path) {
  const std::size_t end = path.find_last_not_of('/');
  const std::size_t slash = path.rfind('/', end);
  return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

std::string SizesText(const checkpoints::ModelSizes& sizes) {
  std::string text;
  for (const auto& [name, value] : sizes) {
    text += (text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  }
  return text;
}

}  // namespace

Result<std::string> FindConfig(const std::vector<std::string>& source_paths) {
  for (const std::string& root : source_paths) {
    // verl stores it in a separate folder.
    const std::string parent = ParentOf(root);
    for (const std::string& folder :
         {root, root + "/huggingface", parent, parent + "/huggingface"}) {
      const std::string path = folder + "/config.json";
      const Result<bool> there = os::Exists(path);
      if (!there || !*there) continue;
      SW_TRY_ASSIGN(const std::string text,
                    checkpoints::ReadTextInFolder(path, limits::kJsonBytes));
      std::string found = path;
      found.append("\n").append(text);
      return found;
    }
  }
  return std::string();
}

Result<std::string> FindAdapterConfig(const std::vector<std::string>& source_paths) {
  for (const std::string& root : source_paths) {
    for (const std::string& folder :
         {root, root + "/lora_adapter", root + "/adapter", ParentOf(root),
          ParentOf(root) + "/lora_adapter", ParentOf(root) + "/adapter"}) {
      const std::string path = folder + "/adapter_config.json";
      const Result<bool> there = os::Exists(path);
      if (there && *there) return os::ReadWholeText(path, limits::kJsonBytes);
    }
  }
  return std::string();
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
    SW_TRY_ASSIGN(choice.use.sizes[name],
                  json::WholeOf(size, 1, std::uint64_t{1} << 53, where + ": size " + Quoted(name)));
  }
  return choice;
}

/// Checks that at least one of the maps uses each size.
Status CheckSizes(const checkpoints::ModelSizes& sizes, const std::vector<MapChoice>& choices) {
  std::set<std::string> known;
  for (const MapChoice& choice : choices) {
    if (!choice.map) continue;
    for (const std::string& name : choice.map->sizes()) known.insert(name);
  }
  for (const auto& [name, value] : sizes) {
    if (known.contains(name)) continue;
    return Fail(Errc::kUsage, "--map-sizes: unknown size ", Quoted(name), "; known sizes: ",
                Joined(std::vector<std::string>(known.begin(), known.end()), ", "));
  }
  return {};
}

/// The model's config values and their origin.
struct KnownConfig {
  checkpoints::ModelConfig values;
  std::string origin;  ///< "ckpt/config.json"; empty: no values are known
};

/// Merges the config values of config.json and of the checkpoint itself.
Result<KnownConfig> MergeConfigs(const std::string& config,
                                 const checkpoints::Checkpoint& checkpoint) {
  KnownConfig facts;
  if (!checkpoint.facts.empty()) {
    facts = {checkpoint.facts, StrCat(checkpoint.origin, " checkpoint ", checkpoint.tag)};
  }
  if (config.empty()) return facts;
  const std::size_t line = config.find('\n');
  const std::string path = config.substr(0, line);
  SW_TRY_ASSIGN(checkpoints::ModelConfig told,
                checkpoints::FactsIn(std::string_view(config).substr(line + 1), path));
  for (const auto& [key, value] : facts.values) {
    const auto other = told.find(key);
    if (other == told.end() || other->second == value) continue;
    return Fail(Errc::kBadInput, Quoted(key), " is ", Quoted(other->second), " in ", path, ", ",
                Quoted(value), " in the ", facts.origin);
  }
  told.merge(facts.values);
  return KnownConfig{std::move(told),
                     facts.origin.empty() ? path : path + " and the " + facts.origin};
}

/// A map that matches the config, and the reason why it matches.
struct Found {
  checkpoints::ModelMap map;
  std::string to;
  std::string why;
};

/// Finds the maps of the model family in the config.
Result<std::vector<Found>> FindFamily(const KnownConfig& facts, const std::string& tag) {
  std::vector<Found> found;
  for (const std::string& name : checkpoints::ModelMap::BuiltInNames()) {
    SW_TRY_ASSIGN(checkpoints::ModelMap map, checkpoints::ModelMap::BuiltIn(name));
    auto why = map.ToldBy(facts.values);
    if (why) found.push_back({std::move(map), "", *std::move(why) + " of " + facts.origin});
  }
  if (!found.empty()) return found;
  if (facts.origin.empty()) {
    return Fail(Errc::kUsage, "--map auto: cannot detect the model family of ", tag,
                ": the checkpoint does not record it, and there is no config.json next to it or in "
                "a folder huggingface; select a map with --map MAP:TO");
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
                                     const KnownConfig& facts, const checkpoints::ModelSizes& given,
                                     const checkpoints::Patterns& patterns,
                                     const checkpoints::Checkpoint& checkpoint, Sink& sink) {
  SW_TRY_ASSIGN(std::vector<Found> family, FindFamily(facts, checkpoint.tag));
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
      checkpoints::MapUse trial{use.from, *to, given};
      trial.sizes.merge(one.map.SizesIn(facts.values));
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
  if (!finds) SW_TRY(CheckSizes(given, choices));
  return choices;
}

namespace {

/// Splits the parameters that the optimizer has fused, or fuses them again.
Result<MapUsed> UseFused(std::string_view to, checkpoints::ModelSizes sizes,
                         const KnownConfig& facts, const checkpoints::Patterns& patterns,
                         checkpoints::Checkpoint* checkpoint, Sink& sink) {
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

}  // namespace

Result<std::vector<MapUsed>> UseMaps(const std::vector<MapChoice>& choices, const MapsAsked& asked,
                                     const std::string& config,
                                     const checkpoints::Patterns& patterns,
                                     checkpoints::Checkpoint* checkpoint, Sink& sink) {
  SW_TRY_ASSIGN(const KnownConfig facts, MergeConfigs(config, *checkpoint));
  std::vector<MapUsed> all;
  std::optional<checkpoints::Checkpoint> fused;  // state before the split
  if (!checkpoint->fused.empty() && !choices.empty()) {
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
      SW_TRY(CheckSizes(choice.use.sizes, {choice}));
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
    choice.use.sizes.merge(choice.map->SizesIn(facts.values));
    SW_TRY_ASSIGN(checkpoints::Mapped mapped,
                  checkpoints::ApplyMap(*choice.map, choice.use, std::move(*checkpoint), patterns));
    *checkpoint = std::move(mapped.checkpoint);
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
