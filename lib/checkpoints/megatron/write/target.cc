// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>
#include <span>

#include "checkpoints/megatron/megatron.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/stages.h"
#include "checkpoints/megatron/write/new_run.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::array<std::string_view, 2> kFilesWords = {"torch_dist", "torch"};
constexpr std::array<std::string_view, 3> kFormWords = {"none", "dp_reshardable",
                                                        "fully_reshardable"};

tl::unexpected<Error> Indivisible(const std::string& key, std::uint64_t ranks,
                                  const std::string& what, std::uint64_t count) {
  return Fail(Errc::kUnsupported, key, "=", ranks, ": ", count, " ", what, " do not divide");
}

/// Counts the layers and experts of a model by names.
void CountModel(const Checkpoint& source, Args* args) {
  args->layers = 0;
  args->experts = 0;
  for (const Param& param : source.params) {
    const ParamName name = ParseName(param.name);
    if (name.layer) args->layers = std::max(args->layers, *name.layer + 1);
    if (name.expert) args->experts = std::max(args->experts, *name.expert + 1);
    args->latent = args->latent || name.rest.find("linear_kv_down_proj.") != std::string::npos;
    if (name.layer && name.rest.find("layer_norm_weight") != std::string::npos) {
      args->transformer_engine = true;
    }
  }
}

/// Sets the files, the form of the optimizer's state, and the bucket size.
Status ResolveFiles(const TargetSpec& spec, MegatronLayout* to) {
  if (const std::string* files = spec.Find("files")) {
    to->files = *files == kFilesWords[0] ? Files::kTorchDist : Files::kTorch;
  }
  const bool legacy = to->files == Files::kTorch;
  // Legacy files have no other form. In torch_dist any layout can load whole parameters.
  const OptimizerForm form =
      legacy ? OptimizerForm::kDpReshardable : OptimizerForm::kFullyReshardable;
  if (to->optimizer != OptimizerForm::kNone) to->optimizer = form;
  if (const std::string* word = spec.Find("optimizer")) {
    if (legacy && *word == kFormWords[2]) {
      return Fail(Errc::kUnsupported, "optimizer=", *word, ": files=", kFilesWords[1],
                  " supports only ", kFormWords[1], " or none");
    }
    to->optimizer = *word == kFormWords[0]   ? OptimizerForm::kNone
                    : *word == kFormWords[1] ? OptimizerForm::kDpReshardable
                                             : OptimizerForm::kFullyReshardable;
  }
  const bool buckets = to->optimizer == OptimizerForm::kDpReshardable;
  if (spec.Find("bucket") != nullptr && !buckets) {
    return Fail(Errc::kUnsupported,
                "bucket: only a distributed optimizer's gradient buffers have buckets "
                "(optimizer=dp_reshardable)");
  }
  to->bucket = buckets ? spec.NumberOr("bucket", to->bucket) : 0;
  return {};
}

/// Counts the depths of multi-token prediction by names.
std::uint64_t CountMtp(const Checkpoint& source) {
  std::uint64_t count = 0;
  for (const Param& param : source.params) {
    const ParamName name = ParseName(param.name);
    if (name.depth) count = std::max(count, *name.depth + 1);
  }
  return count;
}

/// Returns true unless a key without numbers can represent a parameter of all layers.
bool LayersDiffer(const Checkpoint& source) {
  std::map<std::string, std::uint64_t> layers;  // by stack
  std::map<std::string, std::pair<std::uint64_t, const Param*>> alike;
  for (const Param& param : source.params) {
    ParamName name = ParseName(param.name);
    if (!name.layer || !param.alias_of.empty()) continue;
    layers[name.stack] = std::max(layers[name.stack], *name.layer + 1);
    name.layer.reset();
    auto& [count, first] = alike[name.Text()];
    ++count;
    if (first == nullptr) first = &param;
    const bool same =
        first->shape == param.shape && first->dtype == param.dtype && first->kind == param.kind;
    if (!same) return true;
  }
  return std::any_of(alike.begin(), alike.end(), [&](const auto& one) {
    return one.second.first != layers.at(ParseName(one.second.second->name).stack);
  });
}

}  // namespace

Status CheckNumber(std::string_view key, std::string_view value, std::uint64_t least,
                   std::uint64_t most) {
  const auto number = NumberIn<std::uint64_t>(value);
  if (number && *number >= least && *number <= most) return {};
  return Fail(Errc::kUsage, "target ", key, "=", value, ": a number from ", least, " expected");
}

