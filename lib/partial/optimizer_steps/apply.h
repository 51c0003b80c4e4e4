// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "engine/tensor/dtype.h"
#include "partial/optimizer_steps/square_roots.h"
#include "partial/optimizer_steps/step.h"
#include "support/base/result.h"

namespace shardwright::optimizer_steps {

/// The same range of elements of a parameter in float32, its states and its gradient.
struct Elements {
  std::span<float> param;
  std::array<std::span<float>, 3> states;  ///< in the order of StatesOf; the others are empty
  DType gradient_dtype = DType::kF32;      ///< float32, bfloat16 or float16: widened exactly
  std::span<const std::byte> gradient;     ///< need not be aligned
};

/// Makes a step on a range of elements. The bits are those of torch's single-tensor CPU
/// implementation (foreach=False, fused=False) in float32, but for the payload and sign of a NaN:
/// the same wherever ranges are cut, and on every processor. Thread-safe for ranges that do not
/// overlap. Takes 8 KiB of stack and no other memory.
/// \param roots  the trainer's square roots; null: they are rounded correctly there
/// \error kBadInput  sizes that disagree: both, nothing is changed; kUnsupported  another dtype
/// Local. Source: docs/lossless.md.
Status Apply(const Step& step, const Elements& elements, const RootTable* roots);

}  // namespace shardwright::optimizer_steps
