// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/quantized.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace shardwright::checkpoints {
namespace {

using Names = std::set<std::string, std::less<>>;

Names Found(const std::vector<NamedTensor>& tensors) { return QuantizationTensors(tensors); }

TEST(Quantized, BlockAndTensorScalesOfFp8) {
  EXPECT_EQ(Found({{"l.q_proj.weight", DType::kF8E4M3, {8, 8}},
                   {"l.q_proj.weight_scale_inv", DType::kF32, {1, 1}},
                   {"l.q_proj.input_scale", DType::kF32, {}},
                   {"l.q_proj.bias", DType::kBF16, {8}},
                   {"l.norm.weight", DType::kBF16, {8}}}),
            (Names{"l.q_proj.weight_scale_inv", "l.q_proj.input_scale"}));
}

TEST(Quantized, FusedExperts) {
  EXPECT_EQ(Found({{"mlp.experts.gate_up_proj_blocks", DType::kU8, {2, 8, 4}},
                   {"mlp.experts.gate_up_proj_scales", DType::kU8, {2, 8}},
                   {"mlp.experts.gate_up_proj_bias", DType::kBF16, {2, 8}},
                   {"mlp.experts.down_proj", DType::kF8E4M3, {2, 8, 8}},
                   {"mlp.experts.down_proj_scale", DType::kBF16, {2, 8, 1}}}),
            (Names{"mlp.experts.gate_up_proj_scales", "mlp.experts.down_proj_scale"}));
}

TEST(Quantized, GptqAndAwq) {
  EXPECT_EQ(Found({{"a.o.qweight", DType::kI32, {4, 8}},
                   {"a.o.qzeros", DType::kI32, {1, 1}},
                   {"a.o.scales", DType::kF16, {1, 8}},
                   {"a.o.g_idx", DType::kI32, {32}},
                   {"a.n.weight", DType::kF16, {8}}}),
            (Names{"a.o.qzeros", "a.o.scales", "a.o.g_idx"}));
}

TEST(Quantized, Bitsandbytes) {
  EXPECT_EQ(Found({{"a.weight", DType::kU8, {32, 1}},
                   {"a.weight.absmax", DType::kF32, {1}},
                   {"a.weight.quant_map", DType::kF32, {16}},
                   {"a.weight.quant_state.bitsandbytes__nf4", DType::kU8, {90}},
                   {"b.weight", DType::kI8, {8, 8}},
                   {"b.SCB", DType::kF32, {8}}}),
            (Names{"a.weight.absmax", "a.weight.quant_map",
                   "a.weight.quant_state.bitsandbytes__nf4", "b.SCB"}));
}

TEST(Quantized, OthersWithNamesOfTheirOwn) {
  EXPECT_EQ(Found({{"x.weight_packed", DType::kI32, {8, 1}},
                   {"x.weight_scale", DType::kBF16, {8, 1}},
                   {"x.weight_global_scale", DType::kF32, {1}},
                   {"y.W_q", DType::kU8, {8}},
                   {"y.zero", DType::kF16, {1}},
                   {"z.weight._data", DType::kI8, {8, 8}},
                   {"z.weight._scale", DType::kF16, {8, 1}},
                   {"z.input_scale", DType::kF32, {1}},
                   {"a.attn.k_scale", DType::kF32, {1}}}),
            (Names{"x.weight_scale", "x.weight_global_scale", "y.zero", "z.weight._scale",
                   "z.input_scale", "a.attn.k_scale"}));
}

TEST(Quantized, NothingWithoutQuantizedWeights) {
  EXPECT_TRUE(Found({{"block.weight", DType::kF32, {8, 8}},
                     {"block.scale", DType::kF32, {8}},
                     {"bn.num_batches_tracked", DType::kI64, {}},
                     {"bn.weight", DType::kF32, {8}},
                     {"mask", DType::kU8, {8}},
                     {"logit_scale", DType::kF32, {}}})
                  .empty());
}

TEST(Quantized, TrainedScalesOfOtherModulesAreTrained) {
  EXPECT_EQ(Found({{"q.weight", DType::kF8E4M3, {8, 8}},
                   {"q.weight_scale", DType::kF32, {}},
                   {"gate.scale", DType::kF32, {8}},
                   {"logit_scale", DType::kF32, {}},
                   {"quality.weight", DType::kF32, {8}}}),
            Names{"q.weight_scale"});
}

}  // namespace
}  // namespace shardwright::checkpoints
