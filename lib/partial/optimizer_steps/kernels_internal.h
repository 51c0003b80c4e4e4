// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "partial/optimizer_steps/square_roots.h"
#include "partial/optimizer_steps/step.h"

namespace shardwright::optimizer_steps {

/// Instructions that a kernel is compiled for. All give the same bits.
enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

/// The widest that this processor has.
Isa BestIsa();
bool HasIsa(Isa isa);

/// Pointers to the same `count` elements each; `gradient` is not written.
struct Arrays {
  float* param = nullptr;
  std::array<float*, 3> states{};
  const float* gradient = nullptr;
  std::size_t count = 0;
};

/// The numbers of a step as torch rounds them to float32.
struct Numbers {
  float gradient_factor = 1;  ///< negative under maximize
  float weight_decay = 0;     ///< of those that add it to the gradient
  float param_factor = 1;     ///< decoupled decay
  float beta1 = 0;
  float lerp_weight = 0;
  float beta2 = 0;
  float one_minus_beta1 = 0;
  float one_minus_beta2 = 0;
  float root_correction = 1;  ///< what the root of the second moment is divided by
  float eps = 0;
  float momentum = 0;
  float one_minus_dampening = 0;
  float minus_lr = 0;                         ///< what the update is multiplied by
  const std::uint32_t* root_words = nullptr;  ///< of a RootTable; null: roots are rounded correctly
  std::uint32_t root_first = 0;  ///< bits of the smallest and the largest number that follow it
  std::uint32_t root_last = 0;
};

/// \pre !step.skipped
/// \param roots  null: roots are rounded correctly
Numbers NumbersOf(const Step& step, const RootTable* roots);

/// \pre HasIsa(isa); the states of StatesOf are there; arrays do not overlap
void RunKernel(const Step& step, const Numbers& numbers, Isa isa, const Arrays& arrays);

}  // namespace shardwright::optimizer_steps
