// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>

#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::reader {
namespace {

bool IsFilled(const Node* node) {
  return node != nullptr && !node->is_none() && !(node->is_list() && node->items.empty());
}

Status CheckSupported(const Reading& reading, std::uint32_t file, const Node* root) {
  for (const char* key : {"ds_autoep_layers", "autoep_layers", "folding"}) {
    if (IsFilled(root->Find(key))) {
      return Fail(Errc::kUnsupported, reading.source.files[file].path, ": written with AutoEP (",
                  key, "), which is not supported");
    }
  }
  return {};
}

Status ReadShapes(const Node* root, Model* out) {
  const Node* shapes = root->Find("param_shapes");
  if (shapes == nullptr || shapes->is_none()) return {};
  out->has_shapes = true;
  // The oldest files contain one dict for a single group.
  std::vector<const Node*> groups{shapes};
  if (shapes->is_list()) groups = shapes->items;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    auto group = ShapesOf(groups[g]);
    if (!group) return Within("param_shapes[" + std::to_string(g) + "]", std::move(group).error());
    for (const NamedShape& param : *group) {
      if (!out->trainable.insert(param.name).second) {
        return Fail(Errc::kBadInput, "param_shapes: \"", param.name, "\" appears twice");
      }
    }
    out->shapes.push_back(*std::move(group));
  }
  return {};
}

Status ReadContents(const Reading& reading, Model* out) {
  const Node* root = out->document.root;
  SW_TRY(CheckSupported(reading, out->file, root));
  const Node* module = root->Find("module");
  if (module == nullptr) module = root->Find("model");
  if (module != nullptr && module->is_dict()) out->module = module;
  if (out->module == nullptr && reading.grid.layers.empty()) {
    return Fail(Errc::kBadInput, "module: dict expected, found ",
                (module == nullptr ? "nothing" : pickle::Describe(module)));
  }
  SW_TRY(ReadShapes(root, out));
  if (const Node* frozen = root->Find("frozen_param_shapes");
      frozen != nullptr && !frozen->is_none()) {
    auto shapes = ShapesOf(frozen);
    if (!shapes) return Within("frozen_param_shapes", std::move(shapes).error());
    out->frozen = *std::move(shapes);
    out->lists_frozen = true;
  }
  const auto trainable = [&](const std::string& name) { return out->trainable.contains(name); };
  SW_TRY_ASSIGN(out->ties, TiesOf(root, out->module, trainable, out->lists_frozen));
  if (const Node* buffers = root->Find("buffer_names"); buffers != nullptr && buffers->is_list()) {
    out->has_buffer_names = true;
    for (const Node* name : buffers->items) {
      SW_TRY_ASSIGN(const std::string_view text, pickle::AsString(name));
      out->buffers.emplace(text);
    }
  }
  return {};
}

/// Checks the values that must be equal in the model files of all ranks.
Status CheckAgreement(const Reading& reading, const Node* first, std::uint32_t first_file,
                      const Node* other, std::uint32_t other_file) {
  for (const char* key : {"global_steps", "global_samples", "dp_world_size", "mp_world_size"}) {
    const Node* a = first->Find(key);
    const Node* b = other->Find(key);
    if (a == nullptr && b == nullptr) continue;
    auto x = pickle::AsCount(a);
    auto y = pickle::AsCount(b);
    if (x && y && *x == *y) continue;
    const auto shown = [](const Result<std::uint64_t>& value, const Node* node) {
      return value ? std::to_string(*value) : (node == nullptr ? "absent" : pickle::Describe(node));
    };
    return Fail(Errc::kBadInput, key, " is ", shown(x, a), " in ", reading.file_name(first_file),
                ", ", shown(y, b), " in ", reading.file_name(other_file),
                ": the files are not from one checkpoint");
  }
  return {};
}

