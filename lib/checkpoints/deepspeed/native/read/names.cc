// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/tensor/convert.h"
#include "support/base/checked.h"

// Reads model states without param_shapes: models with experts before 0.19.3, and BF16_Optimizer
// at stage 0. Names and order come from the ranks' slices, shapes from the weights.
//
// Before 0.14.5, stages 1 and 2 compute an expert group's slices with the number of ranks
// of dense groups, so only the first 1/ep of the group is recorded. The reader completes it
// with the next parameters in model order if only one selection has the right size, and marks
// the order as inferred. Source: docs/formats/deepspeed.md, "Names without param_shapes".

namespace shardwright::checkpoints::reader {
namespace {

/// An expert's parameter on expert rank 0.
struct ExpertParam {
  std::string name;  ///< with the local id
  std::string kind;  ///< the name within the expert: "w1.weight"
  Shape shape;
  std::uint64_t elems = 0;
};

/// Returns the name of an expert's parameter within the expert. \pre ExpertsPathOf(name)
std::string KindOf(const std::string& name, const std::string& path) {
  constexpr std::string_view kExpertsPart = ".deepspeed_experts.";
  const std::size_t dot = name.find('.', path.size() + kExpertsPart.size());
  return dot == std::string::npos ? std::string() : name.substr(dot + 1);
}

/// Returns the number of experts in a MoE layer: by file names, or the model's count if larger.
std::uint64_t ExpertsOf(const Reading& reading, std::uint64_t layer) {
  std::uint64_t count = 0;
  for (const auto& [key, files] : reading.grid.experts) {
    if (key.first == layer) count = std::max(count, key.second + 1);
  }
  const Node* said = reading.models.front().document.root->Find("num_experts");
  if (said != nullptr && said->is_list()) {
    said = layer < said->items.size() ? said->items[layer] : nullptr;
  }
  const auto number = pickle::AsCount(said);
  // Ignores larger counts from a file, because an untrusted number must not create many names.
  constexpr std::uint64_t kMostMissing = 1 << 16;
  return number && *number < count + kMostMissing ? std::max(count, *number) : count;
}

/// Returns the parameters of expert rank 0's experts in model order.
Result<std::vector<ExpertParam>> ListExperts(Reading* reading, std::uint64_t mp) {
  std::set<std::uint64_t> layers;
  for (const auto& [key, files] : reading->grid.experts) layers.insert(key.first);
  std::vector<ExpertParam> out;
  std::vector<std::string> missing;
  for (const std::uint64_t layer : layers) {
    const std::uint64_t local = CeilDiv(ExpertsOf(*reading, layer), reading->topology.ep);
    for (std::uint64_t expert = 0; expert < local; ++expert) {
      const auto files = reading->grid.experts.find({layer, expert});
      if (files == reading->grid.experts.end() || !files->second.contains(mp)) {
        missing.push_back(
            StrCat("layer_", layer, "_expert_", expert, "_", ModelFileName(false, 0, mp)));
        continue;
      }
      const std::uint32_t file = files->second.at(mp);
      SW_TRY_ASSIGN(const Document document, Open(*reading, file));
      for (std::size_t i = 0; i < document.root->entry_count(); ++i) {
        auto key = pickle::AsString(document.root->key(i));
        if (!key) return Within(reading->file_name(file), std::move(key).error());
        const Node* node = document.root->value(i);
        const std::optional<std::string> path = ExpertsPathOf(std::string(*key));
        if (!path || !node->is_tensor()) continue;  // ReadExperts reports it
        ExpertParam param;
        SW_TRY_ASSIGN(param.name, WithExpertId(*key, expert));
        param.kind = KindOf(param.name, *path);
        param.shape = node->tensor->shape;
        SW_TRY_ASSIGN(param.elems, CountElems(param.shape));
        out.push_back(std::move(param));
        std::uint64_t& count = reading->local_experts[*path];
        count = std::max(count, local);
      }
    }
  }
  if (!missing.empty()) return Missing(*reading, missing);
  return out;
}

/// Returns the parameters in a group's slices, in their original order
/// over all partitions. `elems` has the recorded number of elements.
Result<std::vector<NamedShape>> ToldParams(const Reading& reading, const Spread& spread) {
  std::vector<NamedShape> out;
  std::unordered_set<std::string> seen;
  for (std::uint64_t edp = 0; edp < spread.ranks; ++edp) {
    for (const Slice& slice : GroupAt(reading, spread, RankOf(reading, spread, 0, edp)).slices) {
      if (out.empty() || out.back().name != slice.name) {
        if (!seen.insert(slice.name).second) {
          return Fail(Errc::kBadInput, GroupText(reading, spread), ": param_slice_mappings: \"",
                      slice.name, "\" appears twice");
        }
        out.push_back({slice.name, {}, 0});
      }
      SW_TRY_ASSIGN(out.back().elems, CheckedAdd(out.back().elems, slice.elems));
    }
  }
  return out;
}

bool SameSlices(const std::vector<Slice>& a, const std::vector<Slice>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Slice& x, const Slice& y) {
    return x.name == y.name && x.start == y.start && x.elems == y.elems;
  });
}

