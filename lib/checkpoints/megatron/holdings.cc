// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/holdings.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "checkpoints/megatron/names.h"

namespace shardwright::checkpoints::megatron {

bool HasCopy(const Args& args) { return args.pp > 1 && (!args.untied || args.mtp > 0); }

bool StageHas(const ParamName& name, std::span<const Stage> stages, std::uint64_t index) {
  const Stage& stage = stages[index];
  if (name.layer) return *name.layer >= stage.begin && *name.layer < stage.begin + stage.count;
  const bool first = name.stack.empty() && name.rest.starts_with("embedding.");
  return first ? index == 0 : index + 1 == stages.size();
}

std::string_view CopyName(const Args& args) { return args.mtp > 0 ? kEmbedding : kOutput; }

Status CheckMtpStages(const Args& args) {
  if (args.mtp == 0 || args.pp < 2) return {};
  const bool learned = args.positions == "learned_absolute";
  if (args.untied && !learned) return {};
  return Fail(
      Errc::kUnsupported, "multi-token prediction with ",
      learned ? "learned position" : "tied word", " embeddings in ", args.pp,
      " pipeline stages: the last stage of Megatron-Core ",
      (learned ? "trains position embeddings of its own" : "has an output layer that nothing uses"),
      ": use pp=1, or files=torch_dist with optimizer=none or fully_reshardable");
}

std::vector<Holding> HoldingsOf(const Args& args, std::span<const Stage> stages,
                                std::span<const Param> params, std::span<const std::uint32_t> order,
                                const Rank& rank, std::uint64_t chunk) {
  const std::uint64_t index = chunk * args.pp + rank.p;
  const bool last = index + 1 == stages.size();
  const bool shared = HasCopy(args);
  const std::uint64_t each = args.experts / std::max<std::uint64_t>(args.ep, 1);
  std::vector<Holding> all;
  std::optional<std::uint32_t> embedding;
  for (const std::uint32_t i : order) {
    const Param& param = params[i];
    if (!param.alias_of.empty()) continue;
    if (param.name == kEmbedding) embedding = i;
    const ParamName name = ParseName(param.name);
    bool mine = StageHas(name, stages, index);
    if (name.expert) mine = mine && *name.expert / std::max<std::uint64_t>(each, 1) == rank.e;
    if (mine) all.push_back({i, shared && param.name == kEmbedding, false});
  }
  if (!shared || !last || !embedding) return all;
  // An embedding is the first module. An output layer is the last one.
  all.insert(CopyName(args) == kEmbedding ? all.begin() : all.end(), {*embedding, true, true});
  return all;
}

std::vector<std::uint32_t> ModelOrder(std::span<const Param> params) {
  std::vector<std::uint32_t> order(params.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return ModelOrderLess(params[a].name, params[b].name);
  });
  return order;
}

bool IsExpert(const Param& param) {
  return param.expert.has_value() || ParseName(param.name).expert.has_value();
}

std::vector<Rank> BufferRanks(const Args& args, bool experts) {
  std::vector<Rank> ranks;
  for (std::uint64_t p = 0; p < args.pp; ++p) {
    for (std::uint64_t e = 0; e < (experts ? args.ep : 1); ++e) {
      for (std::uint64_t t = 0; t < (experts ? args.etp : args.tp); ++t) ranks.push_back({t, p, e});
    }
  }
  return ranks;
}

}  // namespace shardwright::checkpoints::megatron
