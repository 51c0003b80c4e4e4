// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/read/dist_internal.h"
#include "engine/layout/states.h"

// Reads the parameters in each group of the optimizer, and
// their step. No form stores parameter names in groups.

namespace shardwright::checkpoints::megatron {

using pickle::Node;

/// Returns one dict for each chained optimizer, dense parameters first. With
/// buckets they are separate objects, otherwise parts of the common state.
Result<std::vector<const Node*>> Dist::PartsOfOptimizer() {
  std::vector<const Node*> parts;
  const Node* common = common_.value->Find("optimizer");
  // NeMo stores a list of optimizers but uses only one.
  if (common != nullptr && common->is_list() && common->items.size() == 1)
    common = common->items[0];
  const bool chained = FindInt(common, 0) != nullptr;
  if (form_ == OptimizerForm::kDpReshardable) {
    for (std::uint64_t part = 0; part < (chained ? 2U : 1U); ++part) {
      BucketKey key;
      key.part = part;
      key.chained = chained;
      key.slot = "optimizer";
      const std::string name = BucketKeyText(key) + "/shard_0_1";
      const auto object = objects_.find(name);
      if (object == objects_.end()) {
        return Fail(Errc::kUnsupported, tag(), ": no \"", name,
                    "\": unknown form of optimizer state");
      }
      SW_TRY_ASSIGN(const Object groups, OnlyOf(name, object->second->at));
      // The checkpoint keeps the document, which owns the nodes, with the common state.
      kept_.push_back(groups.document);
      parts.push_back(groups.value);
    }
    return parts;
  }
  if (!chained) return std::vector<const Node*>{common};
  for (std::int64_t part = 0; FindInt(common, part) != nullptr; ++part) {
    parts.push_back(FindInt(common, part));
  }
  return parts;
}

Status Dist::ReadGroups() {
  SW_TRY_ASSIGN(const std::vector<const Node*> parts, PartsOfOptimizer());
  const bool chained = parts.size() > 1;
  if (parts.size() > 2) {
    return Fail(Errc::kUnsupported, tag(), ": at most 2 chained optimizers supported, found ",
                parts.size());
  }
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const Node* inner = FindIn(parts[part], "optimizer");
    SW_TRY(SetGroups(part, chained, inner == nullptr ? parts[part] : inner));
    SW_TRY(AddScaler(part, chained, parts[part]));
  }
  for (const Param& param : collector_.out.params) {
    if (param.kind != ParamKind::kTrainable || param.group >= 0) continue;
    return Fail(Errc::kUnsupported, "\"", param.name, "\": no optimizer has it");
  }
  std::string& name = collector_.out.optimizer;
  name = args_.optimizer;
  if (name == "adam") name = "adamw";  // Megatron's Adam has decoupled weight decay
  return {};
}

/// Adds a loss scaler's state. With buckets it is an object, otherwise a part of the common state.
Status Dist::AddScaler(std::size_t part, bool chained, const Node* optimizer) {
  constexpr const char* kScaler = "grad_scaler";
  Object object = common_;
  object.value = FindIn(optimizer, kScaler);
  if (form_ == OptimizerForm::kDpReshardable) {
    BucketKey key;
    key.part = part;
    key.chained = chained;
    key.slot = kScaler;
    object.value = nullptr;
    const auto found = objects_.find(BucketKeyText(key) + "/shard_0_1");
    if (found != objects_.end()) {
      SW_TRY_ASSIGN(object, OnlyOf(found->first, found->second->at));
    }
  }
  scalers_.push_back(object.value == nullptr ? Value() : ValueAt(object));
  return {};
}

Status Dist::SetGroups(std::size_t part, bool chained, const Node* inner) {
  Checkpoint& out = collector_.out;
  std::vector<Local> locals;
  for (std::uint32_t i = 0; i < out.params.size(); ++i) {
    const Param& param = out.params[i];
    if (param.kind != ParamKind::kTrainable) continue;
    if (chained && param.expert.has_value() != (part == 1)) continue;
    locals.push_back({i, param.shape, param.dtype});
  }
  const Node* groups = FindIn(inner, "param_groups");
  SW_TRY_ASSIGN(const auto shared, ShareOut(args_, out, locals, groups, tag() + ": optimizer"));
  std::optional<Scalar> common;
  const Node* step = FindIn(FindIn(inner, "state"), "common_step");
  if (step != nullptr && step->is_tensor()) {
    SW_TRY_ASSIGN(common, ScalarOf(source_.files[common_.file].containers[common_.container],
                                   *common_.document, step, tag() + ": common_step"));
  } else if (step != nullptr) {
    SW_TRY_ASSIGN(const double value, pickle::AsFloat(step));
    common = StepScalar(value);
  }
  for (std::size_t g = 0; g < shared.size(); ++g) {
    if (shared[g].empty()) continue;
    const std::uint32_t group =
        groups_.Of(*out.arena, groups->items[g], chained && part == 1, &out.groups);
    const auto own = out.groups[group].hyper.step;
    for (const std::size_t i : shared[g]) {
      Param& param = out.params[locals[i].param];
      param.group = static_cast<std::int32_t>(group);
      if (own) {
        param.scalars = {StepScalar(*own)};
      } else if (common) {
        param.scalars = {*common};
      }
    }
  }
  return {};
}

}  // namespace shardwright::checkpoints::megatron
