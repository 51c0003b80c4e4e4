// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/write/new_run.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/names.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::megatron {
namespace {

/// Parses a finite number.
std::optional<double> RateOf(std::string_view text) {
  const auto rate = NumberIn<double>(text);
  return rate && std::isfinite(*rate) ? rate : std::nullopt;
}

/// Checks that one group of Megatron's can have the options of all groups.
Status CheckOneGroup(const Checkpoint& source) {
  const Group* first = nullptr;
  for (const Group& group : source.groups) {
    if (group.params.empty()) continue;
    if (first == nullptr) first = &group;
    if (group.hyper.betas == first->hyper.betas && group.hyper.eps == first->hyper.eps) continue;
    return Fail(Errc::kUnsupported, "lr: ", Quoted(source.params[first->params.front()].name),
                " and ", Quoted(source.params[group.params.front()].name),
                " have other betas or eps; Megatron has the same for all parameters");
  }
  return {};
}

}  // namespace

bool IsOfMegatron(const Checkpoint& source) {
  const auto* own = dynamic_cast<const RunState*>(source.own.get());
  return own != nullptr && !own->noted;
}

std::uint64_t HiddenSize(const Checkpoint& source) {
  const auto embedding = std::ranges::find(source.params, kEmbedding, &Param::name);
  const bool found = embedding != source.params.end() && embedding->shape.size() == 2;
  return found ? embedding->shape[1] : 0;
}

std::uint64_t KnownSize(const Checkpoint& source, const char* key) {
  const auto size = source.facts.find(key);
  return size == source.facts.end() ? 0 : NumberIn<std::uint64_t>(size->second).value_or(0);
}

Result<std::optional<NewRun>> NewRunOf(const TargetSpec& spec, const Checkpoint& source) {
  const std::string* rate = spec.Find("lr");
  if (rate == nullptr) {
    for (const std::string_view key : {"min_lr", "heads", "samples"}) {
      if (spec.Find(key) == nullptr) continue;
      return Fail(Errc::kUsage, "target ", key, ": add lr, the --lr of the run that resumes");
    }
    const auto* from = dynamic_cast<const MegatronLayout*>(source.layout.own.get());
    return from == nullptr || source.states.empty() ? std::nullopt : from->run;
  }
  if (IsOfMegatron(source)) {
    return Fail(Errc::kUnsupported, "lr: ", source.tag,
                " has the learning rates and the schedule of a Megatron run; leave lr out");
  }
  if (source.states.empty()) {
    return Fail(Errc::kUnsupported, "lr: ", source.tag,
                " has no optimizer state; leave lr out and load the weights with --finetune");
  }
  if (source.states != std::vector<std::string>{"exp_avg", "exp_avg_sq"}) {
    return Fail(Errc::kUnsupported, "lr: Megatron-LM resumes Adam, with exp_avg and exp_avg_sq; ",
                source.tag, " has ", Joined(source.states, ", "));
  }
  if (!source.iteration || *source.iteration == 0) {
    return Fail(Errc::kUnsupported, "lr: ", source.tag,
                ": Megatron-LM resumes an iteration from 1 on, and ",
                (source.iteration ? "it is 0" : source.iteration.error().message));
  }
  if (HiddenSize(source) == 0) {
    return Fail(Errc::kUnsupported, "lr: ", source.tag, " has no ", Quoted(kEmbedding),
                ", so its names are not those of Megatron's GPT; --map translates names");
  }
  SW_TRY(CheckOneGroup(source));
  NewRun run;
  run.max_rate = RateOf(*rate).value_or(0);
  if (const std::string* least = spec.Find("min_lr")) run.min_rate = RateOf(*least).value_or(0);
  if (run.min_rate > run.max_rate) {
    return Fail(Errc::kUsage, "target min_lr=", *spec.Find("min_lr"), ": more than lr=", *rate);
  }
  const std::uint64_t heads = KnownSize(source, kHeadsFact);
  run.heads = spec.NumberOr("heads", heads);
  if (heads > 0 && run.heads != heads) {
    return Fail(Errc::kUsage, "target heads=", run.heads, ": the model has ", heads,
                " attention heads, by the map or the checkpoint");
  }
  if (run.heads == 0) {
    return Fail(Errc::kUsage, "target lr: add heads=N, the --num-attention-heads of the run; ",
                source.tag, " does not record it");
  }
  run.samples = spec.NumberOr("samples", source.consumed_samples.value_or(0));
  if (run.samples == 0) {
    return Fail(Errc::kUsage, "target lr: add samples=N, the samples of its ", *source.iteration,
                " iterations (iterations x global batch size); ", source.tag,
                " does not record them");
  }
  return run;
}

Status CheckRate(std::string_view key, std::string_view value) {
  const auto rate = RateOf(value);
  if (rate && (key == "lr" ? *rate > 0 : *rate >= 0)) return {};
  return Fail(Errc::kUsage, "target ", key, "=", value, ": a learning rate expected, such as 3e-4");
}

}  // namespace shardwright::checkpoints::megatron
