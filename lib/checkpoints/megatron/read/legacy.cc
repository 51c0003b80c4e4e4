// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/read/legacy_internal.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::megatron {
using pickle::Node;

Status Legacy::ReadFiles() {
  std::map<std::string, RankFiles> folders;
  for (std::uint32_t file = 0; file < source_.files.size(); ++file) {
    const std::string& name = NameOf(file);
    const std::size_t slash = name.find('/');
    const auto parsed = ParseFolder(name.substr(0, slash));
    if (!parsed || slash == std::string::npos) {
      return Fail(Errc::kBadInput, name, ": not a file of a legacy checkpoint");
    }
    const bool model = name.substr(slash + 1) == kModelFile;
    if (!model && reads_ == Reads::kOnlyWeights) continue;
    if (name.substr(slash + 1).starts_with(kLayerWisePrefix)) {
      return Fail(Errc::kUnsupported, name, ": layer-wise optimizers are not supported");
    }
    RankFiles& rank = folders[name.substr(0, slash)];
    rank.folder = name.substr(0, slash);
    if (source_.files[file].containers.size() != 1) {
      return Fail(Errc::kBadInput, name, ": a torch.save file expected");
    }
    auto document = torch_pt::Parse(*source_.files[file].containers.front().metadata);
    if (!document) return Within(name, document.error());
    auto shared = std::make_shared<const torch_pt::Document>(*std::move(document));
    if (model) {
      rank.model = file;
      rank.document = std::move(shared);
    } else {
      rank.optimizer = file;
      rank.optimizer_document = std::move(shared);
    }
  }
  for (auto& [folder, rank] : folders) {
    if (rank.document == nullptr) {
      return Fail(Errc::kNotFound, folder, "/", kModelFile, " is missing");
    }
    if (!rank.document->root->is_dict()) {
      return Fail(Errc::kBadInput, NameOf(rank.model), ": dict expected, found ",
                  pickle::Describe(rank.document->root));
    }
    ranks_.push_back(std::move(rank));
  }
  if (ranks_.empty()) return Fail(Errc::kNotFound, source_.tag, ": no folders mp_rank_*");
  return {};
}

/// Assigns a rank to each folder. This needs both its name and the arguments.
Status Legacy::PlaceFiles() {
  std::set<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> seen;
  for (RankFiles& rank : ranks_) {
    const Folder folder = *ParseFolder(rank.folder);
    const std::size_t wanted = (args_.pp > 1 ? 1 : 0) + (args_.ep > 1 ? 1 : 0);
    const auto wrong = [&] {
      return Fail(Errc::kBadInput, rank.folder, ": not a rank of tp=", args_.tp, ", pp=", args_.pp,
                  ", ep=", args_.ep, ", the sizes in the run arguments");
    };
    if (folder.more.size() != wanted) return wrong();
    rank.t = folder.tensor;
    std::size_t next = 0;
    if (args_.pp > 1) rank.p = folder.more[next++];
    if (args_.ep > 1) rank.e = folder.more[next++];
    if (rank.t >= args_.tp || rank.p >= args_.pp || rank.e >= args_.ep) return wrong();
    if (!seen.insert({rank.p, rank.e, rank.t}).second) return wrong();
  }
  std::vector<std::string> missing;
  const std::uint64_t all = args_.tp * args_.pp * args_.ep;
  if (all > ranks_.size()) {
    for (std::uint64_t i = 0; i < all && missing.size() < 100; ++i) {
      const std::uint64_t t = i % args_.tp;
      const std::uint64_t e = i / args_.tp % args_.ep;
      const std::uint64_t p = i / args_.tp / args_.ep;
      if (!seen.contains({p, e, t})) missing.push_back(FolderName(args_, t, p, e));
    }
    return Fail(Errc::kNotFound, source_.tag, ": ranks are missing: ", FirstFew(missing));
  }
  std::sort(ranks_.begin(), ranks_.end(), [](const RankFiles& a, const RankFiles& b) {
    return std::tie(a.p, a.e, a.t) < std::tie(b.p, b.e, b.t);
  });
  return {};
}