/// Stage 3: finds the places of a rank's pieces of frozen parameters.
Status ReadFrozenShares(Reading* reading, std::uint64_t mp, std::uint64_t rank, std::uint32_t file,
                        const Document& document) {
  const Model& model = reading->models[mp];
  const Node* fragments = document.root->Find("frozen_param_fragments");
  const std::size_t count =
      fragments != nullptr && fragments->is_dict() ? fragments->entry_count() : 0;
  if (count > model.frozen.size()) {
    return Fail(Errc::kBadInput, reading->file_name(file),
                ": frozen_param_fragments: ", model.frozen.size(),
                " frozen parameters expected, as in frozen_param_shapes of ",
                reading->file_name(model.file), ", found ", count);
  }
  for (std::size_t i = 0; i < model.frozen.size(); ++i) {
    const NamedShape& param = model.frozen[i];
    // Both dicts have the same order. A search for each name would take quadratic time.
    const bool in_order = i < count && fragments->key(i)->text == param.name;
    const Node* node = in_order ? fragments->value(i) : FindPath(fragments, {param.name});
    const std::string what = "frozen parameter \"" + param.name + "\"";
    if (node == nullptr) {
      return Fail(Errc::kBadInput, reading->file_name(file), ": ", what,
                  ": frozen_param_fragments does not hold it");
    }
    SW_TRY_ASSIGN(Place place, reading->map.PlaceOf(file, document, node, what));
    std::vector<Place>& shares = reading->frozen_shares[mp][param.name];
    shares.resize(reading->ranks);
    shares[rank] = place;
  }
  return {};
}

/// Returns the names of a module's entries that are not tensors and differ from another rank's.
std::vector<std::string> OwnEntries(const Document& ours, const Document& theirs) {
  std::vector<std::string> own;
  const Node* module = ours.root->Find("module");
  std::unordered_map<std::string_view, const Node*> others;
  if (const Node* other = theirs.root->Find("module"); other != nullptr && other->is_dict()) {
    for (std::size_t i = 0; i < other->entry_count(); ++i) {
      if (other->key(i)->is_string()) others.emplace(other->key(i)->text, other->value(i));
    }
  }
  const auto same = [&](const pickle::Tensor& a, const pickle::Tensor& b) {
    const Document::StorageRef& x = ours.storages[a.storage];
    const Document::StorageRef& y = theirs.storages[b.storage];
    return a.dtype == b.dtype && a.shape == b.shape && a.strides == b.strides &&
           a.offset == b.offset && x.bytes == y.bytes && x.crc32 == y.crc32;
  };
  for (std::size_t i = 0; module != nullptr && i < module->entry_count(); ++i) {
    const Node* value = module->value(i);
    if (value->is_tensor() || value->is_none() || !module->key(i)->is_string()) continue;
    const std::string& name = module->key(i)->text;
    const auto other = others.find(name);
    if (other == others.end() || !SameValues(value, other->second, same)) own.push_back(name);
  }
  return own;
}

/// Returns true if a module has an entry that is neither a tensor nor None.
bool HasOpaque(const Node* module) {
  for (std::size_t i = 0; i < module->entry_count(); ++i) {
    if (!module->value(i)->is_tensor() && !module->value(i)->is_none()) return true;
  }
  return false;
}

/// Stage 3: reads the model files of the other ranks. Checks that they agree, finds
/// the pieces of frozen parameters, and reports client state that no conversion keeps.
Status ReadOtherRanks(Reading* reading, std::uint64_t mp) {
  const Model& model = reading->models[mp];
  SW_TRY(ReadFrozenShares(reading, mp, 0, model.file, model.document));
  const std::string& first = reading->source.files[model.file].containers.front().metadata->header;
  std::set<std::string> own;
  std::set<std::string> entries;
  const auto compare = [&](const Document& other) {
    for (std::string& key : OwnClientState(model.document.root, other.root)) {
      own.insert(std::move(key));
    }
    for (std::string& key : OwnEntries(model.document, other)) entries.insert(std::move(key));
  };
  const bool opaque = model.module != nullptr && HasOpaque(model.module);
  bool alike = false;
  for (std::uint64_t rank = 1; rank < reading->ranks; ++rank) {
    const std::uint32_t file = reading->grid.model_zero3.at({mp, rank});
    // Most ranks differ only in payloads, so there is nothing else to compare.
    if (model.frozen.empty() && !opaque &&
        reading->source.files[file].containers.front().metadata->header == first) {
      if (!alike) compare(model.document);
      alike = true;
      continue;
    }
    SW_TRY_ASSIGN(const Document document, Open(*reading, file));
    SW_TRY(CheckAgreement(*reading, model.document.root, model.file, document.root, file));
    SW_TRY(ReadFrozenShares(reading, mp, rank, file, document));
    compare(document);
  }
  if (!own.empty()) {
    reading->out.left_out.push_back(
        StrCat("rank-specific client state, except that of ", reading->file_name(model.file), ": ",
               Joined(std::vector<std::string>(own.begin(), own.end()), ", ")));
  }
  if (!entries.empty()) {
    reading->out.left_out.push_back(StrCat("rank-specific state dict entries, except those of ",
                                           reading->file_name(model.file), ": ",
                                           FirstFew({entries.begin(), entries.end()})));
  }
  return {};
}

