// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"

namespace shardwright::checkpoints::reader {
namespace {

constexpr std::string_view kExperts = ".deepspeed_experts.";

/// Limits the list of missing names, because the number of experts comes from an untrusted file.
constexpr std::uint64_t kMostMissing = 1 << 16;

/// Returns the number of experts that the engine records for a MoE layer.
std::optional<std::uint64_t> RecordedExperts(const Reading& reading, std::uint64_t layer) {
  const Node* said = reading.models.front().document.root->Find("num_experts");
  if (said != nullptr && said->is_list()) {
    said = layer < said->items.size() ? said->items[layer] : nullptr;
  }
  const auto count = pickle::AsCount(said);
  return count ? std::optional<std::uint64_t>(*count) : std::nullopt;
}

/// Counts the experts per rank of every MoE layer, from the names in param_shapes. If the last
/// ones are frozen, CountFrozen corrects it.
Status CountLocal(Reading* reading) {
  for (const Model& model : reading->models) {
    for (const std::string& name : model.trainable) {
      const std::optional<std::string> layer = ExpertsPathOf(name);
      if (!layer) continue;
      auto id = ExpertIdOf(name);
      if (!id) return Within(reading->file_name(model.file), std::move(id).error());
      std::uint64_t& count = reading->local_experts[*layer];
      count = std::max<std::uint64_t>(count, std::uint64_t{*id} + 1);
    }
  }
  return {};
}

/// Corrects the number of experts per rank if the last ones of a layer are frozen, as param_shapes
/// does not list them.
void CountFrozen(Reading* reading, std::uint64_t layer, const std::string& module) {
  const auto local = reading->local_experts.find(module);
  const std::optional<std::uint64_t> experts = RecordedExperts(*reading, layer);
  const std::uint64_t ranks = reading->topology.ep;
  if (local == reading->local_experts.end() || !experts || *experts % ranks != 0) return;
  if (*experts / ranks > local->second + kMostMissing) return;
  local->second = std::max(local->second, *experts / ranks);
}

/// Adds one expert's tensors from the files of every mp rank.
Status AddExpert(Reading* reading, std::uint64_t layer, std::uint64_t expert,
                 const std::map<std::uint64_t, std::uint32_t>& files, std::string* module) {
  std::vector<std::string> missing;
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    const auto at = files.find(mp);
    if (at == files.end()) {
      missing.push_back(
          StrCat("layer_", layer, "_expert_", expert, "_", ModelFileName(false, 0, mp)));
      continue;
    }
    const std::uint32_t file = at->second;
    SW_TRY_ASSIGN(const Document document, Open(*reading, file));
    const ExpertId id_of_file{static_cast<std::uint32_t>(layer),
                              static_cast<std::uint32_t>(expert)};
    for (std::size_t i = 0; i < document.root->entry_count(); ++i) {
      SW_TRY_ASSIGN(const std::string_view key, pickle::AsString(document.root->key(i)));
      const std::string name(key);
      const std::string what = "parameter \"" + name + "\"";
      const std::optional<std::string> path = ExpertsPathOf(name);
      auto id = ExpertIdOf(name);
      if (!path || !id || *id != expert) {
        return Fail(Errc::kBadInput, reading->file_name(file), ": ", what,
                    ": a parameter of expert ", expert, " expected");
      }
      if (!module->empty() && *module != *path) {
        return Fail(Errc::kBadInput, reading->file_name(file), ": ", what, ": layer ", layer,
                    " has the module ", *module, " in other files");
      }
      if (module->empty()) CountFrozen(reading, layer, *path);
      *module = *path;
      const auto local = reading->local_experts.find(*path);
      const std::uint64_t local_count = local == reading->local_experts.end() ? 0 : local->second;
      ParamKind kind =
          reading->knows_trained(reading->models[mp]) ? ParamKind::kFrozen : ParamKind::kTrainable;
      if (local_count > 0) {
        SW_TRY_ASSIGN(const std::string local_name, WithExpertId(name, expert % local_count));
        if (reading->models[mp].trainable.contains(local_name)) kind = ParamKind::kTrainable;
      }
      SW_TRY_ASSIGN(std::vector<PlacedPart> parts,
                    reading->map.PartsOf(file, document, document.root->value(i), what));
      const pickle::Tensor& tensor = *document.root->value(i)->tensor;
      SW_TRY_ASSIGN(const std::uint32_t param,
                    AddParam(reading, name, kind, mp, tensor.shape, tensor.dtype, file));
      reading->out.params[param].expert = id_of_file;
      AddWeight(reading, param, mp, std::move(parts));
    }
  }
  if (!missing.empty()) return Missing(*reading, missing);
  return {};
}

/// Checks that a layer's expert files have consecutive numbers, one for each expert of the ranks.
Status CheckCount(const Reading& reading, std::uint64_t layer, const std::string& module,
                  std::uint64_t found) {
  const auto local = reading.local_experts.find(module);
  if (local == reading.local_experts.end()) return {};
  const std::uint64_t expected = local->second * reading.topology.ep;
  if (found < expected) {
    std::vector<std::string> missing;
    for (std::uint64_t expert = 0; expert < expected; ++expert) {
      if (reading.grid.experts.contains({layer, expert})) continue;
      for (std::uint64_t mp = 0; mp < reading.mp_ranks; ++mp) {
        missing.push_back(
            StrCat("layer_", layer, "_expert_", expert, "_", ModelFileName(false, 0, mp)));
      }
    }
    return Missing(reading, missing);
  }
  if (found > expected) {
    return Fail(Errc::kBadInput, reading.source.tag, ": layer ", layer, ": ", expected,
                " experts expected (", local->second, " on each of ", reading.topology.ep,
                " ranks), found files of ", found);
  }
  return {};
}

/// Checks consecutive numbers of a layer's experts without shards. The number of expert-parallel
/// ranks is unknown then, so the expected number of experts comes from the model.
Status CheckNumbers(const Reading& reading, std::uint64_t layer, std::uint64_t found) {
  std::uint64_t expected = found;
  const std::optional<std::uint64_t> count = RecordedExperts(reading, layer);
  if (count && *count < found + kMostMissing) expected = std::max(found, *count);
  std::vector<std::string> missing;
  for (std::uint64_t expert = 0; expert < expected; ++expert) {
    if (reading.grid.experts.contains({layer, expert})) continue;
    for (std::uint64_t mp = 0; mp < reading.mp_ranks; ++mp) {
      missing.push_back(
          StrCat("layer_", layer, "_expert_", expert, "_", ModelFileName(false, 0, mp)));
    }
  }
  if (!missing.empty()) return Missing(reading, missing);
  return {};
}

/// Checks that every expert parameter of the optimizer has a weight.
Status CheckWeights(const Reading& reading) {
  for (std::uint64_t mp = 0; mp < reading.mp_ranks; ++mp) {
    for (const std::string& name : reading.models[mp].trainable) {
      if (!ExpertsPathOf(name)) continue;
      for (std::uint64_t ep = 0; ep < reading.topology.ep; ++ep) {
        SW_TRY(ParamOf(reading, name, ep, reading.models[mp].file));
      }
    }
  }
  return {};
}

}  // namespace