Status Legacy::ReadModels() {
  local_.resize(ranks_.size());
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Node* root = ranks_[rank].document->root;
    const std::string& where = NameOf(ranks_[rank].model);
    local_[rank].resize(args_.vpp);
    const bool several = root->Find("model0") != nullptr;
    if (several && root->Find("model") != nullptr) {
      return Fail(Errc::kBadInput, where,
                  ": found both \"model\" and \"model0\", one of them expected");
    }
    for (std::uint64_t chunk = 0; chunk < args_.vpp; ++chunk) {
      const std::string key = args_.vpp > 1 ? "model" + std::to_string(chunk) : "model";
      const Node* model = root->Find(key);
      if (model == nullptr || !model->is_dict()) {
        const std::string found = model == nullptr ? "nothing" : pickle::Describe(model);
        return BadInput(where, ": ", Quoted(key), ": dict expected, found ", found);
      }
      SW_TRY(ReadModel(rank, chunk, model));
    }
    if (root->Find("model" + std::to_string(args_.vpp)) != nullptr) {
      return Fail(Errc::kBadInput, where, ": ", args_.vpp,
                  " virtual chunks expected by the run arguments, found more");
    }
  }
  return {};
}

Status Legacy::ReadModel(std::size_t rank, std::uint64_t chunk, const Node* model) {
  const RankFiles& files = ranks_[rank];
  const std::string& where = NameOf(files.model);
  const std::uint64_t index = chunk * args_.pp + files.p;
  const Stage& stage = stages_[index];
  std::map<std::uint64_t, std::uint64_t> layers;     // global number by local number
  std::map<std::string, std::size_t> expert_blocks;  // by the text before the expert's number
  const bool last = index + 1 == stages_.size();
  const bool has_copy = HasCopy(args_) && last && index > 0;
  for (std::size_t i = 0; i < model->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view key, pickle::AsString(model->key(i)));
    const Node* value = model->value(i);
    if (key.ends_with(kExtraState)) {
      ReadExtra(rank, stage, key, value);
      continue;
    }
    if (!value->is_tensor()) {
      return Fail(Errc::kBadInput, where, ": \"", key, "\": tensor expected, found ",
                  pickle::Describe(value));
    }
    ParamName name = ParseName(key);
    SW_TRY(CheckList(where, key));
    if (name.layer) {
      const std::uint64_t global = stage.begin + *name.layer;
      layers.emplace(*name.layer, global);
      name.layer = global;
    }
    if (!name.expert && key.find("mlp.experts.") != std::string_view::npos && !IsBuffer(key)) {
      return Fail(Errc::kUnsupported, where, ": \"", key,
                  "\": experts stored as one tensor: legacy files are supported only with a tensor "
                  "for each expert");
    }
    std::size_t block = i;
    if (name.expert) {
      const std::uint64_t each = args_.experts / args_.ep;
      if (*name.expert >= each) {
        return Fail(Errc::kBadInput, where, ": \"", key, "\": expert ", *name.expert,
                    " found, but each rank has only ", each, " experts");
      }
      name.expert = *name.expert + files.e * each;
      block = expert_blocks.emplace(name.stack + std::to_string(name.layer.value_or(0)), i)
                  .first->second;
    }
    std::string text = name.Text();
    const bool copy = has_copy && text == CopyName(args_);
    const bool shared = HasCopy(args_) && (copy || (index == 0 && text == kEmbedding));
    if (copy) text = kEmbedding;
    Spread& spread = tensors_[text];
    if (spread.held.empty()) spread.place = {index, block, name.expert.value_or(0), i};
    spread.held.push_back({rank, value, copy});
    if (!IsBuffer(text)) local_[rank][chunk].push_back({std::move(text), value, shared, copy});
  }
  return ReadLayers(rank, index, layers);
}

/// Checks that layers belong to one decoder, because stages share only one list of layers.
Status Legacy::CheckList(const std::string& where, std::string_view key) {
  if (!key.starts_with(kEncoderLayers) && OtherListOf(key).empty()) return {};
  return Fail(Errc::kUnsupported, where, ": \"", key, "\": in legacy files only the layer list \"",
              kDecoderLayers, "\" is supported: save the run as torch_dist");
}

/// Reads the extra state of a rank's module.
void Legacy::ReadExtra(std::size_t rank, const Stage& stage, std::string_view key,
                       const Node* value) {
  const RankFiles& files = ranks_[rank];
  ParamName name = ParseName(key);
  if (name.layer) name.layer = *name.layer + stage.begin;
  if (name.expert) name.expert = *name.expert + files.e * (args_.experts / args_.ep);
  if (value->is_none() && key == kOutputState) return;  // every GPT has it
  AddModule(
      name.Text(), value,
      [&] { return ValueOf(collector_.map, files.model, 0, files.document, value); }, own_.get());
}

