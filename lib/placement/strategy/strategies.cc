// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/strategies.h"

namespace shardwright::placement {
namespace {

constexpr Strategy kStrategies[] = {
    {"best", "least imbalance, fewest moves, any fault tolerance: local search",
     internal::DraftBest, internal::FinishBest},
    {"lazarus", "replicas by load, rare experts overlap: greatest recovery probability",
     internal::DraftLazarus, internal::FinishByNodes},
    {"hecate", "one owner per expert, hot experts copied for every iteration", internal::DraftEmpty,
     internal::FinishHecate},
    {"eplb", "DeepSeek's balancer as published, both policies", internal::DraftEplb,
     internal::FinishAsDrafted},
    {"eplb+", "eplb without duplicates on a gpu, renamed to move least, any slots",
     internal::DraftEplbPlus, internal::FinishEplbPlus},
    {"spread", "replicas by load, dealt round-robin to the nodes", internal::DraftSpread,
     internal::FinishByNodes},
    {"compact", "replicas by load, each expert on as few nodes as possible", internal::DraftCompact,
     internal::FinishByNodes},
    {"vanilla", "expert parallelism: runs of experts in order", internal::DraftVanilla,
     internal::FinishInSlots},
    {"smartmoe", "experts change places, no replicas", internal::DraftSmartMoe,
     internal::FinishInSlots},
    {"flexmoe", "replicas come and go while the modelled time falls", internal::DraftFlexMoe,
     internal::FinishInSlots},
    {"fastermoe", "hot experts shadowed on all gpus while the modelled time falls",
     internal::DraftFasterMoe, internal::FinishAsDrafted},
};

}  // namespace

std::span<const Strategy> Strategies() { return kStrategies; }

Result<const Strategy*> FindStrategy(std::string_view name) {
  std::string names;
  for (const Strategy& strategy : kStrategies) {
    if (strategy.name == name) return &strategy;
    names += (names.empty() ? "" : ", ") + std::string(strategy.name);
  }
  return Fail(Errc::kUsage, "strategy \"", name, "\" does not exist, expected one of ", names);
}

}  // namespace shardwright::placement
