// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "partial/optimizer_steps/square_roots.h"
#include "partial/optimizer_steps/step.h"

namespace shardwright::optimizer_steps {

/// Instruction set that a kernel is compiled for. All kernels give the same bits.
enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

/// Returns the widest one that this processor supports.
Isa BestIsa();
bool HasIsa(Isa isa);

/// Pointers to the same `count` elements each; `gradient` is only read.
struct Arrays {
  float* param = nullptr;
  std::array<float*, 3> states{};
  const float* gradient = nullptr;
  std::size_t count = 0;
};

/// Numbers of a step, rounded to float32 like torch does.
struct Numbers {
  float gradient_factor = 1;  ///< negative with maximize
  float weight_decay = 0;     ///< for optimizers that add it to the gradient
  float param_factor = 1;     ///< decoupled decay
  float beta1 = 0;
  float lerp_weight = 0;
  float beta2 = 0;
  float one_minus_beta1 = 0;
  float one_minus_beta2 = 0;
  float root_correction = 1;  ///< divisor of the root of the second moment
  float eps = 0;
  float momentum = 0;
  float one_minus_dampening = 0;
  float minus_lr = 0;                         ///< factor of the update
  const std::uint32_t* root_words = nullptr;  ///< of a RootTable; null: correct rounding
  std::uint32_t root_first = 0;               ///< bits of the table's smallest and largest number
  std::uint32_t root_last = 0;
};

/// \pre !step.skipped
/// \param roots  null: square roots are rounded correctly
Numbers NumbersOf(const Step& step, const RootTable* roots);

/// \pre HasIsa(isa); all states of StatesOf are set; arrays do not overlap
void RunKernel(const Step& step, const Numbers& numbers, Isa isa, const Arrays& arrays);

}  // namespace shardwright::optimizer_steps