/// Checks that a chunk has exactly its own layers.
Status Legacy::ReadLayers(std::size_t rank, std::uint64_t chunk,
                          const std::map<std::uint64_t, std::uint64_t>& layers) const {
  const std::uint64_t count = stages_[chunk].count;
  if (layers.size() == count && (count == 0 || layers.rbegin()->first == count - 1)) return {};
  return Fail(Errc::kBadInput, NameOf(ranks_[rank].model), ": chunk with ", count, " of ",
              args_.layers, " layers expected, found ", layers.size(),
              " layers with numbers up to ",
              (layers.empty() ? "none" : std::to_string(layers.rbegin()->first)));
}

/// Adds parameters. The whole consists of the shards of one expert rank, by tensor rank.
Status Legacy::AddParams() {
  std::vector<std::pair<const std::string*, const Spread*>> order;
  std::vector<std::string> names;
  std::vector<Shape> firsts;
  for (const auto& [name, spread] : tensors_) {
    order.emplace_back(&name, &spread);
    names.push_back(name);
    firsts.push_back(spread.held.front().node->tensor->shape);
  }
  SW_TRY_ASSIGN(const bool gated, IsGated(names, firsts));
  std::sort(order.begin(), order.end(),
            [](const auto& a, const auto& b) { return a.second->place < b.second->place; });
  const Rules rules(args_, gated);
  for (const auto& [name, spread] : order) {
    std::vector<Shape> shards(args_.tp);
    std::vector<bool> there(args_.tp, false);
    const std::uint64_t e = ranks_[spread->held.front().rank].e;
    const DType dtype = spread->held.front().node->tensor->dtype;
    for (const RankTensor& held : spread->held) {
      const RankFiles& rank = ranks_[held.rank];
      const pickle::Tensor& tensor = *held.node->tensor;
      const Shape& first = spread->held.front().node->tensor->shape;
      if (tensor.dtype != dtype || (rank.t == 0 && tensor.shape != first)) {
        return Fail(Errc::kBadInput, NameOf(rank.model), ": \"", *name,
                    "\": ", pickle::Describe(held.node), ", on another rank ",
                    pickle::Describe(spread->held.front().node));
      }
      if (rank.e != e || held.copy) continue;
      shards[rank.t] = tensor.shape;
      there[rank.t] = true;
    }
    const auto lacks = std::find(there.begin(), there.end(), false);
    if (lacks != there.end()) {
      return Fail(Errc::kBadInput, source_.tag, ": \"", *name, "\": tensor-parallel rank ",
                  lacks - there.begin(), " lacks it");
    }
    SW_TRY(collector_.AddParam(rules, args_, *name, dtype, shards));
  }
  return {};
}

layout::Role Legacy::RoleOf(std::size_t rank, std::uint32_t param, bool copy) const {
  const RankFiles& files = ranks_[rank];
  const bool expert = collector_.out.params[param].expert.has_value();
  const auto& rule = collector_.wholes[param].rule;
  const bool repeated = layout::FirstCopy(rule, args_.tp, files.t) != files.t;
  const bool again = copy || (!expert && files.e > 0) || repeated;
  return again ? layout::Role::kReplica : layout::Role::kOwner;
}

Status Legacy::AddShard(std::size_t rank, const LocalName& name, std::string_view state,
                        DType dtype, std::uint32_t array, std::uint64_t first) {
  const std::uint32_t param = collector_.by_name.at(name.name);
  layout::Placement at;
  at.array = array;
  at.vector_offset = first;
  return collector_.AddShard(param, state, dtype, at, args_.tp, ranks_[rank].t,
                             RoleOf(rank, param, name.copy));
}

Status Legacy::AddWeights() {
  for (auto& [name, spread] : tensors_) {
    const Param& param = collector_.out.params[collector_.by_name.at(name)];
    // The optimizer has no copy of float32 weights.
    const bool master = has_optimizer_ && param.dtype == DType::kF32;
    const std::string_view state = param.kind == ParamKind::kBuffer ? layout::kBuffer
                                   : master                         ? layout::kMaster
                                                                    : layout::kWeight;
    for (const RankTensor& held : spread.held) {
      const RankFiles& rank = ranks_[held.rank];
      SW_TRY_ASSIGN(const Place place, collector_.map.PlaceOf(rank.model, *rank.document, held.node,
                                                              "\"" + name + "\""));
      SW_TRY(AddShard(held.rank, {name, held.node, false, held.copy}, state, place.dtype,
                      collector_.map.AddWhole(place), 0));
    }
  }
  return {};
}

