// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/megatron.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "support/base/checked.h"

namespace shardwright::checkpoints::megatron {

std::vector<std::uint32_t> RunState::Members() const {
  std::vector<std::uint32_t> all;
  const auto add = [&](const Value& value) {
    for (const std::uint32_t member : value.members) {
      if (member != Value::kNoMember) all.push_back(member);
    }
  };
  add(common);
  for (const auto& [rank, value] : random) add(value);
  for (const Value& value : scalers) add(value);
  for (const auto& [name, value] : modules) add(value);
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

std::vector<std::string> RunState::Contents() const {
  std::vector<std::string> contents;
  if (common.root != nullptr && common.root->is_dict()) {
    if (!noted && common.root->Find("args") != nullptr)
      contents.emplace_back("arguments of the run");
    if (common.root->Find("opt_param_scheduler") != nullptr) {
      contents.emplace_back("schedule of the learning rate");
    }
    if (common.root->Find("rerun_state_machine") != nullptr) {
      contents.emplace_back("state of the rerun machine");
    }
  }
  if (!random.empty()) contents.emplace_back("random states");
  const bool scaled = std::any_of(scalers.begin(), scalers.end(),
                                  [](const Value& one) { return one.root != nullptr; });
  if (scaled) contents.emplace_back("loss scaler");
  const auto filled = std::count_if(modules.begin(), modules.end(), [](const auto& one) {
    return one.second.root != nullptr && !one.second.root->is_none();
  });
  if (filled > 0) contents.push_back(StrCat("extra state of ", filled, " modules"));
  if (!extra.empty()) {
    contents.push_back(StrCat(extra.size(), " other objects"));
  }
  return contents;
}

std::string MegatronLayout::Json() const {
  constexpr const char* kForms[] = {"none", "dp_reshardable", "fully_reshardable",
                                    "fully_sharded_model_space"};
  nlohmann::ordered_json json = {{"tp", mesh.tp},
                                 {"pp", mesh.pp},
                                 {"vpp", vpp},
                                 {"ep", mesh.ep},
                                 {"etp", etp},
                                 {"cp", mesh.cp},
                                 {"dp", mesh.dp()},
                                 {"files", files == Files::kTorch ? "torch" : "torch_dist"},
                                 {"optimizer", kForms[static_cast<std::size_t>(optimizer)]},
                                 {"dtype", Name(dtype)}};
  if (first > 0) json["first"] = first;
  if (last > 0) json["last"] = last;
  if (bucket > 0) json["bucket"] = bucket;
  if (sequence_parallel) json["sp"] = true;
  if (run) {
    json["lr"] = run->max_rate;
    json["min_lr"] = run->min_rate;
    json["heads"] = run->heads;
    json["samples"] = run->samples;
  }
  return json.dump();
}

Result<std::string> TagOf(std::string_view pointed) {
  if (pointed == kRelease) return std::string(kRelease);
  const auto iteration = NumberIn<std::uint64_t>(pointed);
  if (!iteration) {
    return Fail(Errc::kBadInput, "an iteration or \"release\" expected, found \"", pointed, "\"");
  }
  char text[40];
  std::snprintf(text, sizeof text, "iter_%07llu", static_cast<unsigned long long>(*iteration));
  return std::string(text);
}

std::span<const std::string_view> Sides(const TargetSpec& /*spec*/) {
  // Maps of models with experts use the first scheme, because the reader
  // names experts as separate modules for all forms of Megatron's files.
  static constexpr std::array<std::string_view, 3> kSides = {"megatron_te_saved", "megatron_te",
                                                             "megatron"};
  return kSides;
}

}  // namespace shardwright::checkpoints::megatron
