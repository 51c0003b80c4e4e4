// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "checkpoints/model/checkpoint.h"
#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"

namespace shardwright::checkpoints {

/// Name, type and shape of a tensor in a file.
struct NamedTensor {
  std::string_view name;
  DType dtype = DType::kF32;
  Shape shape = {};
};

/// Returns the names of tensors that are needed to interpret quantized weights: scales, zero
/// points, tables and group indexes. Each belongs to a tensor of 8 bits or of packed integers:
/// it extends the name of this tensor, or is in the same module. Supports block and tensor
/// scales of fp8 and int8 (weight_scale_inv, weight_scale, input_scale), MXFP4 (_blocks,
/// _scales), NVFP4, GPTQ and AWQ (qweight, qzeros, scales, g_idx), compressed-tensors,
/// bitsandbytes (absmax, quant_map, SCB), HQQ and Quanto. Such a tensor is neither trained nor
/// converted to another type, because rounding it would change the value of its weight.
/// Pure.
std::set<std::string, std::less<>> QuantizationTensors(std::span<const NamedTensor> tensors);

/// Returns the warning for `count` such tensors.
std::string KeptWithWeights(std::size_t count);

/// Returns such names among the parameters and buffers of a checkpoint.
std::set<std::string, std::less<>> QuantizationTensors(const Checkpoint& checkpoint);

}  // namespace shardwright::checkpoints
