// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/read/dist_internal.h"
#include "checkpoints/megatron/run_config.h"

// Infers a model from the keys of the index: its lists of layers and, if the common
// state has no arguments of a run, the values of these arguments. NeMo 2.0, Megatron
// Bridge and other programs that call Megatron-Core's save do not store arguments.

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

const SourceFile* SourceFileOf(const SourceSet& source, std::string_view name) {
  const auto found = std::find_if(source.files.begin(), source.files.end(),
                                  [&](const SourceFile& file) { return file.name == name; });
  return found == source.files.end() || found->containers.empty() ? nullptr : &*found;
}

/// Reads a count that a file of one dict stores as a number or as a one-element tensor.
std::optional<std::uint64_t> StoredCount(const SourceFile& file, std::string_view key) {
  const Container& container = file.containers.front();
  const auto document = torch_pt::Parse(*container.metadata);
  if (!document || !document->root->is_dict()) return std::nullopt;
  const Node* node = document->root->Find(key);
  if (node == nullptr) return std::nullopt;
  if (const auto count = pickle::AsCount(node)) return *count;
  const Result<Scalar> scalar = ScalarOf(container, *document, node, file.name);
  const std::optional<double> number = scalar ? NumberOf(*scalar) : std::nullopt;
  if (!number || *number < 0 || *number > 1e15) return std::nullopt;
  return static_cast<std::uint64_t>(*number);
}

}  // namespace

/// Checks that the names and order of every list of layers are known.
Status Dist::CheckLists() {
  if (notes_) return {};
  const dcp::Entry* encoder = nullptr;
  bool decoder = false;
  for (const dcp::Entry* entry : weights_) {
    const std::string_view name = BareName(*entry);
    if (const std::string_view list = OtherListOf(name); !list.empty()) {
      return Fail(Errc::kUnsupported, "\"", entry->name, "\": layer list \"", list,
                  "\" is not supported: only models with one decoder or encoder and multi-token "
                  "prediction layers are converted: save the parts of the model as separate "
                  "checkpoints");
    }
    if (name.starts_with(kEncoderLayers)) encoder = entry;
    decoder = decoder || name.starts_with(kDecoderLayers);
    args_.hybrid = args_.hybrid || name.find(".mixer.") != std::string_view::npos;
    if (const auto depth = ParseName(name).depth) args_.mtp = std::max(args_.mtp, *depth + 1);
  }
  if (encoder == nullptr || !decoder) return {};
  return Fail(Errc::kUnsupported, "\"", encoder->name,
              "\": models with an encoder and a decoder are not supported: save them as separate "
              "checkpoints");
}

/// Returns the name of the program that wrote a checkpoint without arguments.
std::string Dist::Program() const {
  if (common_.value->Find("pytorch-lightning_version") != nullptr) return "NeMo";
  if (SourceFileOf(source_, kRunConfig) != nullptr) return "Megatron Bridge";
  return "a program other than Megatron-LM";
}

/// Counts layers and experts by keys and shapes.
void Dist::CountByKeys() {
  std::uint64_t numbered = 0;
  args_.layers = 0;
  args_.experts = 0;
  for (const dcp::Entry* entry : weights_) {
    const Key key = ParseKey(BareName(*entry), args_);
    if (entry->shape.size() < key.axes()) continue;  // a later check fails
    if (key.layers) args_.layers = std::max(args_.layers, entry->shape[0]);
    if (key.name.layer) numbered = std::max(numbered, *key.name.layer + 1);
    if (key.experts) args_.experts = entry->shape[key.axes() - 1];
    const std::string& rest = key.name.rest;
    args_.qk_layernorm = args_.qk_layernorm || rest.starts_with("self_attention.q_layernorm.");
    args_.latent = args_.latent || rest.starts_with("self_attention.linear_kv_down_proj.");
    args_.untied = args_.untied || rest == kOutput;
    if (rest == "decoder.final_layernorm.weight" && args_.normalization.empty()) {
      args_.normalization = "RMSNorm";
    }
    if (rest == "decoder.final_layernorm.bias") args_.normalization = "LayerNorm";
    if (rest.starts_with("embedding.position_embeddings.")) args_.positions = "learned_absolute";
    if (rest == kEmbedding) args_.dtype = entry->dtype;
  }
  args_.layers_differ = args_.layers == 0 && numbered > 0;
  args_.layers = std::max(args_.layers, numbered);
}