/// Checks that ranks with the same partition of different experts record equal slices.
Status CheckExpertRanks(const Reading& reading, const Spread& spread) {
  for (std::uint64_t edp = 0; edp < spread.ranks; ++edp) {
    const std::uint64_t first = RankOf(reading, spread, 0, edp);
    for (std::uint64_t ep = 1; ep < spread.ep; ++ep) {
      const std::uint64_t rank = RankOf(reading, spread, ep, edp);
      if (SameSlices(GroupAt(reading, spread, first).slices,
                     GroupAt(reading, spread, rank).slices)) {
        continue;
      }
      const std::string files = GroupText(reading, spread) + ": param_slice_mappings of ranks " +
                                std::to_string(first) + " and " + std::to_string(rank);
      if (reading.config == nullptr) {
        return Fail(Errc::kUnsupported, files,
                    " differ: the files do not contain ds_config, so it is unknown which ranks "
                    "share experts");
      }
      return Fail(Errc::kBadInput, files, " differ, although these ranks have the same experts");
    }
  }
  return {};
}

/// Returns the elements of a group's buffer, from master weights without padding.
Result<std::uint64_t> MasterElems(const Reading& reading, const Spread& spread) {
  std::uint64_t elems = 0;
  for (std::uint64_t edp = 0; edp < spread.ranks; ++edp) {
    const std::uint64_t rank = RankOf(reading, spread, 0, edp);
    SW_TRY_ASSIGN(elems, CheckedAdd(elems, GroupAt(reading, spread, rank).fp32.elems));
  }
  return elems;
}

std::uint64_t SumElems(const std::vector<NamedShape>& params) {
  std::uint64_t sum = 0;
  for (const NamedShape& param : params)
    sum += param.elems;  // the total was checked for overflow before
  return sum;
}

/// Completes groups of which the files record only the beginning.
class Completion {
 public:
  Completion(const Reading& reading, std::uint64_t mp, const std::vector<ExpertParam>& experts)
      : reading_(reading), mp_(mp), experts_(experts) {
    for (std::size_t i = 0; i < experts.size(); ++i) place_.emplace(experts[i].name, i);
  }

  /// \param groups  recorded groups of a mp rank; Complete fills up the incomplete ones
  /// \returns by group: the information missing from the files, or an empty text
  Result<std::vector<std::string>> Complete(std::vector<std::vector<NamedShape>>* groups);

 private:
  using Places = std::vector<std::size_t>;  // indices into experts_

  Status Refuse(std::size_t group, const std::string& why) const {
    return Fail(Errc::kUnsupported, GroupText(reading_, {mp_, group}),
                ": param_slice_mappings list only some of the experts' parameters, as in DeepSpeed "
                "before 0.14.5, and ",
                why, ": load and save the checkpoint with DeepSpeed 0.14.5 or newer");
  }
  Result<Places> PlacesOf(std::size_t group, const std::vector<NamedShape>& told) const;
  std::optional<Places> Walk(const Places& told, std::uint64_t elems,
                             const std::set<std::string>& kinds) const;
  Result<Places> Choose(std::size_t group, const Places& told, std::uint64_t elems) const;
  Status CheckSlices(const Spread& spread, std::uint64_t elems,
                     const std::vector<NamedShape>& params) const;

  const Reading& reading_;
  const std::uint64_t mp_;
  const std::vector<ExpertParam>& experts_;
  std::unordered_map<std::string_view, std::size_t> place_;
  std::vector<bool> taken_;        // by expert parameter: recorded, or assigned to a group
  std::set<std::string> unheard_;  // kinds that no group records
};

