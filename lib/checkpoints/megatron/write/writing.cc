// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>

#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/write/new_run.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {
namespace {

/// Returns the tag folder, which the tracker file names: Megatron-LM accepts no iteration 0.
std::string TagFor(const Checkpoint& source) {
  const std::string text = TrackerText(source);
  const Result<std::string> tag = TagOf(text);
  SW_CHECK(tag.has_value());
  return *tag;
}

bool HasOptimizer(const Checkpoint& source) {
  return !source.states.empty() &&
         std::any_of(source.map.tensors.begin(), source.map.tensors.end(),
                     [](const auto& tensor) { return tensor.state == layout::kMaster; });
}

/// Returns true if the source has every rank of the target, so that random states can continue.
bool KeepsRandom(const Checkpoint& source, const MegatronLayout& to) {
  const RunState* own = RunStateOf(source);
  if (own == nullptr) return false;
  for (std::uint64_t p = 0; p < to.mesh.pp; ++p) {
    for (std::uint64_t t = 0; t < to.mesh.tp; ++t) {
      const auto found = own->random.find({p, t});
      if (found == own->random.end()) return false;
      // One state for all data-parallel ranks, or one for each.
      const pickle::Node* list = found->second.root;
      const std::size_t states = list->is_list() ? list->items.size() : 1;
      if (states != 1 && states < to.mesh.dp()) return false;
    }
  }
  return true;
}

}  // namespace

std::string TrackerText(const Checkpoint& source) {
  const bool resumes = source.iteration && *source.iteration > 0;
  return resumes ? std::to_string(*source.iteration) : std::string(kRelease);
}

Writing::Writing(const Checkpoint& from, const MegatronLayout& layout)
    : source(from),
      to(layout),
      args(TargetArgs(from, layout)),
      items(builder),
      has_optimizer(HasOptimizer(from)),
      keeps_random(KeepsRandom(from, layout)),
      index_of_source_(from.map) {
  tag = TagFor(from);
  groups = to.run ? GroupsOfNewRun() : from.groups;
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const Param& param : from.params) {
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  if (const Result<bool> gated = IsGated(names, shapes)) rules_.emplace(args, *gated);
}

std::vector<Group> Writing::GroupsOfNewRun() {
  std::vector<Group> made(2);
  for (const bool decays : {true, false}) {
    Group& group = made[decays ? 0 : 1];
    bool found = false;  // a group of the source to take the betas and eps from
    for (const Group& from : source.groups) {
      if (from.params.empty()) continue;
      const bool has_decay = from.hyper.weight_decay.value_or(0.0) != 0;
      if (!found || has_decay == decays) group.hyper = from.hyper;
      found = true;
    }
    group.options = NewOptions(arena_, group.hyper, to.run->max_rate, to.run->min_rate, decays);
  }
  for (std::uint32_t i = 0; i < source.params.size(); ++i) {
    const Param& param = source.params[i];
    if (param.group < 0 || !param.alias_of.empty()) continue;
    made[HasDecay(args, param.name, param.shape) ? 0 : 1].params.push_back(i);
  }
  return made;
}

Whole Writing::WholeFor(const Param& param) const {
  Whole whole;
  whole.shape = param.shape;
  whole.rule = param.rule;
  if (whole.rule.split == layout::Split::kUnknown && rules_) {
    const auto ruled = rules_->RuleFor(param.name, std::span(&param.shape, 1));
    if (ruled && *ruled) whole.rule = (*ruled)->rule;
  }
  whole.rule.padded =
      IsOfVocabulary(param.name) && RunStateOf(source) != nullptr && !param.shape.empty();
  if (!whole.rule.padded) return whole;
  const std::uint64_t multiple = args.vocab_multiple * to.mesh.tp;
  const std::uint64_t all = (param.shape[0] + multiple - 1) / multiple * multiple;
  // Without the true size, existing rows are kept unchanged.
  if (args.vocab) whole.padding = all - param.shape[0];
  return whole;
}

const layout::LogicalTensor* Writing::SourceTensor(const std::string& name,
                                                   std::string_view state) const {
  const auto found = index_of_source_.Find(name, state);
  return found ? &source.map.tensors[*found] : nullptr;
}

std::uint32_t Writing::TensorOf(const std::string& name, bool padding, std::string_view state,
                                DType dtype, const Shape& shape) {
  std::string text = padding ? layout::PaddingOf(state) : std::string(state);
  const auto [at, fresh] = tensors_.try_emplace({name, text}, 0);
  if (fresh) at->second = builder.AddTensor(name, text, dtype, shape);
  return at->second;
}

bool Writing::KeepsPadding(const Param& param, std::string_view state, const Shape& padding) const {
  const layout::LogicalTensor* kept = SourceTensor(param.name, layout::PaddingOf(state));
  return kept != nullptr && kept->shape == padding;
}

std::vector<std::string> Writing::Warnings() const {
  if (IsOfMegatron(source) || !has_optimizer || to.run) return {};
  return {
      "Megatron-LM loads only the weights of this output (--finetune), because it does not have "
      "the arguments and the schedule of a Megatron run; --target lr=RATE,min_lr=RATE adds what "
      "Megatron-LM needs to resume the optimizer"};
}

std::vector<std::string> Writing::Left() const {
  const RunState* own = RunStateOf(source);
  std::vector<std::string> left;
  if (own == nullptr) {
    if (source.own != nullptr) left = source.own->Contents();
    return left;
  }
  if (!own->random.empty() && !keeps_random) {
    left.emplace_back(to.files == Files::kTorch ? "random states: new ranks get those of the first"
                                                : "random states: there are none for new ranks");
  } else if (own->random.size() > to.mesh.tp * to.mesh.pp) {
    left.emplace_back("random states of ranks that the target does not have");
  }
  if (to.files == Files::kTorchDist && own->modules.contains(std::string(kOutputState)) &&
      !HasExtraState(source, kOutputState)) {
    left.push_back("\"" + std::string(kOutputState) + "\"");
  }
  for (const std::string& name : own->extra) left.push_back("\"" + name + "\"");
  return left;
}

}  // namespace shardwright::checkpoints::megatron
