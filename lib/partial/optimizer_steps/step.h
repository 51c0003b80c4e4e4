// SPDX-License-Identifier: Apache-2.0
// lib/partial/optimizer_steps: optimizer steps as torch makes them, bit for bit.
// A Step says which step an optimizer made and with which numbers, Apply (apply.h) makes it again
// on any range of a parameter, its states and the gradient. All of it is element by element, so
// ranges may be cut anywhere and shared among threads in any way. What is equal to what, and how
// that was found: docs/lossless.md.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"

namespace shardwright::optimizer_steps {

/// Optimizers, by the class of torch.optim. Lion is that of its authors
/// (github.com/google/automl, lion_pytorch.py); torch has none.
enum class Optimizer : std::uint8_t { kAdamW, kAdam, kSgd, kAdagrad, kLion };

/// "AdamW", "Adam", "SGD", "Adagrad", "Lion".
std::string_view Name(Optimizer optimizer);

/// Whether torch keeps the number of its steps.
constexpr bool CountsSteps(Optimizer optimizer) {
  return optimizer != Optimizer::kSgd && optimizer != Optimizer::kLion;
}

/// How torch's kernels round a product that a sum follows. It depends on the processor of the
/// trainer (torch.backends.cpu.get_cpu_capability): AVX2 and AVX512 round once, DEFAULT, which is
/// x86 without these or ATEN_CPU_CAPABILITY=default, rounds both.
enum class Rounding : std::uint8_t { kFused, kSeparate };

/// One step of an optimizer, in the numbers of Python's doubles.
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
  /// SGD with momentum: there is no buffer yet, and it becomes the gradient.
  bool first_momentum = false;
  /// Steps made, this one included, as the float32 tensor `step` counts them. SGD and Lion count
  /// nothing; theirs is whatever the log counts.
  float count = 1;
  /// What the gradient is multiplied by first, in float32: 1 / (loss scale * clip factor).
  double gradient_factor = 1;
  /// The trainer skipped it (overflow): nothing changes.
  bool skipped = false;

  friend bool operator==(const Step&, const Step&) = default;
};

/// A named number of a step, as `param_groups` of torch has it; flags are 0 or 1, and "betas" are
/// "beta1" and "beta2".
struct Option {
  std::string name;
  double value = 0;
  friend bool operator==(const Option&, const Option&) = default;
};

/// The step that an optimizer makes with these options.
/// \param optimizer  name of the class
/// \param options    every number that the optimizer computes with has to be there. Also taken, if
///                   they are 0: foreach, fused, capturable, differentiable, which choose other
///                   kernels. Rounding, count, gradient factor and skipped are the caller's to set
/// \error kUnsupported  an optimizer or option that is not known, or one of those that choose other
///        kernels: names it; kBadInput  an option that is missing, comes twice or is no flag
/// Local.
Result<Step> StepOf(std::string_view optimizer, std::span<const Option> options);

/// The reverse: all options that StepOf needs, in a fixed order.
std::vector<Option> OptionsOf(const Step& step);

/// The states that the step reads and writes, named as in torch, in the order of Elements::states.
std::vector<std::string_view> StatesOf(const Step& step);

}  // namespace shardwright::optimizer_steps