Result<Completion::Places> Completion::PlacesOf(std::size_t group,
                                                const std::vector<NamedShape>& told) const {
  Places out;
  for (const NamedShape& param : told) {
    const auto at = place_.find(param.name);
    if (at == place_.end()) {
      return Fail(Errc::kBadInput, GroupText(reading_, {mp_, group}), ": \"", param.name,
                  "\": no expert file contains it");
    }
    const std::uint64_t whole = experts_[at->second].elems;
    if (param.elems > whole || (param.elems < whole && &param != &told.back())) {
      return Fail(Errc::kBadInput, GroupText(reading_, {mp_, group}), ": \"", param.name,
                  "\": ", whole, " elements in its file, ", param.elems,
                  " in param_slice_mappings");
    }
    if (!out.empty() && at->second <= out.back()) {
      SW_TRY(Refuse(group, "\"" + param.name + "\" is not in model order"));
    }
    out.push_back(at->second);
  }
  return out;
}

/// Returns the recorded parameters and those that follow them in model order, restricted
/// to the given kinds. Returns nothing unless the result has exactly `elems` elements.
std::optional<Completion::Places> Completion::Walk(const Places& told, std::uint64_t elems,
                                                   const std::set<std::string>& kinds) const {
  Places out = told;
  std::uint64_t held = 0;
  for (const std::size_t place : told) held += experts_[place].elems;
  for (std::size_t i = told.empty() ? 0 : told.back() + 1; i < experts_.size() && held < elems;
       ++i) {
    if (taken_[i] || !kinds.contains(experts_[i].kind)) continue;
    out.push_back(i);
    held += experts_[i].elems;
  }
  if (held != elems) return std::nullopt;
  return out;
}

/// Completes a group with the kinds of its recorded parameters, plus any selection of the
/// kinds that no group records. Fails unless exactly one completion has the right size.
Result<Completion::Places> Completion::Choose(std::size_t group, const Places& told,
                                              std::uint64_t elems) const {
  constexpr std::size_t kMostKinds = 10;
  if (unheard_.size() > kMostKinds) {
    SW_TRY(Refuse(group, "too many of them are not listed at all"));
  }
  const std::vector<std::string> unheard(unheard_.begin(), unheard_.end());
  std::set<Places> ways;
  for (std::uint64_t some = 0; some < std::uint64_t{1} << unheard.size(); ++some) {
    std::set<std::string> kinds;
    for (const std::size_t place : told) kinds.insert(experts_[place].kind);
    for (std::size_t i = 0; i < unheard.size(); ++i) {
      if ((some >> i & 1) != 0) kinds.insert(unheard[i]);
    }
    if (std::optional<Places> way = Walk(told, elems, kinds)) ways.insert(*std::move(way));
  }
  if (ways.size() != 1) {
    SW_TRY(Refuse(group, std::to_string(ways.size()) +
                             " selections of the following parameters have the group's " +
                             std::to_string(elems) + " elements"));
  }
  return *ways.begin();
}

/// Checks the slices against the formula of old releases. Their partitions
/// have the size that they would have if all ranks shared the group.
Status Completion::CheckSlices(const Spread& spread, std::uint64_t elems,
                               const std::vector<NamedShape>& params) const {
  SW_TRY_ASSIGN(const std::uint64_t partition, PartitionElems(elems, spread.ranks));
  const std::uint64_t claimed = partition * spread.ranks / reading_.ranks;
  for (std::uint64_t edp = 0; edp < spread.ranks; ++edp) {
    const std::uint64_t first = edp * claimed;
    const std::uint64_t last = first + claimed;
    std::vector<Slice> expected;
    std::uint64_t at = 0;
    for (const NamedShape& param : params) {
      const std::uint64_t from = std::max(at, first);
      const std::uint64_t to = std::min(at + param.elems, last);
      if (from < to) expected.push_back({param.name, from - first, to - from});
      at += param.elems;
    }
    if (!SameSlices(expected, GroupAt(reading_, spread, RankOf(reading_, spread, 0, edp)).slices)) {
      SW_TRY(Refuse(spread.group, "the mappings of rank " +
                                      std::to_string(RankOf(reading_, spread, 0, edp)) +
                                      " do not fit its sizes"));
    }
  }
  return {};
}