Result<Checkpoint> Legacy::Run() {
  SW_TRY(ReadFiles());
  auto args = ReadArgs(ranks_.front().document->root->Find("args"));
  if (!args) return Within(NameOf(ranks_.front().model), args.error());
  args_ = *std::move(args);
  if (args_.hybrid) {
    return Fail(Errc::kUnsupported, source_.tag,
                ": hybrid models (layers of several kinds) are not supported");
  }
  if (args_.experts > 0 && args_.etp != args_.tp) {
    return Fail(Errc::kUnsupported, source_.tag, ": etp=", args_.etp, " differs from tp=", args_.tp,
                ", which is not supported in legacy files");
  }
  if (args_.experts % args_.ep != 0) {
    return Fail(Errc::kBadInput, "args: ", args_.experts, " experts do not divide by ", args_.ep,
                " expert ranks");
  }
  if (Status stages = CheckMtpStages(args_); !stages) return Within(source_.tag, stages.error());
  SW_TRY_ASSIGN(stages_, StagesOf(args_));
  SW_TRY(PlaceFiles());
  SW_TRY(ReadModels());
  SW_TRY(AddParams());
  for (const RankFiles& rank : ranks_) {
    if (reads_ == Reads::kOnlyWeights) break;
    has_optimizer_ = has_optimizer_ || rank.document->root->Find("optimizer") != nullptr ||
                     rank.document->root->Find("optimizer_state_dict") != nullptr;
  }
  SW_TRY(AddWeights());
  SW_TRY(ReadOptimizers());
  SW_TRY(ReadRunState());
  return collector_.Finish();
}

Status Legacy::ReadRunState() {
  Checkpoint& out = collector_.out;
  const std::shared_ptr<RunState>& own = own_;
  pickle::Arena& arena = *out.arena;
  const Node* root = ranks_.front().document->root;
  const std::string& where = NameOf(ranks_.front().model);
  if (const Node* version = root->Find("checkpoint_version"); version != nullptr) {
    const Result<double> number = pickle::AsFloat(version);
    if (!number || *number < 2) {
      return Fail(Errc::kUnsupported, where, ": checkpoint_version 2 or later expected, found ",
                  pickle::Describe(version),
                  ": older versions store attention weights in another "
                  "order");
    }
  }
  Node* common = arena.Dict();
  for (std::size_t i = 0; i < root->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view key, pickle::AsString(root->key(i)));
    const bool other = key.starts_with("model") || key == "optimizer" || key == "rng_state" ||
                       key == "optimizer_state_dict";
    if (!other)
      pickle::Set(arena, common, key == "lr_scheduler" ? "opt_param_scheduler" : key,
                  root->value(i));
  }
  const RankFiles& front = ranks_.front();
  own->common = ValueOf(collector_.map, front.model, 0, front.document, common);
  own->args = args_;
  for (const RankFiles& rank : ranks_) {
    const Node* random = rank.document->root->Find("rng_state");
    if (random == nullptr || rank.e > 0) continue;
    own->random[{rank.p, rank.t}] = ValueOf(collector_.map, rank.model, 0, rank.document, random);
  }
  const Node* iteration = root->Find("iteration");
  if (const auto count = pickle::AsCount(iteration)) {
    out.iteration = *count;
  } else {
    out.iteration = Fail(Errc::kBadInput, where, ": no \"iteration\" in it: give --iteration");
  }
  out.consumed_samples = args_.samples;
  out.own = own;
  MegatronLayout layout;
  layout.files = Files::kTorch;
  layout.optimizer =
      ranks_.front().optimizer ? OptimizerForm::kDpReshardable : OptimizerForm::kNone;
  FillLayout(args_, layout, &out);
  return {};
}

Result<Checkpoint> ReadLegacy(const SourceSet& source, const Patterns& patterns, Reads reads) {
  return Legacy(source, patterns, reads).Run();
}

}  // namespace shardwright::checkpoints::megatron
