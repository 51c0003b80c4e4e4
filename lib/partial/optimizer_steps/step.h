// SPDX-License-Identifier: Apache-2.0
// lib/partial/optimizer_steps: optimizer steps as torch makes them, bit for bit. A
// Step describes a step of an optimizer with its numbers. Apply (apply.h) repeats
// it on any range of a parameter, its states and the gradient. All operations are
// elementwise, so ranges may be divided in any way and shared among threads.
// docs/lossless.md describes the extent of this equality and the tests of it.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"

namespace shardwright::optimizer_steps {

/// Optimizers, by their class in torch.optim. torch has no Lion; this is
/// the one of its authors (github.com/google/automl, lion_pytorch.py).
enum class Optimizer : std::uint8_t { kAdamW, kAdam, kSgd, kAdagrad, kLion };

/// Returns "AdamW", "Adam", "SGD", "Adagrad" or "Lion".
std::string_view Name(Optimizer optimizer);

/// Returns true if torch stores the number of steps.
constexpr bool CountsSteps(Optimizer optimizer) {
  return optimizer != Optimizer::kSgd && optimizer != Optimizer::kLion;
}

/// Rounding of a product followed by a sum in torch's kernels. It depends on the
/// trainer's processor (torch.backends.cpu.get_cpu_capability): AVX2 and AVX512 round
/// once. DEFAULT, which is x86 without these or ATEN_CPU_CAPABILITY=default, rounds both.
enum class Rounding : std::uint8_t { kFused, kSeparate };

/// One step of an optimizer, with the numbers as Python doubles.
struct Step {
  Optimizer optimizer = Optimizer::kAdamW;
  Rounding rounding = Rounding::kFused;
  double lr = 0;
  double beta1 = 0;         ///< AdamW, Adam, Lion
  double beta2 = 0;         ///< AdamW, Adam, Lion
  double eps = 0;           ///< AdamW, Adam, Adagrad
  double weight_decay = 0;  ///< decoupled for AdamW and Lion; added to the gradient by the others
  double momentum = 0;      ///< SGD
  double dampening = 0;     ///< SGD
  double lr_decay = 0;      ///< Adagrad
  bool amsgrad = false;     ///< AdamW, Adam
  bool nesterov = false;    ///< SGD
  bool maximize = false;    ///< all but Lion
  /// SGD with momentum: there is no buffer yet; the gradient becomes its content.
  bool first_momentum = false;
  /// Number of steps including this one, like the float32 tensor `step`. SGD and
  /// Lion do not count steps; for them it is the number that the log counts.
  float count = 1;
  /// First factor of the gradient, in float32: 1 / (loss scale * clip factor).
  double gradient_factor = 1;
  /// The trainer skipped the step (overflow), so nothing changes.
  bool skipped = false;

  friend bool operator==(const Step&, const Step&) = default;
};

/// A named number of a step, as in torch's `param_groups`.
/// Flags are 0 or 1, and "betas" are "beta1" and "beta2".
struct Option {
  std::string name;
  double value = 0;
  friend bool operator==(const Option&, const Option&) = default;
};

/// Returns the step that an optimizer makes with these options.
/// \param optimizer  name of the class
/// \param options    must contain every number that the optimizer uses. May contain foreach,
///                   fused, capturable and differentiable with value 0; they choose other
///                   kernels. The caller sets rounding, count, gradient factor and skipped
/// \error kUnsupported  unknown optimizer or option, or one that chooses another
///        kernel (named); kBadInput  an option that is missing, repeated or not a flag
/// Local.
Result<Step> StepOf(std::string_view optimizer, std::span<const Option> options);

/// Inverse of StepOf: returns all options that it needs, in a fixed order.
std::vector<Option> OptionsOf(const Step& step);

/// Returns the states that a step uses, named as in torch, in the order of Elements::states.
std::vector<std::string_view> StatesOf(const Step& step);

}  // namespace shardwright::optimizer_steps