Result<std::vector<std::string>> Completion::Complete(
    std::vector<std::vector<NamedShape>>* groups) {
  std::vector<std::string> inferred(groups->size());
  taken_.assign(experts_.size(), false);
  for (const ExpertParam& expert : experts_) unheard_.insert(expert.kind);
  for (const std::vector<NamedShape>& told : *groups) {
    for (const NamedShape& param : told) {
      const auto at = place_.find(param.name);
      if (at == place_.end()) continue;
      taken_[at->second] = true;
      unheard_.erase(experts_[at->second].kind);
    }
  }
  for (std::size_t g = 0; g < groups->size(); ++g) {
    const Spread spread = SpreadOf(reading_, mp_, g);
    std::vector<NamedShape>& params = (*groups)[g];
    if (spread.ep == 1) continue;
    SW_TRY_ASSIGN(const std::uint64_t elems, MasterElems(reading_, spread));
    if (SumElems(params) >= elems) continue;
    if (reading_.topology.bf16_optimizer) {
      SW_TRY(Refuse(g, "BF16_Optimizer does not record the number of elements of the group"));
    }
    SW_TRY_ASSIGN(const Places told, PlacesOf(g, params));
    SW_TRY_ASSIGN(const Places chosen, Choose(g, told, elems));
    params.clear();
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const ExpertParam& expert = experts_[chosen[i]];
      taken_[chosen[i]] = true;
      params.push_back({expert.name, expert.shape, expert.elems});
    }
    SW_TRY(CheckSlices(spread, elems, params));
    inferred[g] =
        "DeepSpeed before 0.14.5 records the positions of only some of the experts' parameters";
  }
  return inferred;
}

/// Changes the parameters of a group from their original order to that of the buffer.
void Reorder(std::uint64_t ranks, std::vector<NamedShape>* params) {
  std::vector<NamedShape> out;
  for (const std::uint32_t i : RoundRobinOrder(params->size(), ranks)) {
    out.push_back(std::move((*params)[i]));
  }
  *params = std::move(out);
}

/// Handles other gaps in the information on groups: their order
/// under round robin, or, without ds_config, if round robin was used.
void OrderGroups(const Reading& reading, std::uint64_t mp, Model* model) {
  for (std::size_t g = 0; g < model->shapes.size(); ++g) {
    const Spread spread = SpreadOf(reading, mp, g);
    if (spread.ranks == 1 && spread.ep == 1) continue;
    std::string& why = model->inferred[g];
    if (reading.round_robin) {
      Reorder(spread.ranks, &model->shapes[g]);
      if (why.empty()) why = "round robin reordered them, and param_shapes does not record how";
    } else if (why.empty() && reading.config == nullptr && !reading.topology.bf16_optimizer) {
      why =
          "ds_config is not in the files, so it is unknown whether round robin or data before "
          "expert parallelism ordered them";
    }
  }
}

/// Returns the storage of a tensor that fills it and has a checksum. FindCopies compares these.
const torch_pt::Document::StorageRef* WholeStorage(const Document& document, const Node* node) {
  const pickle::Tensor& tensor = *node->tensor;
  const torch_pt::Document::StorageRef& storage = document.storages[tensor.storage];
  const bool whole = tensor.offset == 0 && storage.crc32 &&
                     storage.bytes == Elems(tensor.shape) * ItemSize(tensor.dtype);
  return whole ? &storage : nullptr;
}

/// Finds tied weights that neither shared_params nor a common storage shows,
/// because releases since 0.17 copy each tensor before they save it. Treats
/// a matrix as tied if it has the shape and checksum of a trained one.
void FindCopies(Model* model) {
  if (model->document.root->Find("shared_params") != nullptr) return;
  std::map<std::tuple<std::uint32_t, DType, Shape>, std::string> trained;
  for (const bool holders_turn : {true, false}) {
    for (std::size_t i = 0; i < model->module->entry_count(); ++i) {
      const Node* key = model->module->key(i);
      const Node* node = model->module->value(i);
      if (!key->is_string() || !node->is_tensor() || node->tensor->shape.size() < 2) continue;
      if (model->trainable.contains(key->text) != holders_turn) continue;
      const auto* storage = WholeStorage(model->document, node);
      if (storage == nullptr || storage->bytes == 0) continue;
      const std::tuple print(*storage->crc32, node->tensor->dtype, node->tensor->shape);
      if (holders_turn) {
        trained.emplace(print, key->text);
      } else if (const auto holder = trained.find(print); holder != trained.end()) {
        model->ties.aliases.emplace_back(key->text, holder->second);
      }
    }
  }
}

