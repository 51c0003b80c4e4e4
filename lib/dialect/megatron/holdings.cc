#include "dialect/megatron/holdings.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "dialect/megatron/names.h"

namespace shardwright::dialect::megatron {

std::vector<Holding> HoldingsOf(const Args& args, std::span<const Stage> stages,
                                std::span<const Param> params, std::span<const std::uint32_t> order,
                                const Rank& rank, std::uint64_t chunk) {
  const std::uint64_t index = chunk * args.pp + rank.p;
  const Stage& stage = stages[index];
  const bool last = index + 1 == stages.size();
  const bool tied = !args.untied && args.pp > 1;
  const std::uint64_t each = args.experts / std::max<std::uint64_t>(args.ep, 1);
  std::vector<Holding> all;
  std::optional<std::uint32_t> embedding;
  for (const std::uint32_t i : order) {
    const Param& param = params[i];
    if (!param.alias_of.empty()) continue;
    if (param.name == kEmbedding) embedding = i;
    const ParamName name = ParseName(param.name);
    bool mine = last;
    if (name.layer) {
      mine = *name.layer >= stage.begin && *name.layer < stage.begin + stage.count;
      if (name.expert) mine = mine && *name.expert / std::max<std::uint64_t>(each, 1) == rank.e;
    } else if (name.rest.starts_with("embedding.")) {
      mine = index == 0;
    }
    if (mine) all.push_back({i, tied && param.name == kEmbedding, false});
  }
  if (tied && last && embedding) all.push_back({*embedding, true, true});
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

}  // namespace shardwright::dialect::megatron