bool IsOn(const Node* flag) {
  return flag != nullptr && flag->kind == pickle::Kind::kBool && flag->integer != 0;
}

/// Returns true if a text like "0.12.6+abc" is a release before `major`.`minor`.
bool IsBefore(const Node* version, std::uint32_t major, std::uint32_t minor) {
  if (version == nullptr || !version->is_string()) return false;
  const char* at = version->text.data();
  const char* const end = at + version->text.size();
  std::uint32_t found[2] = {0, 0};
  for (std::uint32_t& number : found) {
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc()) return false;
    at = next != end ? next + 1 : next;
  }
  return found[0] < major || (found[0] == major && found[1] < minor);
}

}  // namespace

Passed Keep(Reading* reading, std::uint32_t file, const Document& document) {
  Passed out;
  out.document = document;
  for (std::uint32_t i = 0; i < document.storages.size(); ++i) {
    out.members.push_back(reading->map.MemberOf(file, document, i));
  }
  return out;
}

Status ReadModels(Reading* reading) {
  reading->frozen_shares.resize(reading->mp_ranks);
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    Model model;
    model.file =
        reading->grid.zero3() ? reading->grid.model_zero3.at({mp, 0}) : reading->grid.model.at(mp);
    SW_TRY_ASSIGN(model.document, Open(*reading, model.file));
    if (Status read = ReadContents(*reading, &model); !read) {
      return Within(reading->file_name(model.file), std::move(read).error());
    }
    if (mp > 0) {
      const Model& first = reading->models.front();
      SW_TRY(CheckAgreement(*reading, first.document.root, first.file, model.document.root,
                            model.file));
    }
    reading->state.model_states.push_back(Keep(reading, model.file, model.document));
    reading->models.push_back(std::move(model));
    if (reading->grid.zero3()) SW_TRY(ReadOtherRanks(reading, mp));
  }
  // Messages about shards name the configured optimizer. ReadConfig reads the other values.
  const Node* config = reading->models.front().document.root->Find("ds_config");
  if (config != nullptr && config->is_dict()) reading->config = config;
  return {};
}

void ReadConfig(Reading* reading) {
  pickle::Arena& arena = *reading->out.arena;
  for (std::size_t mp = 0; mp < reading->shard_roots.size(); ++mp) {
    const Node*& root = reading->state.model_states[mp].document.root;
    for (const char* key : {"ds_config", "ds_version"}) {
      const Node* said = reading->shard_roots[mp]->Find(key);
      if (said == nullptr || root->Find(key) != nullptr) continue;
      Node* filled = pickle::CopyDict(arena, root);
      pickle::Set(arena, filled, key, said);
      root = filled;
    }
  }
  const Node* config = reading->state.model_states.front().document.root->Find("ds_config");
  if (config != nullptr && config->is_dict()) reading->config = config;
  reading->data_first = IsOn(FindPath(reading->config, {"use_data_before_expert_parallelism"}));
  const Node* asked = FindPath(reading->config, {"zero_optimization", "round_robin_gradients"});
  if (!IsOn(asked) || reading->shards.empty()) return;
  const Shard& shard = reading->shards.front().front();
  reading->round_robin = !shard.bf16_optimizer;
  if (shard.stage == 1 && !shard.bf16_optimizer &&
      IsBefore(reading->state.model_states.front().document.root->Find("ds_version"), 0, 13)) {
    reading->round_robin = false;
    reading->out.warnings.push_back(
        reading->file_name(shard.file) +
        ": ds_config sets round_robin_gradients, which DeepSpeed before 0.13 ignores at stage 1 "
        "and newer releases do not: to resume in a newer release, convert with round_robin=true");
  }
}

}  // namespace shardwright::checkpoints::reader
