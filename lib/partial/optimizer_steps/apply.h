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

/// The same range of elements of a float32 parameter, its states and its gradient.
struct Elements {
  std::span<float> param;
  std::array<std::span<float>, 3> states;  ///< in the order of StatesOf; unused ones are empty
  DType gradient_dtype = DType::kF32;      ///< float32, bfloat16 or float16: widened exactly
  std::span<const std::byte> gradient;     ///< may be unaligned
};

/// Applies a step to a range of elements. Except for payload and sign of a NaN, the
/// bits equal those of torch's single-tensor CPU implementation (foreach=False,
/// fused=False) in float32, for any division into ranges and on every processor.
/// Thread-safe for ranges that do not overlap. Uses 8 KiB of stack and no other memory.
/// \param roots  the trainer's square roots; null: the trainer rounds them correctly
/// \error kBadInput  sizes differ (names both), nothing is changed; kUnsupported  another dtype
/// Local. Source: docs/lossless.md.
Status Apply(const Step& step, const Elements& elements, const RootTable* roots);

}  // namespace shardwright::optimizer_steps
