// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>

#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::reader {
namespace {

constexpr std::string_view kTied = "tied_modules.";

/// Prefix of a layer's tensors in the module: "7." or "tied_modules.embed.".
struct LayerName {
  std::string prefix;
  bool tied = false;
  std::vector<std::uint64_t> stages;  ///< stages with such names, ascending; empty: not known
};

/// An open layer file.
struct Layer {
  std::uint64_t index = 0;
  std::vector<std::uint32_t> files;  ///< by tp
  std::vector<Document> documents;   ///< by tp
};

/// Parses the tensor-parallel rank in a layer file's axes ("model_01").
Result<std::uint64_t> RankOfAxes(const Reading& reading, std::uint32_t file,
                                 const std::string& axes) {
  if (axes.empty()) return std::uint64_t{0};
  const std::size_t cut = axes.rfind('_');
  std::optional<std::uint64_t> rank;
  if (cut != std::string::npos) rank = NumberIn<std::uint64_t>(axes.substr(cut + 1));
  if (!rank || axes.find('-') != std::string::npos) {
    return Fail(Errc::kUnsupported, reading.source.files[file].path,
                ": one axis besides data and pipe expected, found ", axes);
  }
  return *rank;
}

Result<Layer> OpenLayer(const Reading& reading, std::uint64_t index,
                        const std::map<std::string, std::uint32_t>& files) {
  const std::uint64_t tp = reading.topology.tp;
  Layer out;
  out.index = index;
  if (files.size() != tp) {
    return Fail(Errc::kNotFound, reading.source.tag, ": layer ", index, ": ", tp,
                " files expected, one per tensor-parallel rank, found ", files.size(), " (",
                reading.file_name(files.begin()->second), ")");
  }
  out.files.assign(tp, ~std::uint32_t{0});
  for (const auto& [axes, file] : files) {
    SW_TRY_ASSIGN(const std::uint64_t rank, RankOfAxes(reading, file, axes));
    if (rank >= tp || out.files[rank] != ~std::uint32_t{0}) {
      return Fail(Errc::kBadInput, reading.source.files[file].path,
                  ": one file expected for each of ", tp, " tensor-parallel ranks, found rank ",
                  rank, " again or out of range");
    }
    out.files[rank] = file;
  }
  for (const std::uint32_t file : out.files) {
    SW_TRY_ASSIGN(Document document, Open(reading, file));
    out.documents.push_back(std::move(document));
  }
  return out;
}

/// Names of optimized parameters and buffers in the stages' model states.
class StageNames {
 public:
  explicit StageNames(const Reading& reading) {
    for (std::uint64_t stage = 0; stage < reading.topology.pp; ++stage) {
      const Model& model = reading.models[reading.mp_of(stage, 0)];
      for (const std::string& name : model.trainable) Add(name, stage);
      for (const std::string& name : model.buffers) Add(name, stage);
    }
  }

  /// Returns the module to which a layer file's keys belong.
  Result<LayerName> Find(std::uint64_t layer, const Node* dict) const {
    LayerName plain{std::to_string(layer) + ".", false, {}};
    if (const auto own = stages_.find(plain.prefix); own != stages_.end()) {
      plain.stages.assign(own->second.begin(), own->second.end());
      return plain;
    }
    std::vector<LayerName> found;
    for (const auto& [prefix, stages] : stages_) {
      if (!prefix.starts_with(kTied) || !AllIn(prefix, dict)) continue;
      found.push_back({prefix, true, {stages.begin(), stages.end()}});
    }
    if (found.size() > 1) {
      return Fail(Errc::kUnsupported, "layer ", layer, " may be ", found[0].prefix, " or ",
                  found[1].prefix, ": the checkpoint does not record which");
    }
    return found.empty() ? plain : found.front();
  }

 private:
  void Add(const std::string& name, std::uint64_t stage) {
    const std::size_t from = name.starts_with(kTied) ? kTied.size() : 0;
    const std::size_t dot = name.find('.', from);
    if (dot == std::string::npos) return;
    const std::string prefix = name.substr(0, dot + 1);
    stages_[prefix].insert(stage);
    names_[prefix].insert(name.substr(dot + 1));
  }

  bool AllIn(const std::string& prefix, const Node* dict) const {
    const std::set<std::string>& names = names_.at(prefix);
    return std::all_of(names.begin(), names.end(),
                       [&](const std::string& name) { return dict->Find(name) != nullptr; });
  }

