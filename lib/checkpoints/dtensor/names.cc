// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>

#include "checkpoints/dtensor/item_table_internal.h"
#include "checkpoints/dtensor/names_internal.h"
#include "checkpoints/pickled/weight_sets.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/json/json.h"

namespace shardwright::checkpoints::dtensor {
namespace {

constexpr std::string_view kAccelerateModel = "pytorch_model_fsdp";
constexpr std::string_view kAccelerateOptimizer = "optimizer";
constexpr std::string_view kFirst = "_0";  // number of a run's first model and optimizer

/// Removes a number without leading zeros from the end of `text`, and returns it.
std::optional<std::uint64_t> TakeNumber(std::string_view* text) {
  std::size_t at = text->size();
  while (at > 0 && (*text)[at - 1] >= '0' && (*text)[at - 1] <= '9') --at;
  const std::string_view digits = text->substr(at);
  const auto number = NumberIn<std::uint64_t>(digits);
  if (!number || (digits.size() > 1 && digits.front() == '0')) return std::nullopt;
  text->remove_suffix(digits.size());
  return number;
}

bool TakeSuffix(std::string_view* text, std::string_view suffix) {
  if (!text->ends_with(suffix)) return false;
  text->remove_suffix(suffix.size());
  return true;
}

std::optional<RankFile> ParseVerl(std::string_view name) {
  RankFile file;
  if (!TakeSuffix(&name, ".pt")) return std::nullopt;
  const auto rank = TakeNumber(&name);
  if (!rank || !TakeSuffix(&name, "_rank_")) return std::nullopt;
  file.world = TakeNumber(&name);
  if (!file.world || !TakeSuffix(&name, "_world_size_")) return std::nullopt;
  file.rank = *rank;
  file.name = name;
  if (name == "model") {
    file.item = Item::kModel;
  } else if (name == "optim") {
    file.item = Item::kOptimizer;
  } else if (name == "extra_state") {
    file.item = Item::kOther;
  } else {
    return std::nullopt;
  }
  return file;
}

std::optional<RankFile> ParseAccelerate(std::string_view name) {
  RankFile file;
  file.trainer = Trainer::kAccelerate;
  if (!TakeSuffix(&name, ".bin")) return std::nullopt;
  if (name == kAccelerateModel || name == kAccelerateOptimizer) {
    file.item = name == kAccelerateModel ? Item::kModel : Item::kOptimizer;
    file.name = std::string(name) + std::string(kFirst);
    file.world = 1;
    return file;
  }
  const auto rank = TakeNumber(&name);
  if (!rank || !TakeSuffix(&name, "_rank")) return std::nullopt;
  file.rank = *rank;
  file.name = name;
  if (TakeNumber(&name) && !TakeSuffix(&name, "_")) return std::nullopt;
  const bool numbered = name != file.name;
  if (name == kAccelerateModel) {
    file.item = Item::kModel;
  } else if (name == kAccelerateOptimizer && numbered) {
    file.item = Item::kOptimizer;
  } else {
    return std::nullopt;
  }
  return file;
}

std::optional<RankFile> ParseItem(std::string_view name) {
  RankFile file;
  file.trainer = Trainer::kTorchCheckpointing;
  if (!TakeSuffix(&name, ".pt")) return std::nullopt;
  const auto rank = TakeNumber(&name);
  if (!rank || !TakeSuffix(&name, "_") || name.empty()) return std::nullopt;
  file.rank = *rank;
  file.name = name;
  file.item = name == "model"                          ? Item::kModel
              : name == "optimizer" || name == "optim" ? Item::kOptimizer
                                                       : Item::kOther;
  return file;
}

/// Contents of fsdp_config.json.
struct VerlConfig {
  std::optional<std::uint64_t> world;
  std::optional<int> version;
};

Result<VerlConfig> ReadVerlConfig(const std::string& text) {
  VerlConfig config;
  if (text.empty()) return config;
  auto json = json::Parse(text, std::string(kVerlConfig));
  if (!json) return tl::unexpected<Error>(std::move(json).error());
  const auto count = [&](const char* key) -> std::optional<std::uint64_t> {
    const json::Json* value = json::Find(*json, key);
    if (value == nullptr || !value->is_number_unsigned()) return std::nullopt;
    return value->get<std::uint64_t>();
  };
  config.world = count("world_size");
  if (const auto version = count("FSDP_version"); version && *version <= 2) {
    config.version = static_cast<int>(*version);
  } else if (version) {
    return Fail(Errc::kUnsupported, kVerlConfig, ": FSDP_version 1 or 2 expected, found ",
                *version);
  }
  return config;
}

/// The number of ranks and the source of this number.
struct World {
  std::uint64_t ranks = 0;
  std::string who;
};

Result<World> WorldOf(const SourceSet& source, const std::vector<RankFile>& files, Family* family) {
  World world;
  const auto says = [&](std::uint64_t ranks, const std::string& who) -> Status {
    if (ranks == 0 || ranks > limits::kRanks) {
      return Fail(Errc::kLimit, who, ": 1 to ", limits::kRanks, " ranks expected, found ", ranks);
    }
    if (world.ranks != 0 && world.ranks != ranks) {
      return Fail(Errc::kUnsupported, "different numbers of ranks: ", world.who, " has ",
                  world.ranks, ", ", who, " has ", ranks,
                  ": move the files of one save to a folder of its own");
    }
    if (world.ranks == 0) world = {ranks, who};
    return {};
  };
  for (std::size_t i = 0; i < files.size(); ++i) {
    if (files[i].world) SW_TRY(says(*files[i].world, source.files[i].name));
  }
  if (family->trainer == Trainer::kVerl) {
    SW_TRY_ASSIGN(const VerlConfig config, ReadVerlConfig(source.manifest));
    family->fsdp_version = config.version;
    if (config.world) SW_TRY(says(*config.world, std::string(kVerlConfig)));
  } else if (family->trainer == Trainer::kTorchCheckpointing) {
    SW_TRY_ASSIGN(const ItemTable table, ReadItemTable(source.manifest));
    SW_TRY(says(table.world, std::string(kItemTable)));
  } else {
    std::uint64_t last = 0;
    std::string who;
    for (std::size_t i = 0; i < files.size(); ++i) {
      if (!who.empty() && files[i].rank <= last) continue;
      last = files[i].rank;
      who = source.files[i].name;
    }
    SW_TRY(says(last + 1, who));
  }
  return world;
}

using ByItem = std::map<std::pair<Item, std::string>, std::map<std::uint64_t, std::uint32_t>>;

std::string_view NumberAtEnd(std::string_view name) {
  std::string_view stem = name;
  return TakeNumber(&stem) ? name.substr(stem.size()) : std::string_view();
}

/// torch_checkpointing: uses another item as the model, such as an average of its weights.
Status TakeItem(const std::string& asked, ByItem* by_item, Family* family) {
  std::vector<WeightCandidate> candidates;
  for (const auto& [key, ranks] : *by_item) {
    if (key.first != Item::kOptimizer) candidates.push_back({.name = key.second});
  }
  SW_TRY_ASSIGN(const std::size_t taken, FindWeights(candidates, asked));
  const std::string& name = candidates[taken].name;
  const auto other = by_item->find({Item::kOther, name});
  if (other == by_item->end()) return {};
  std::erase_if(*by_item, [&](const auto& one) {
    if (one.first.first != Item::kModel) return false;
    family->left_out.push_back("the weights in " + one.first.second);
    return true;
  });
  auto node = by_item->extract(other);
  node.key() = {Item::kModel, name};
  by_item->insert(std::move(node));
  return {};
}

/// Keeps one model, and the optimizer with its number.
Status ChooseModel(const SourceSet& source, ByItem* by_item, Family* family) {
  if (family->trainer == Trainer::kTorchCheckpointing && !source.weights_of.empty()) {
    return TakeItem(source.weights_of, by_item, family);
  }
  std::vector<WeightCandidate> candidates;
  std::vector<std::string> optimizers;
  for (const auto& [key, ranks] : *by_item) {
    if (key.first == Item::kModel) candidates.push_back({.name = key.second});
    if (key.first == Item::kOptimizer) optimizers.push_back(key.second);
  }
  if (candidates.size() < 2 && optimizers.size() < 2 && source.weights_of.empty()) return {};
  for (WeightCandidate& one : candidates) {
    const bool trained = std::any_of(optimizers.begin(), optimizers.end(), [&](const auto& name) {
      return NumberAtEnd(name) == NumberAtEnd(one.name);
    });
    one.matches = trained || optimizers.empty() ? 1 : 0;
  }
  if (candidates.empty()) return {};  // a later check reports this
  std::size_t taken = 0;
  if (source.weights_of.empty()) {
    SW_TRY_ASSIGN(taken, ChooseWeights(candidates, !optimizers.empty()));
  } else {
    SW_TRY_ASSIGN(taken, FindWeights(candidates, source.weights_of));
  }
  family->sets = WeightSetsOf(candidates, taken);
  const std::string name = candidates[taken].name;
  const bool alone = optimizers.size() == 1 && candidates.size() == 1;
  std::erase_if(*by_item, [&](const auto& one) {
    const auto& [item, other] = one.first;
    const bool model = item == Item::kModel;
    if (item == Item::kOther || alone) return false;
    if (model ? other == name : NumberAtEnd(other) == NumberAtEnd(name)) return false;
    family->left_out.push_back((model ? "the weights in " : "the optimizer in ") + other);
    return true;
  });
  return {};
}

}  // namespace

std::optional<RankFile> ParseRankFile(std::string_view name) {
  if (auto file = ParseVerl(name)) return file;
  if (auto file = ParseAccelerate(name)) return file;
  return ParseItem(name);
}

std::string RankFileName(Trainer trainer, std::string_view item, std::uint64_t world,
                         std::uint64_t rank) {
  const std::string name(item);
  const std::string number = std::to_string(rank);
  switch (trainer) {
    case Trainer::kVerl:
      return name + "_world_size_" + std::to_string(world) + "_rank_" + number + ".pt";
    case Trainer::kAccelerate:
      return name + "_rank" + number + ".bin";
    case Trainer::kTorchCheckpointing:
      break;
  }
  return name + "_" + number + ".pt";
}

const ItemFiles* Family::Find(Item item) const {
  const auto found = std::find_if(items.begin(), items.end(),
                                  [&](const ItemFiles& one) { return one.item == item; });
  return found == items.end() ? nullptr : &*found;
}

Result<Family> FamilyOf(const SourceSet& source, bool only_weights) {
  Family family;
  std::vector<RankFile> files;
  for (const SourceFile& file : source.files) {
    const auto parsed = ParseRankFile(file.name);
    if (!parsed) return BadInput(file.name, ": the name has no rank number");
    if (!files.empty() && parsed->trainer != files.front().trainer) {
      return Fail(Errc::kUnsupported, source.files.front().name, " and ", file.name,
                  ": files of two trainers in one folder: move the files of one to a folder of its "
                  "own");
    }
    files.push_back(*parsed);
  }
  if (files.empty()) return Fail(Errc::kNotFound, "no per-rank file found");
  family.trainer = files.front().trainer;
  SW_TRY_ASSIGN(const World world, WorldOf(source, files, &family));
  family.world = world.ranks;
  ByItem by_item;
  for (std::uint32_t i = 0; i < files.size(); ++i) {
    if (files[i].rank >= world.ranks) {
      return BadInput(source.files[i].name, ": the checkpoint has only ",
                      Plural(world.ranks, "rank"), " according to ", world.who);
    }
    by_item[{files[i].item, files[i].name}].emplace(files[i].rank, i);
  }
  SW_TRY(ChooseModel(source, &by_item, &family));
  std::vector<std::string> missing;
  for (const auto& [key, ranks] : by_item) {
    const auto& [item, name] = key;
    if (only_weights && item != Item::kModel) continue;
    if (item != Item::kOther && family.Find(item) != nullptr) {
      return Fail(Errc::kUnsupported, "files of ", family.Find(item)->name, " and of ", name,
                  ": one model and one optimizer expected");
    }
    ItemFiles one{name, item, {}};
    for (std::uint64_t rank = 0; rank < world.ranks; ++rank) {
      const auto found = ranks.find(rank);
      if (found == ranks.end()) {
        missing.push_back(RankFileName(family.trainer, name, world.ranks, rank));
      } else {
        one.files.push_back(found->second);
      }
    }
    family.items.push_back(std::move(one));
  }
  if (!missing.empty()) {
    return Fail(Errc::kNotFound, "the checkpoint has ", Plural(world.ranks, "rank"),
                " according to ", world.who, ", but files are missing: ", FirstFew(missing));
  }
  if (family.Find(Item::kModel) == nullptr) {
    return Fail(Errc::kNotFound, source.files.front().name, ": files of the model are missing");
  }
  return family;
}

}  // namespace shardwright::checkpoints::dtensor
