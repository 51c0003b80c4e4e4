// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/flat.h"

#include <algorithm>
#include <limits>

#include "support/base/checked.h"

namespace shardwright::checkpoints {

namespace {

// NCCL sends start at multiples of this number of elements, so every rank pads groups to it.
constexpr std::uint64_t kAlignment = 2;

constexpr std::string_view kExperts = "deepspeed_experts.";

struct IdPlace {
  std::size_t first = 0;
  std::size_t last = 0;
};

Result<IdPlace> FindExpertId(std::string_view name) {
  for (std::size_t at = name.find(kExperts); at != std::string_view::npos;
       at = name.find(kExperts, at + 1)) {
    if (at > 0 && name[at - 1] != '.') continue;
    IdPlace place{at + kExperts.size(), at + kExperts.size()};
    while (place.last < name.size() && name[place.last] >= '0' && name[place.last] <= '9') {
      ++place.last;
    }
    if (place.last > place.first && place.last < name.size() && name[place.last] == '.') {
      return place;
    }
  }
  return Fail(Errc::kBadInput, "\"", name,
              "\": an expert parameter's name with deepspeed_experts.<id>. expected");
}

}  // namespace

std::vector<std::uint32_t> RoundRobinOrder(std::size_t params, std::uint64_t ranks) {
  std::vector<std::uint32_t> order;
  order.reserve(params);
  for (std::uint64_t first = 0; first < std::min<std::uint64_t>(ranks, params); ++first) {
    for (std::uint64_t i = first; i < params; i += ranks) {
      order.push_back(static_cast<std::uint32_t>(i));
    }
  }
  return order;
}

Result<std::uint64_t> PartitionElems(std::uint64_t elems, std::uint64_t ranks) {
  SW_TRY_ASSIGN(const std::uint64_t alignment, CheckedMul(kAlignment, ranks));
  return CheckedMul(CeilDiv(elems, alignment), kAlignment);
}

std::uint64_t PartitionPadding(std::uint64_t elems, std::uint64_t partition, std::uint64_t rank) {
  const std::uint64_t first = partition * rank;
  return elems <= first ? partition : partition - std::min(partition, elems - first);
}

Result<std::vector<SubGroup>> SubGroups(std::span<const std::uint64_t> shares,
                                        std::uint64_t limit) {
  std::uint64_t total = 0;
  for (std::uint64_t share : shares) {
    SW_TRY_ASSIGN(total, CheckedAdd(total, share));
  }
  std::vector<SubGroup> groups;
  if (shares.empty()) return groups;
  if (limit >= total) {
    groups.push_back({0, shares.size(), total});
    return groups;
  }
  SubGroup open;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    open.elems += shares[i];
    open.last = i + 1;
    if (open.elems >= limit || open.last == shares.size()) {
      groups.push_back(open);
      open = {open.last, open.last, 0};
    }
  }
  return groups;
}

ExpertRank ExpertRankOf(std::uint64_t rank, std::uint64_t ranks, std::uint64_t ep,
                        bool data_first) {
  if (!data_first) return {rank % ep, rank / ep};
  const std::uint64_t edp = ranks / ep;
  return {rank / edp, rank % edp};
}

std::uint64_t RankOfExpert(ExpertRank place, std::uint64_t ranks, std::uint64_t ep,
                           bool data_first) {
  return data_first ? place.ep * (ranks / ep) + place.edp : place.edp * ep + place.ep;
}

Result<std::string> WithExpertId(std::string_view name, std::uint64_t id) {
  SW_TRY_ASSIGN(const IdPlace place, FindExpertId(name));
  return std::string(name.substr(0, place.first)) + std::to_string(id) +
         std::string(name.substr(place.last));
}

Result<std::uint32_t> ExpertIdOf(std::string_view name) {
  SW_TRY_ASSIGN(const IdPlace place, FindExpertId(name));
  const auto id = NumberIn<std::uint32_t>(name.substr(place.first, place.last - place.first));
  if (!id) return Fail(Errc::kBadInput, "\"", name, "\": expert id out of range");
  return *id;
}

std::string ExpertModuleOf(std::string_view name) {
  const auto place = FindExpertId(name);
  return place ? std::string(name.substr(0, place->last)) : std::string();
}

bool IsNativeExpert(const Param& param) {
  return param.expert && !ExpertModuleOf(param.name).empty();
}

std::vector<std::uint64_t> PartitionUniform(std::uint64_t layers, std::uint64_t stages) {
  std::vector<std::uint64_t> bounds(stages + 1);
  if (layers <= stages) {
    for (std::uint64_t i = 0; i <= stages; ++i) bounds[i] = std::min(i, layers);
    return bounds;
  }
  const std::uint64_t rest = layers % stages;  // the first `rest` stages have one more layer
  for (std::uint64_t i = 0; i <= stages; ++i) {
    bounds[i] = i * (layers / stages) + std::min(i, rest);
  }
  return bounds;
}

std::vector<std::uint64_t> PartitionBalanced(std::span<const std::uint64_t> weights,
                                             std::uint64_t stages) {
  const std::size_t layers = weights.size();
  if (layers <= stages) return PartitionUniform(layers, stages);
  constexpr double kNone = std::numeric_limits<double>::infinity();
  struct Best {
    double heaviest = kNone;
    double lightest = kNone;
    double spread = kNone;
    std::size_t cut = 0;
  };
  std::vector<double> before(layers + 1, 0);
  for (std::size_t i = 0; i < layers; ++i) {
    before[i + 1] = before[i] + static_cast<double>(weights[i]);
  }
  const std::size_t width = stages + 1;
  std::vector<Best> best((layers + 1) * width);
  best[0].heaviest = 0;
  best[0].spread = 0;
  for (std::size_t i = 1; i <= layers; ++i) {
    for (std::size_t j = 1; j <= std::min<std::size_t>(i, stages); ++j) {
      Best& here = best[i * width + j];
      for (std::size_t k = 0; k < i; ++k) {
        const Best& prior = best[k * width + j - 1];
        const double last = before[i] - before[k];
        const double heaviest = std::max(prior.heaviest, last);
        const double lightest = std::min(prior.lightest, last);
        if (here.spread >= heaviest - lightest) {
          here = {heaviest, lightest, heaviest - lightest, k};
        }
      }
    }
  }
  std::vector<std::uint64_t> bounds(width);
  bounds[stages] = layers;
  for (std::size_t j = stages; j > 0; --j) bounds[j - 1] = best[bounds[j] * width + j].cut;
  return bounds;
}

}  // namespace shardwright::checkpoints
