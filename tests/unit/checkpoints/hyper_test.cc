// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/hyper.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "checkpoints/registry.h"
#include "engine/layout/states.h"
#include "files/dcp/index.h"
#include "support/base/crc32.h"
#include "write_model.h"

namespace shardwright::checkpoints {
namespace {

using pickle::Node;

std::string FloatBytes(float value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

Scalar TensorOf(const std::string& place, float value) {
  Scalar tensor;
  tensor.state = place;
  tensor.is_tensor = true;
  tensor.bytes = FloatBytes(value);
  return tensor;
}

const Node* TensorNode(pickle::Arena* arena, Shape shape) {
  pickle::Tensor tensor;
  tensor.strides = ContiguousStrides(shape);
  tensor.shape = std::move(shape);
  return arena->TensorOf(std::move(tensor));
}

TEST(Hyper, TensorsAreReadAsNumbers) {
  pickle::Arena arena;
  Node* options = arena.Dict();
  Set(arena, options, "lr", TensorNode(&arena, {}));
  Set(arena, options, "betas", arena.Tuple({TensorNode(&arena, {1}), arena.Float(0.75)}));
  Set(arena, options, "eps", arena.Float(0.5));
  const auto tensors =
      TensorOptions(options, [](const Node*) -> Result<std::string> { return FloatBytes(0.25F); });
  ASSERT_EQ(tensors.size(), 2U);
  EXPECT_EQ(tensors[1].state, "betas.0");
  EXPECT_EQ(UnreadTensor(options, tensors), "");
  const HyperParams hyper = HyperOf(options, tensors);
  EXPECT_EQ(hyper.lr, 0.25);
  EXPECT_EQ(hyper.betas, (std::pair{0.25, 0.75}));
  EXPECT_EQ(hyper.eps, 0.5);
  const Node* plain = PlainOptions(options, tensors, &arena);
  EXPECT_EQ(plain->Find("lr")->real, 0.25);
  EXPECT_EQ(plain->Find("betas")->items[0]->real, 0.25);
  EXPECT_EQ(plain->Find("betas")->items[1]->real, 0.75);
  EXPECT_TRUE(options->Find("lr")->is_tensor()) << "the source's own options stay";
}

TEST(Hyper, WhatIsNotReadIsNamed) {
  pickle::Arena arena;
  Node* options = arena.Dict();
  Set(arena, options, "scales", TensorNode(&arena, {3}));
  const auto tensors =
      TensorOptions(options, [](const Node*) -> Result<std::string> { return std::string(); });
  EXPECT_TRUE(tensors.empty());
  EXPECT_EQ(UnreadTensor(options, tensors), "scales");
  EXPECT_FALSE(HyperOf(options, tensors).lr);
}

/// Converts a checkpoint to a DCP folder and returns its index.
shardwright::dcp::Index IndexOf(const Checkpoint& source, const std::string& target) {
  const Format* row = FindFormat("dcp");
  const auto spec = ParseTarget(*row, target);
  const auto layout = row->resolve(*spec, source);
  EXPECT_TRUE(layout) << layout.error().message;
  const auto written = row->write(source, *layout);
  EXPECT_TRUE(written) << written.error().message;
  for (const plan::OutputFile& file : written->target.files) {
    if (!file.path.ends_with(".metadata")) continue;
    std::string text(file.bytes, '\0');
    const Status put = file.frame({}, [&](std::uint64_t at, std::string_view bytes) -> Status {
      text.replace(at, bytes.size(), bytes);
      return {};
    });
    EXPECT_TRUE(put);
    auto index = shardwright::dcp::ReadIndex(text);
    EXPECT_TRUE(index) << index.error().message;
    return *std::move(index);
  }
  return {};
}

bool HasTensor(const shardwright::dcp::Index& index, std::string_view name) {
  for (const shardwright::dcp::Entry& entry : index.entries) {
    if (entry.name == name) return entry.is_tensor;
  }
  ADD_FAILURE() << name << " is not in the index";
  return false;
}

TEST(Hyper, DcpFoldersHaveTensorsWhereTheSourceHasThem) {
  test::Model model;
  model.Add("a.weight", {2, 3});
  Group& group = model.source().groups.front();
  group.tensors = {TensorOf("lr", 0.02F), TensorOf("betas.1", 0.5F)};
  pickle::Arena& arena = model.arena();
  Node* options = arena.Dict();
  Set(arena, options, "lr", arena.Float(0.02));
  Set(arena, options, "betas", arena.Tuple({arena.Float(0.9), arena.Float(0.5)}));
  Set(arena, options, "eps", arena.Float(1e-8));
  group.options = options;
  group.hyper = HyperOf(options);
  const auto nested = IndexOf(model.source(), "dp_shard=2");
  EXPECT_TRUE(HasTensor(nested, "optim.param_groups.0.lr"));
  EXPECT_TRUE(HasTensor(nested, "optim.param_groups.0.initial_lr"));
  EXPECT_FALSE(HasTensor(nested, "optim.param_groups.0.betas")) << "a tuple is one object";
  EXPECT_FALSE(HasTensor(nested, "optim.param_groups.0.eps"));
  Set(arena, options, "betas", arena.List({arena.Float(0.9), arena.Float(0.5)}));
  const auto lists = IndexOf(model.source(), "dp_shard=2");
  EXPECT_TRUE(HasTensor(lists, "optim.param_groups.0.betas.1"));
  EXPECT_FALSE(HasTensor(lists, "optim.param_groups.0.betas.0"));
  const auto flat = IndexOf(model.source(), "dp_shard=2,optimizer=flat");
  EXPECT_TRUE(HasTensor(flat, "optim.param_groups.a.weight.lr"));
}

TEST(Hyper, ParametersWithoutStateCountAsTrainedUnlessOnlyAdaptersHaveStates) {
  const std::vector<std::string> adapters = {"q.lora_A.default.weight"};
  const std::vector<std::string> base = {"q.base_layer.weight"};
  EXPECT_TRUE(AreFrozen(adapters, base));
  EXPECT_FALSE(AreFrozen(base, std::vector<std::string>{"head.weight"}));
  EXPECT_FALSE(AreFrozen(adapters, adapters));
  EXPECT_FALSE(AreFrozen(std::vector<std::string>(), base));
}

TEST(Hyper, WhatHasNoStateIsNamed) {
  test::Model model;
  model.Add("a.weight", {2, 3});
  model.Add("b.weight", {2});
  EXPECT_TRUE(StatelessLosses(model.source()).empty());
  std::erase_if(model.source().map.tensors, [](const layout::LogicalTensor& tensor) {
    return tensor.name == "b.weight" && !layout::IsModelState(tensor.state);
  });
  const std::vector<std::string> losses = StatelessLosses(model.source());
  ASSERT_EQ(losses.size(), 1U);
  EXPECT_NE(losses[0].find("b.weight"), std::string::npos) << losses[0];
}

TEST(Hyper, StepsThatAUniversalLoaderMixesUpAreNamed) {
  test::Model model;
  model.Add("a.weight", {2, 3});
  model.Add("b.weight", {2});
  model.Add("frozen.weight", {2}, -1);
  EXPECT_TRUE(StepLosses(model.source()).empty());
  model.source().params[1].scalars[0].bytes = std::string(4, '\0');
  const std::vector<std::string> losses = StepLosses(model.source());
  ASSERT_EQ(losses.size(), 1U);
  EXPECT_NE(losses[0].find("1 parameter"), std::string::npos) << losses[0];
  EXPECT_NE(losses[0].find("\"a.weight\""), std::string::npos) << losses[0];
  EXPECT_NE(losses[0].find("b.weight"), std::string::npos) << losses[0];
}

}  // namespace
}  // namespace shardwright::checkpoints