  std::map<std::string, std::set<std::uint64_t>> stages_;
  std::map<std::string, std::set<std::string>> names_;
};

/// Adds a layer's tensors as parameters of a stage.
Status AddLayer(Reading* reading, const Layer& layer, const LayerName& name, std::uint64_t stage) {
  for (std::uint64_t tp = 0; tp < reading->topology.tp; ++tp) {
    const Node* dict = layer.documents[tp].root;
    const std::uint64_t mp = reading->mp_of(stage, tp);
    const Model& model = reading->models[mp];
    const std::unordered_set<std::string> entries = EntriesOf(*reading, mp, dict, name.prefix);
    OpaqueReader opaque(reading, mp, layer.files[tp], layer.documents[tp]);
    for (std::size_t i = 0; i < dict->entry_count(); ++i) {
      SW_TRY_ASSIGN(const std::string_view key, pickle::AsString(dict->key(i)));
      const std::string full = name.prefix + std::string(key);
      if (!dict->value(i)->is_tensor()) {
        OpaqueEntry& entry = opaque.Add(full, dict->value(i));
        if (tp == 0) entry.layers.push_back(static_cast<std::uint32_t>(layer.index));
        continue;
      }
      opaque.SetAfter(full);
      SW_TRY_ASSIGN(std::vector<PlacedPart> parts,
                    reading->map.PartsOf(layer.files[tp], layer.documents[tp], dict->value(i),
                                         "parameter " + Quoted(full)));
      const pickle::Tensor& tensor = *dict->value(i)->tensor;
      const bool entry = entries.contains(full);
      ParamKind kind = ParamKind::kFrozen;
      if (model.trainable.contains(full) || !reading->knows_trained(model)) {
        kind = ParamKind::kTrainable;
      }
      if (model.buffers.contains(full) || entry) kind = ParamKind::kBuffer;
      SW_TRY_ASSIGN(const std::uint32_t param,
                    AddParam(reading, full, kind, mp, tensor.shape, tensor.dtype, layer.files[tp]));
      reading->out.params[param].entry = entry;
      AddWeight(reading, param, mp, std::move(parts));
      if (tp > 0) continue;
      const auto index = static_cast<std::uint32_t>(layer.index);
      Param& out = reading->out.params[param];
      if (!out.layer) out.layer = index;
      if (name.tied) out.tied_layers.push_back(index);
    }
  }
  return {};
}

/// Guesses the position of tied layers without a file, which use another function of a tied
/// module. Their stage is known. Their index is assumed to follow the stage's last layer. The files
/// of a single stage do not show whether there is one. Megatron-DeepSpeed always has one, the
/// output layer, which follows the last layer with a file.
void GuessTiedLayers(Reading* reading) {
  const Topology& to = reading->topology;
  const bool megatron = MegatronArgs(reading->models.front().document.root) != nullptr;
  bool guessed = false;
  for (std::uint64_t stage = 0; stage < to.pp; ++stage) {
    if (to.stages[stage].empty()) continue;
    const std::uint32_t after = to.stages[stage].back() + 1;
    for (const std::string& name : reading->models[reading->mp_of(stage, 0)].trainable) {
      const auto at = reading->by_name.find(name);
      if (!name.starts_with(kTied) || at == reading->by_name.end()) continue;
      std::vector<std::uint32_t>& layers = reading->out.params[at->second].tied_layers;
      const std::vector<std::uint32_t>& own = to.stages[stage];
      const bool filed = std::any_of(layers.begin(), layers.end(), [&](std::uint32_t layer) {
        return std::find(own.begin(), own.end(), layer) != own.end();
      });
      // DeepSpeed keeps the tied weight equal. Copies of the embedding's other parameters, like the
      // positions, are not trained in the output layer, which does not use them.
      const bool unused = megatron && !filed && !name.ends_with("word_embeddings.weight");
      if (unused) reading->params[at->second].unused_copies = true;
      const bool lacks_output = megatron && to.pp == 1 && layers.size() == 1;
      if (filed && !lacks_output) continue;
      layers.push_back(after);
      guessed = true;
    }
  }
  if (guessed && !megatron) {
    reading->out.warnings.push_back(
        "a tied layer has no file of its own: it is assumed to follow the last layer of its stage");
  }
}

/// Checks that every layer in a stage's names has a file.
Status CheckLayers(const Reading& reading) {
  for (std::uint64_t stage = 0; stage < reading.topology.pp; ++stage) {
    const Model& model = reading.models[reading.mp_of(stage, 0)];
    std::set<std::string> missing;
    for (const std::string& name : model.trainable) {
      std::uint64_t layer = 0;
      const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
      if (error != std::errc() || *end != '.' || reading.grid.layers.contains(layer)) continue;
      const std::string number = std::to_string(layer);
      const std::string stem = (number.size() < 2 ? "layer_0" : "layer_") + number + "-";
      for (const auto& [axes, file] : reading.grid.layers.begin()->second) {
        missing.insert(std::string(stem)
                           .append(axes)
                           .append(axes.empty() ? "" : "-")
                           .append("model_states.pt"));
      }
    }
    if (!missing.empty()) {
      return Missing(reading, std::vector<std::string>(missing.begin(), missing.end()));
    }
  }
  return {};
}

}  // namespace

Status ReadLayers(Reading* reading) {
  SW_TRY(CheckLayers(*reading));
  const StageNames names(*reading);
  Topology& to = reading->topology;
  std::uint64_t stage = 0;  // stage of the previous layer: stages have consecutive layers
  for (const auto& [index, files] : reading->grid.layers) {
    SW_TRY_ASSIGN(const Layer layer, OpenLayer(*reading, index, files));
    SW_TRY_ASSIGN(const LayerName name, names.Find(index, layer.documents[0].root));
    const auto next = std::lower_bound(name.stages.begin(), name.stages.end(), stage);
    if (next != name.stages.end()) {
      stage = *next;
    } else if (!name.stages.empty()) {
      return Fail(Errc::kBadInput, reading->file_name(layer.files[0]), ": layer ", index,
                  " belongs to stage ", name.stages.back(),
                  ", but an earlier layer belongs to stage ", stage);
    }
    if (index > 0xffff'ffff) {
      return Fail(Errc::kBadInput, reading->file_name(layer.files[0]), ": layer number too large");
    }
    to.stages[stage].push_back(static_cast<std::uint32_t>(index));
    SW_TRY(AddLayer(reading, layer, name, stage));
  }
  GuessTiedLayers(reading);
  return {};
}

}  // namespace shardwright::checkpoints::reader