/// Infers the values of the arguments.
Status Dist::InferArgs() {
  const std::string program = Program();
  std::map<std::string, std::string> scalars;
  std::string config;
  for (const std::string_view name : {kRunConfig, kNemoConfig}) {
    const SourceFile* file = SourceFileOf(source_, name);
    if (file == nullptr) continue;
    scalars = YamlScalars(file->containers.front().metadata->header);
    config = name;
    break;
  }
  auto args = ArgsOfConfig(*collector_.out.arena, scalars);
  if (!args) return Within(config, args.error());
  args_ = *std::move(args);
  args_.transformer_engine = true;  // names are the keys
  CountByKeys();
  if (args_.layers == 0) {
    return Fail(Errc::kUnsupported, tag(), ": written by ", program,
                " without the arguments of the run, and without \"", kDecoderLayers,
                "\": only GPT models are read without arguments");
  }
  if (args_.positions.empty()) args_.positions = "rope";
  const std::string vocab = ModelValue(scalars, "vocab_size");
  if (!vocab.empty() && vocab.find_first_not_of("0123456789") == std::string::npos)
    told_vocab_ = vocab;
  if (const SourceFile* state = SourceFileOf(source_, kTrainState)) {
    args_.samples = StoredCount(*state, "consumed_train_samples");
  }
  collector_.out.warnings.push_back(
      tag() + ": written by " + program +
      " without the arguments of the run: model sizes are taken from keys and shapes" +
      (config.empty() ? "" : " and " + config) +
      (args_.heads > 0
           ? ""
           : ", attention heads are unknown (--map needs --map-sizes heads=N,kv_heads=N)"));
  return InferForm(program, !config.empty() && config == kRunConfig);
}

/// Infers the form of the optimizer's state from its keys. These programs
/// write defaults to the metadata, which may differ from the saved form.
/// \param ranks  true if the configuration has the numbers of ranks
Status Dist::InferForm(const std::string& program, bool ranks) {
  if (reads_ == Reads::kOnlyWeights) return {};
  const auto has = [&](std::string_view slot) {
    return std::any_of(states_.begin(), states_.end(),
                       [&](const auto& state) { return state.first == slot; });
  };
  if (!buckets_.empty()) {
    form_ = OptimizerForm::kDpReshardable;
    if (!ranks) {
      return Fail(Errc::kUnsupported, tag(), ": written by ", program,
                  " without the arguments of the run, which define the positions of parameters in "
                  "the buckets of the distributed optimizer: save once in the fully reshardable "
                  "form");
    }
  } else if (has("param")) {
    form_ = OptimizerForm::kFullyReshardable;
    for (const auto& [slot, entry] : states_) {
      // Flat ranges of local shards have one axis more than the weight, which counts the shards.
      const bool flat = slot == "param" && IsFlat(*entry);
      if (flat) form_ = OptimizerForm::kFullyShardedModelSpace;
    }
  }
  args_.distributed = form_ != OptimizerForm::kNone;
  return {};
}

/// NeMo stores a list of schedules. Moves a single schedule
/// in Megatron's form to the key that Megatron reads.
void Dist::TakeSchedule(Node* common) {
  const Node* list = common->Find("lr_schedulers");
  if (list == nullptr || !list->is_list() || list->items.size() != 1) return;
  const Node* one = list->items[0];
  const bool own =
      one->is_dict() && one->Find("num_steps") != nullptr && one->Find("lr_decay_style") != nullptr;
  if (!own || common->Find("opt_param_scheduler") != nullptr) return;
  Set(*collector_.out.arena, common, "opt_param_scheduler", one);
  pickle::Remove(common, "lr_schedulers");
}

bool Dist::IsFlat(const dcp::Entry& state) const {
  return std::any_of(weights_.begin(), weights_.end(), [&](const dcp::Entry* weight) {
    return state.name.ends_with("." + weight->name) &&
           state.shape.size() == weight->shape.size() + 1;
  });
}

}  // namespace shardwright::checkpoints::megatron
