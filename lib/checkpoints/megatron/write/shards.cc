// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/write/shards.h"

#include <algorithm>

#include "checkpoints/megatron/names.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {

Status CheckBuffers(const Writing& w) {
  if (Status stages = CheckMtpStages(w.args); !stages) {
    return Within("dp_reshardable", stages.error());
  }
  if (w.args.hybrid) {
    return Fail(Errc::kUnsupported,
                "dp_reshardable: hybrid models (layers of several kinds) are not supported");
  }
  if (w.args.experts > 0 && w.to.mesh.ep == 1 && w.to.etp != w.to.mesh.tp) {
    return Fail(Errc::kUnsupported, "dp_reshardable: etp=", w.to.etp,
                " differs from tp=", w.to.mesh.tp,
                ": with ep=1, experts share the buffers of the other parameters");
  }
  for (const Param& param : w.source.params) {
    if (ParseName(param.name).stack == kEncoderLayers) {
      return Fail(Errc::kUnsupported, "dp_reshardable: \"", param.name,
                  "\": encoder layers are not supported: use fully_reshardable");
    }
    if (w.to.mesh.ep > 1 && param.expert && !ParseName(param.name).expert) {
      return Fail(Errc::kUnsupported, "dp_reshardable: \"", param.name,
                  "\" belongs to an expert, but does not have Megatron-Core's name for one: cannot "
                  "determine its rank");
    }
    if (param.kind != ParamKind::kTrainable || param.dtype != DType::kF32) continue;
    return Fail(Errc::kUnsupported, "dp_reshardable: \"", param.name,
                "\" is float32, and Megatron-Core cannot load float32 buckets (it changes a "
                "parameter that requires a gradient): use fully_reshardable");
  }
  const RunState* run = RunStateOf(w.source);
  if (run == nullptr || run->noted) return {};
  const Param* before = nullptr;
  for (const Param& param : w.source.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    if (before != nullptr && ModelOrderLess(param.name, before->name)) {
      return Fail(Errc::kUnsupported, "dp_reshardable: \"", param.name, "\" comes after \"",
                  before->name,
                  "\" in this model, but before it in Megatron-Core: cannot determine the order of "
                  "parameters in buckets");
    }
    before = &param;
  }
  return {};
}

Result<std::vector<Part>> Shards::PartsFor(const Whole& whole, const Param& param,
                                           std::uint64_t t) const {
  const std::uint64_t ranks = RanksOf(w_.args, param.name);
  Whole known = whole;
  // With one rank the rule does not matter: the rank has the whole parameter.
  if (ranks == 1 && known.rule.split == layout::Split::kUnknown) {
    known.rule.split = layout::Split::kReplicated;
  }
  auto parts = PartsOf(known, ranks, t);
  if (!parts) return Within("\"" + param.name + "\"", parts.error());
  return parts;
}