/// Decides between frozen parameters and buffers for tensors that are neither
/// trained nor tied, since no file does. Treats weights and biases as parameters.
void GuessBuffers(Reading* reading, std::uint64_t mp, Model* model) {
  std::set<std::pair<std::uint32_t, std::uint64_t>> trained;  // storage, offset
  std::unordered_set<std::string> tied;
  for (const auto& [alias, holder] : model->ties.aliases) tied.insert(alias);
  std::size_t guessed = 0;
  for (const bool trained_turn : {true, false}) {
    for (std::size_t i = 0; i < model->module->entry_count(); ++i) {
      const Node* key = model->module->key(i);
      const Node* node = model->module->value(i);
      if (!key->is_string() || !node->is_tensor()) continue;
      const std::pair place(node->tensor->storage, node->tensor->offset);
      const std::string& name = key->text;
      if (model->trainable.contains(name)) {
        trained.insert(place);
        continue;
      }
      if (trained_turn || tied.contains(name)) continue;
      if (trained.contains(place) && Elems(node->tensor->shape) > 0) continue;
      ++guessed;
      const bool parameter = (name.ends_with("weight") || name.ends_with("bias")) &&
                             CanConvert(node->tensor->dtype, DType::kF32);
      if (!parameter) model->buffers.insert(name);
    }
  }
  if (guessed == 0 || mp > 0) return;
  reading->out.warnings.push_back(
      StrCat(reading->file_name(model->file), ": ", guessed,
             " tensors are not trained, and there is no buffer_names to distinguish frozen "
             "parameters from buffers: those named weight or bias are taken as frozen parameters"));
}

/// Checks that the ranks record at least some positions of parameters.
Status CheckTold(const Reading& reading, std::uint64_t mp) {
  const std::vector<Shard>& shards = reading.shards[mp];
  bool told = false;
  bool held = false;
  for (const Shard& shard : shards) {
    for (const ShardGroup& group : shard.groups) {
      told = told || !group.slices.empty();
      held = held || group.fp32.elems > 0;
    }
  }
  if (told || !held) return {};
  return Fail(Errc::kUnsupported, reading.file_name(shards.front().file),
              ": neither param_shapes nor param_slice_mappings record the positions of parameters: "
              "load and save the checkpoint with a newer DeepSpeed release");
}

/// Checks that the ranks in an expert group's name share it. BF16_Optimizer
/// before 0.14.1 spreads it over all ranks and thereby mixes different experts.
Status CheckExpertGroup(const Reading& reading, const Spread& spread) {
  const Node* groups = FindPath(reading.state.optimizer[spread.mp].document.root,
                                {"base_optimizer_state", "param_groups"});
  if (groups == nullptr || !groups->is_list() || spread.group >= groups->items.size()) return {};
  const Node* name = groups->items[spread.group]->Find("name");
  constexpr std::string_view kName = "ep_size_";
  if (name == nullptr || !name->is_string() || !name->text.starts_with(kName)) return {};
  if (name->text.substr(kName.size()) == std::to_string(spread.ep)) return {};
  return Fail(Errc::kUnsupported, GroupText(reading, spread), ": \"", name->text,
              "\", but it is partitioned as for expert parallelism of ", spread.ep,
              ": BF16_Optimizer before 0.14.1 mixes the experts of different ranks");
}

}  // namespace

Status NameParams(Reading* reading, std::uint64_t mp) {
  Model& model = reading->models[mp];
  SW_TRY(CheckTold(*reading, mp));
  for (std::size_t g = 0; g < reading->shards[mp].front().groups.size(); ++g) {
    const Spread spread = SpreadOf(*reading, mp, g);
    SW_TRY(CheckExpertGroup(*reading, spread));
    SW_TRY(CheckExpertRanks(*reading, spread));
    SW_TRY_ASSIGN(std::vector<NamedShape> told, ToldParams(*reading, spread));
    model.shapes.push_back(std::move(told));
  }
  SW_TRY_ASSIGN(const std::vector<ExpertParam> experts, ListExperts(reading, mp));
  SW_TRY_ASSIGN(model.inferred, Completion(*reading, mp, experts).Complete(&model.shapes));
  OrderGroups(*reading, mp, &model);
  for (const std::vector<NamedShape>& group : model.shapes) {
    for (const NamedShape& param : group) {
      if (model.trainable.insert(param.name).second) continue;
      return Fail(Errc::kBadInput, reading->file_name(reading->shards[mp].front().file),
                  ": param_slice_mappings: \"", param.name, "\" is in two groups");
    }
  }
  if (model.module != nullptr && !model.has_buffer_names) {
    FindCopies(&model);
    GuessBuffers(reading, mp, &model);
  }
  return {};
}

}  // namespace shardwright::checkpoints::reader
