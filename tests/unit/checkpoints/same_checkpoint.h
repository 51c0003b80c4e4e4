// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/target.h"
#include "checkpoints/deepspeed/universal/universal.h"
#include "checkpoints/registry.h"
#include "fixtures.h"

namespace shardwright::checkpoints {

inline bool SameNode(const pickle::Node* a, const pickle::Node* b) {
  if (a == nullptr || b == nullptr) return a == b;
  if (a->kind != b->kind || a->integer != b->integer || a->text != b->text ||
      a->items.size() != b->items.size() || a->list_items.size() != b->list_items.size() ||
      a->dict_items.size() != b->dict_items.size()) {
    return false;
  }
  if (!(a->real == b->real || (std::isnan(a->real) && std::isnan(b->real)))) return false;
  if (a->kind == pickle::Kind::kTensor) return a->tensor->shape == b->tensor->shape;
  const auto all = [](const std::vector<const pickle::Node*>& x,
                      const std::vector<const pickle::Node*>& y) {
    return std::equal(x.begin(), x.end(), y.begin(), SameNode);
  };
  return all(a->items, b->items) && all(a->list_items, b->list_items) &&
         all(a->dict_items, b->dict_items) && SameNode(a->callable, b->callable) &&
         SameNode(a->args, b->args) && SameNode(a->state, b->state);
}

/// A folder that is removed after the test.
class Scratch {
 public:
  Scratch() {
    std::string name = (fs::temp_directory_path() / "sw-same-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Scratch() { fs::remove_all(path_); }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

inline Result<Checkpoint> Read(const fs::path& root) {
  SW_TRY_ASSIGN(const SourceSet source, ScanSource({root.string()}));
  Patterns patterns;
  SW_TRY(patterns.AddBuiltIn());
  return ReadCheckpoint(source, patterns);
}

inline void ExpectSameParams(const Checkpoint& before, const Checkpoint& after) {
  ASSERT_EQ(before.params.size(), after.params.size());
  for (std::size_t i = 0; i < before.params.size(); ++i) {
    const Param& a = before.params[i];
    const Param& b = after.params[i];
    ASSERT_EQ(a.name, b.name);
    EXPECT_EQ(a.kind, b.kind) << a.name;
    EXPECT_EQ(a.shape, b.shape) << a.name;
    EXPECT_EQ(a.dtype, b.dtype) << a.name;
    EXPECT_EQ(a.alias_of, b.alias_of) << a.name;
    EXPECT_EQ(a.layer, b.layer) << a.name;
    EXPECT_EQ(a.tied_layers, b.tied_layers) << a.name;
    ASSERT_EQ(a.expert.has_value(), b.expert.has_value()) << a.name;
    if (a.expert) {
      EXPECT_EQ(a.expert->layer, b.expert->layer) << a.name;
      EXPECT_EQ(a.expert->expert, b.expert->expert) << a.name;
    }
    if (!a.alias_of.empty()) continue;
    EXPECT_EQ(a.group, b.group) << a.name;
    EXPECT_EQ(a.scalars, b.scalars) << a.name;
    EXPECT_EQ(a.rule.split, b.rule.split) << a.name;
    EXPECT_EQ(a.rule.dim, b.rule.dim) << a.name;
    EXPECT_EQ(a.rule.widths, b.rule.widths) << a.name;
  }
}

inline void ExpectSameGroups(const Checkpoint& before, const Checkpoint& after) {
  ASSERT_EQ(before.groups.size(), after.groups.size());
  for (std::size_t g = 0; g < before.groups.size(); ++g) {
    EXPECT_EQ(before.groups[g].moe, after.groups[g].moe);
    EXPECT_EQ(before.groups[g].params, after.groups[g].params);
    EXPECT_TRUE(SameNode(before.groups[g].options, after.groups[g].options)) << "group " << g;
  }
}

inline void ExpectSameTensors(const Checkpoint& before, const Checkpoint& after) {
  ASSERT_TRUE(layout::Validate(after.map).has_value())
      << layout::Validate(after.map).error().message;
  EXPECT_EQ(before.states, after.states);
  const layout::TensorIndex index(after.map);
  Gatherer gather_before(before.map);
  Gatherer gather_after(after.map);
  std::size_t expected = 0;
  for (const layout::LogicalTensor& tensor : before.map.tensors) {
    if (tensor.state == "weight") continue;
    ++expected;
    const auto found = index.Find(tensor.name, tensor.state);
    ASSERT_TRUE(found.has_value()) << tensor.name << " " << tensor.state;
    const layout::LogicalTensor& again = after.map.tensors[*found];
    EXPECT_EQ(tensor.dtype, again.dtype) << tensor.name << " " << tensor.state;
    EXPECT_EQ(tensor.shape, again.shape) << tensor.name << " " << tensor.state;
    EXPECT_EQ(gather_before.Whole(tensor), gather_after.Whole(again))
        << tensor.name << " " << tensor.state;
  }
  EXPECT_EQ(after.map.tensors.size(), expected);
}

inline void ExpectSameClient(const Checkpoint& before, const Checkpoint& after) {
  const EngineState& first = *EngineStateOf(before);
  const EngineState& second = *EngineStateOf(after);
  ASSERT_EQ(first.model_states.size(), second.model_states.size());
  for (std::size_t mp = 0; mp < first.model_states.size(); ++mp) {
    const pickle::Node* a = first.model_states[mp].document.root;
    const pickle::Node* b = second.model_states[mp].document.root;
    for (const char* key : {"note", "consumed", "lr_scheduler", "global_steps", "global_samples",
                            "skipped_steps", "ds_version", "ds_config", "mp_world_size"}) {
      EXPECT_TRUE(SameNode(a->Find(key), b->Find(key))) << key;
    }
  }
}

inline void ExpectSameTopology(const Topology& a, const Topology& b) {
  EXPECT_EQ(a.zero, b.zero);
  EXPECT_EQ(a.dp, b.dp);
  EXPECT_EQ(a.tp, b.tp);
  EXPECT_EQ(a.pp, b.pp);
  EXPECT_EQ(a.ep, b.ep);
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.bf16_optimizer, b.bf16_optimizer);
  EXPECT_EQ(a.sub_group, b.sub_group);
  EXPECT_EQ(a.round_robin, b.round_robin);
  EXPECT_EQ(a.pipeline, b.pipeline);
  EXPECT_EQ(a.stages, b.stages);
}

}  // namespace shardwright::checkpoints
