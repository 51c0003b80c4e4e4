// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>

#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "engine/layout/states.h"

namespace shardwright::checkpoints::megatron {
namespace {

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

Writing::Writing(const Checkpoint& from, const MegatronLayout& layout)
    : source(from),
      to(layout),
      args(TargetArgs(from, layout)),
      items(builder),
      has_optimizer(HasOptimizer(from)),
      keeps_random(KeepsRandom(from, layout)),
      index_of_source_(from.map) {
  char text[40];
  std::snprintf(text, sizeof text, "iter_%07llu",
                static_cast<unsigned long long>(from.iteration ? *from.iteration : 0));
  tag = text;
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const Param& param : from.params) {
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  if (const Result<bool> gated = IsGated(names, shapes)) rules_.emplace(args, *gated);
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

std::vector<std::string> Writing::Left() const {
  const RunState* own = RunStateOf(source);
  std::vector<std::string> left;
  if (own == nullptr) {
    if (source.own != nullptr) left = source.own->Contents();
    if (has_optimizer) {
      left.emplace_back(
          "the arguments and the learning rate schedule of a Megatron run, so Megatron-LM loads "
          "the "
          "weights alone (--finetune); Megatron-Core's dist_checkpointing loads the optimizer, "
          "too");
    }
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