Result<std::vector<Mine>> Shards::MineOf(const Rank& rank, std::uint64_t chunk) const {
  const std::vector<Param>& params = w_.source.params;
  const Stage& stage = stages_[chunk * w_.args.pp + rank.p];
  const std::uint64_t each = w_.args.experts / w_.args.ep;
  std::vector<Mine> all;
  for (const Holding& held : HoldingsOf(w_.args, stages_, params, order_, rank, chunk)) {
    const Param& param = params[held.param];
    if (rank.t >= RanksOf(w_.args, param.name)) continue;  // experts may have fewer tensor ranks
    ParamName name = ParseName(param.name);
    if (name.layer) name.layer = *name.layer - stage.begin;
    if (name.expert) name.expert = *name.expert - rank.e * each;
    if (w_.args.old_mtp_names) name.stack = name.OldStack();
    Mine one{held.param,
             held.copy ? std::string(CopyName(w_.args)) : name.Text(),
             {},
             held.shared,
             held.copy};
    const Whole whole = w_.WholeFor(param);
    SW_TRY_ASSIGN(const std::vector<Part> parts, PartsFor(whole, param, rank.t));
    one.shape = parts.front().cut->shard();
    if (!whole.rule.padded && !whole.rule.view.empty()) {
      auto shape =
          layout::ShardShape(whole.rule, whole.shape, RanksOf(w_.args, param.name), rank.t);
      if (!shape) return Within("\"" + param.name + "\"", std::move(shape).error());
      one.shape = *std::move(shape);
    }
    if (parts.size() > 1) one.shape[0] += parts.back().cut->shard()[0];
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<Mine> Shards::PartOf(const std::vector<Mine>& mine, bool experts) const {
  std::vector<Mine> part;
  for (const Mine& one : mine) {
    const Param& param = w_.source.params[one.param];
    if (param.kind != ParamKind::kTrainable) continue;
    if (!chained_ || IsExpert(param) == experts) part.push_back(one);
  }
  return part;
}

Status Shards::AddShard(const Rank& rank, const Mine& mine, std::string_view state, DType dtype,
                        std::uint32_t array, std::uint64_t first) {
  const Param& param = w_.source.params[mine.param];
  const Whole whole = w_.WholeFor(param);
  SW_TRY_ASSIGN(const std::vector<Part> parts, PartsFor(whole, param, rank.t));
  const bool replicated = whole.rule.split == layout::Split::kReplicated;
  for (const Part& part : parts) {
    Shape shape = whole.shape;
    if (part.padding) {
      shape[0] = whole.padding;
      if (!w_.KeepsPadding(param, state, shape)) continue;
    }
    const std::uint32_t tensor = w_.TensorOf(param.name, part.padding, state, dtype, shape);
    layout::Fragment fragment;
    fragment.cut = part.cut;
    fragment.at.array = array;
    fragment.at.vector_offset = first + part.first;
    const bool owner = owned_.emplace(tensor, replicated ? 0 : rank.t).second;
    fragment.role = owner ? layout::Role::kOwner : layout::Role::kReplica;
    w_.builder.AddFragment(tensor, std::move(fragment));
  }
  return {};
}

Result<StateBuffer> Shards::BufferOf(const Rank& rank, std::vector<Mine> mine, std::uint64_t chunk,
                                     bool experts) const {
  StateBuffer out;
  std::vector<BufferParam> params;
  params.reserve(mine.size());
  for (const Mine& one : mine) params.push_back({Elems(one.shape), one.shared});
  out.dtype = w_.source.params[mine.front().param].dtype;
  out.gradient = GradientType(w_.args, out.dtype);
  // The total only matters for rules that set a number of buckets, which targets do not.
  const BucketRule rule = BucketRuleOf(w_.args, rank.p, chunk, 0, experts);
  out.buffer = LayOut(params, rule);
  if (w_.to.files == Files::kTorchDist) {
    SW_TRY(CheckLoadable(params, out.buffer, rule.shards));
  }
  out.states.emplace_back(layout::kMaster);
  out.states.insert(out.states.end(), w_.source.states.begin(), w_.source.states.end());
  for (const std::string& state : out.states) {
    for (const Mine& one : mine) {
      const Param& param = w_.source.params[one.param];
      if (w_.SourceTensor(param.name, state) != nullptr) continue;
      return Fail(Errc::kUnsupported, "\"", param.name, "\": no ", state,
                  ": all parameters of a gradient buffer must have the same states");
    }
  }
  out.mine = std::move(mine);
  return out;
}

Result<std::vector<StateBuffer>> Shards::BuffersOf(const Rank& rank,
                                                   const std::vector<std::vector<Mine>>& chunks,
                                                   bool experts) const {
  std::vector<StateBuffer> all;
  for (std::uint64_t chunk = 0; chunk < chunks.size(); ++chunk) {
    const std::vector<Mine> part = PartOf(chunks[chunk], experts);
    std::vector<DType> types;
    types.reserve(part.size());
    for (const Mine& one : part) types.push_back(w_.source.params[one.param].dtype);
    for (const megatron::BufferOf& buffer : megatron::BuffersOf(types)) {
      std::vector<Mine> mine;
      for (const std::size_t i : buffer.params) mine.push_back(part[i]);
      SW_TRY_ASSIGN(StateBuffer made, BufferOf(rank, std::move(mine), chunk, experts));
      all.push_back(std::move(made));
    }
  }
  return all;
}

std::string_view SlotOf(std::string_view state) {
  return state == layout::kMaster ? "param" : state;
}

}  // namespace shardwright::checkpoints::megatron