std::optional<std::string> ExpertsPathOf(const std::string& name) {
  const std::size_t at = name.find(kExperts);
  if (at == std::string::npos) return std::nullopt;
  return name.substr(0, at);
}

Result<std::uint32_t> ParamOf(const Reading& reading, const std::string& local_name,
                              std::uint64_t ep, std::uint32_t file) {
  std::string name = local_name;
  if (const std::optional<std::string> layer = ExpertsPathOf(local_name)) {
    SW_TRY_ASSIGN(const std::uint32_t local, ExpertIdOf(local_name));
    const auto count = reading.local_experts.find(*layer);
    SW_CHECK(count != reading.local_experts.end());
    SW_TRY_ASSIGN(name, WithExpertId(local_name, ep * count->second + local));
  }
  const auto at = reading.by_name.find(name);
  if (at == reading.by_name.end()) {
    return Fail(Errc::kBadInput, reading.file_name(file), ": parameter \"", name,
                "\": its weight is in no file");
  }
  return at->second;
}

Status ReadExperts(Reading* reading) {
  if (reading->shards.empty() && !reading->grid.experts.empty() && !reading->only_weights) {
    return Fail(
        Errc::kUnsupported, reading->source.tag,
        ": experts trained without ZeRO are not supported: train them with ZeRO stage 1 or 2");
  }
  SW_TRY(CountLocal(reading));
  std::map<std::uint64_t, std::pair<std::string, std::uint64_t>> layers;  // module, number of files
  for (const auto& [key, files] : reading->grid.experts) {
    auto& [module, count] = layers[key.first];
    if (key.first > 0xffff'ffff || key.second > 0xffff'ffff) {
      return Fail(Errc::kBadInput, reading->file_name(files.begin()->second), ": number too large");
    }
    SW_TRY(AddExpert(reading, key.first, key.second, files, &module));
    ++count;
  }
  for (const auto& [layer, found] : layers) {
    SW_TRY(reading->only_weights ? CheckNumbers(*reading, layer, found.second)
                                 : CheckCount(*reading, layer, found.first, found.second));
  }
  return reading->only_weights ? Status() : CheckWeights(*reading);
}

}  // namespace shardwright::checkpoints::reader