Status CheckWord(std::string_view key, std::string_view value) {
  const std::span<const std::string_view> words =
      key == "files" ? std::span<const std::string_view>(kFilesWords) : kFormWords;
  if (std::find(words.begin(), words.end(), value) != words.end()) return {};
  std::string all;
  for (const std::string_view word : words) all += (all.empty() ? "" : " or ") + std::string(word);
  return Fail(Errc::kUsage, "target ", key, "=", value, ": ", all, " expected");
}

const RunState* RunStateOf(const Checkpoint& source) {
  return dynamic_cast<const RunState*>(source.own.get());
}

Args TargetArgs(const Checkpoint& source, const MegatronLayout& to) {
  Args args;
  if (const RunState* own = RunStateOf(source)) {
    args = own->args;
  } else {
    CountModel(source, &args);
    args.untied = std::any_of(source.params.begin(), source.params.end(), [](const Param& one) {
      return one.name == kOutput && one.alias_of.empty();
    });
    args.samples = source.consumed_samples;
    args.dtype = source.layout.dtype;
  }
  args.layers_differ = args.layers_differ || LayersDiffer(source);
  if (args.mtp == 0) args.mtp = CountMtp(source);
  args.tp = to.mesh.tp;
  args.pp = to.mesh.pp;
  args.ep = to.mesh.ep;
  args.etp = to.etp;
  args.dp = to.mesh.dp();
  args.vpp = to.vpp;
  args.first = to.first > 0 ? std::optional(to.first) : std::nullopt;
  args.last = to.last > 0 ? std::optional(to.last) : std::nullopt;
  args.distributed = to.optimizer != OptimizerForm::kNone;
  if (to.files == Files::kTorch || to.optimizer == OptimizerForm::kDpReshardable) {
    args.overlap_grad_reduce = to.bucket > 0;
    args.bucket_elems = to.bucket > 0 ? std::optional(to.bucket) : std::nullopt;
    args.bucket_count.reset();
  }
  return args;
}

Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source) {
  const auto* from = dynamic_cast<const MegatronLayout*>(source.layout.own.get());
  auto to = std::make_shared<MegatronLayout>();
  to->optimizer = OptimizerForm::kFullyReshardable;
  if (from != nullptr) *to = *from;
  to->mesh = source.layout.mesh;
  Mesh& mesh = to->mesh;
  const Mesh before = mesh;
  mesh.tp = spec.NumberOr("tp", mesh.tp);
  mesh.pp = spec.NumberOr("pp", mesh.pp);
  mesh.ep = spec.NumberOr("ep", mesh.ep);
  to->etp = spec.NumberOr("etp", mesh.tp != before.tp || from == nullptr ? mesh.tp : to->etp);
  // Another number of stages yields other chunks.
  const bool same_stages = from != nullptr && mesh.pp == before.pp;
  to->vpp = spec.NumberOr("vpp", same_stages ? to->vpp : 1);
  to->first = spec.NumberOr("first", same_stages ? to->first : 0);
  to->last = spec.NumberOr("last", same_stages ? to->last : 0);
  to->dtype = source.layout.dtype;
  SW_TRY(ResolveFiles(spec, to.get()));
  const std::uint64_t dp = spec.NumberOr("dp", mesh.dp());
  const bool shares = to->optimizer != OptimizerForm::kNone;
  mesh.dp_shard = shares ? dp : 1;
  mesh.dp_replicate = shares ? 1 : dp;
  const Args args = TargetArgs(source, *to);
  if (args.layers > 0) {
    auto stages = StagesOf(args);
    if (!stages) return Fail(Errc::kUnsupported, stages.error().message);
  }
  if (args.experts % mesh.ep != 0) return Indivisible("ep", mesh.ep, "experts", args.experts);
  if (args.heads > 0 && args.heads % mesh.tp != 0) {
    return Indivisible("tp", mesh.tp, "attention heads", args.heads);
  }
  SW_TRY_ASSIGN(to->run, NewRunOf(spec, source));
  if (to->run && to->run->heads % mesh.tp != 0) {
    return Indivisible("tp", mesh.tp, "attention heads", to->run->heads);
  }
  Layout layout;
  layout.mesh = mesh;
  layout.dtype = source.layout.dtype;
  layout.own = std::move(to);
  return layout;
}

}  // namespace shardwright::checkpoints::megatron
