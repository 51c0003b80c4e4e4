// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "checkpoints/deepspeed/native/write/write_internal.h"
#include "engine/tensor/shape.h"

namespace shardwright::checkpoints::deepspeed {

using pickle::Arena;
using pickle::Kind;
using pickle::Node;

namespace {

// Files have the form of this DeepSpeed release if an old source does not name its release.
constexpr const char* kFormVersion = "0.19.8";

constexpr const char* kScaler = "deepspeed.runtime.fp16.loss_scaler.LossScaler";
constexpr const char* kDynamicScaler = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler";

const Node* Child(const Node* node, std::string_view key) {
  return node == nullptr ? nullptr : node->Find(key);
}

double FloatOr(const Node* node, double fallback) {
  const auto value = pickle::AsFloat(node);
  return value ? *value : fallback;
}

std::int64_t IntOr(const Node* node, std::int64_t fallback) {
  const auto value = pickle::AsInt(node);
  return value ? *value : fallback;
}

bool IsTrue(const Node* node) {
  return node != nullptr && node->kind == Kind::kBool && node->integer != 0;
}

}  // namespace

const Node* Document::Add(const Cutting& cutting, DType dtype, Shape shape, bool requires_grad) {
  cuttings.push_back(cutting);
  return AddTensor(static_cast<std::uint32_t>(cuttings.size() - 1), dtype, std::move(shape),
                   requires_grad);
}

LossScale LossScaleOf(const Geometry& geometry) {
  LossScale scale;
  const Node* model = geometry.model_states[0].document.root;
  scale.iteration = IntOr(model->Find("global_steps"), 0);
  if (geometry.to.dtype != DType::kF16) return scale;
  const Node* config = Child(model->Find("ds_config"), "fp16");
  if (geometry.from.dtype == DType::kF16) {
    const Passed* passed = geometry.PassedOptimizer(0);
    const Node* root = passed == nullptr ? nullptr : passed->document.root;
    const Node* object = Child(root, "loss_scaler");
    const bool is_object = object != nullptr && object->kind == Kind::kObject;
    const Node* fields = is_object ? object->state : root;
    scale.object = is_object ? object : nullptr;
    scale.dynamic = IsTrue(Child(fields, is_object ? "dynamic" : "dynamic_loss_scale"));
    scale.scale = FloatOr(Child(fields, "cur_scale"), 1.0);
    scale.iteration = IntOr(Child(fields, "cur_iter"), scale.iteration);
    scale.last_overflow = IntOr(Child(fields, "last_overflow_iter"), -1);
    scale.factor = FloatOr(Child(fields, "scale_factor"), 2.0);
    scale.window = IntOr(Child(fields, "scale_window"), 1000);
    if (Child(fields, "cur_scale") != nullptr) return scale;
  }
  // A run that starts to scale its loss uses its configuration, or DeepSpeed's default.
  const double fixed = FloatOr(Child(config, "loss_scale"), 0.0);
  scale.dynamic = fixed == 0.0;
  const double power = FloatOr(Child(config, "initial_scale_power"), 16.0);
  scale.scale = scale.dynamic ? std::exp2(power) : fixed;
  scale.window = IntOr(Child(config, "loss_scale_window"), 1000);
  return scale;
}

const Node* LossScalerNode(Arena& arena, const LossScale& scale) {
  if (scale.object != nullptr) return scale.object;
  Node* fields = arena.Dict();
  Set(arena, fields, "cur_scale", arena.Float(scale.scale));
  Set(arena, fields, "dynamic", arena.Bool(scale.dynamic));
  if (!scale.dynamic) return arena.Object(kScaler, fields);
  Set(arena, fields, "cur_iter", arena.Int(scale.iteration));
  Set(arena, fields, "last_overflow_iter", arena.Int(scale.last_overflow));
  Set(arena, fields, "scale_factor", arena.Float(scale.factor));
  Set(arena, fields, "scale_window", arena.Int(scale.window));
  Set(arena, fields, "min_scale", arena.Float(1.0));
  Set(arena, fields, "delayed_shift", arena.Int(2));
  Set(arena, fields, "cur_hysteresis", arena.Int(2));
  Set(arena, fields, "consecutive_hysteresis", arena.Bool(false));
  Set(arena, fields, "raise_error_at_min_scale", arena.Bool(true));
  Set(arena, fields, "dtype", arena.Global("torch.float16"));
  return arena.Object(kDynamicScaler, fields);
}

namespace {

/// Returns a section of the configuration to modify: a copy of the source's, or a new one.
Node* Section(Arena& arena, Node* config, std::string_view key) {
  const Node* old = config->Find(key);
  Node* section = old != nullptr && old->is_dict() ? CopyDict(arena, old) : arena.Dict();
  Set(arena, config, key, section);
  return section;
}

void SetEnabled(Arena& arena, Node* config, std::string_view key, bool enabled) {
  if (!enabled && config->Find(key) == nullptr) return;
  Set(arena, Section(arena, config, key), "enabled", arena.Bool(enabled));
}

}  // namespace

const Node* ConfigNode(Arena& arena, const Geometry& geometry, const Node* config) {
  if (config == nullptr || !config->is_dict()) return config;
  const Topology& to = geometry.to;
  Node* changed = CopyDict(arena, config);
  Node* zero = Section(arena, changed, "zero_optimization");
  Set(arena, zero, "stage", arena.Int(static_cast<std::int64_t>(to.zero)));
  if (to.round_robin || zero->Find("round_robin_gradients") != nullptr) {
    Set(arena, zero, "round_robin_gradients", arena.Bool(to.round_robin));
  }
  if (to.zero == 3) {
    Set(arena, zero, "sub_group_size", arena.Int(static_cast<std::int64_t>(to.sub_group)));
  }
  const std::string_view bf16 = config->Find("bfloat16") != nullptr ? "bfloat16" : "bf16";
  SetEnabled(arena, changed, bf16, to.dtype == DType::kBF16);
  SetEnabled(arena, changed, "fp16", to.dtype == DType::kF16);
  if (changed->Find("tensor_parallel") != nullptr) {
    Set(arena, Section(arena, changed, "tensor_parallel"), "autotp_size",
        arena.Int(static_cast<std::int64_t>(to.tp)));
  }
  return changed;
}

const Node* VersionNode(Arena& arena, const Geometry& geometry, const Node* model_root) {
  const Node* version = Child(model_root, "ds_version");
  if (version != nullptr && version->is_string() && !version->text.empty()) return version;
  const Passed* passed = geometry.PassedOptimizer(0);
  if (passed != nullptr) version = passed->document.root->Find("ds_version");
  if (version != nullptr && version->is_string() && !version->text.empty()) return version;
  return arena.String(kFormVersion);
}

Result<std::unique_ptr<Document>> BuildDocument(const Geometry& geometry, const FileId& id) {
  auto document = std::make_unique<Document>();
  Status built;
  switch (id.kind) {
    case FileKind::kModel:
      built = BuildModel(*document, geometry, id);
      break;
    case FileKind::kOptimizer:
      built = geometry.to.zero == 3 ? BuildZero3(*document, geometry, id)
                                    : BuildZero12(*document, geometry, id);
      break;
    case FileKind::kLayer:
      built = BuildLayer(*document, geometry, id);
      break;
    case FileKind::kExpert:
      built = BuildExpert(*document, geometry, id);
      break;
    case FileKind::kExpertOptimizer:
      built = BuildExpertOptimizer(*document, geometry, id);
      break;
  }
  if (!built) return Within(geometry.PathOf(id), std::move(built).error());
  return document;
}

}  // namespace shardwright::checkpoints::deepspeed
