// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/step.h"

#include <algorithm>
#include <array>
#include <vector>

#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::optimizer_steps {
namespace {

/// A number or flag of a Step by its name in torch, and the optimizers that use it.
struct Field {
  std::string_view name;
  double Step::*number;
  bool Step::*flag;
  std::uint8_t users;  ///< one bit per Optimizer
};

constexpr std::uint8_t Bit(Optimizer optimizer) {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(optimizer));
}

constexpr std::uint8_t kAdams = Bit(Optimizer::kAdamW) | Bit(Optimizer::kAdam);
constexpr std::uint8_t kSgds = Bit(Optimizer::kSgd);
constexpr std::uint8_t kAdagrads = Bit(Optimizer::kAdagrad);
constexpr std::uint8_t kLions = Bit(Optimizer::kLion);

constexpr std::array kFields = {
    Field{"lr", &Step::lr, nullptr, kAdams | kSgds | kAdagrads | kLions},
    Field{"beta1", &Step::beta1, nullptr, kAdams | kLions},
    Field{"beta2", &Step::beta2, nullptr, kAdams | kLions},
    Field{"eps", &Step::eps, nullptr, kAdams | kAdagrads},
    Field{"weight_decay", &Step::weight_decay, nullptr, kAdams | kSgds | kAdagrads | kLions},
    Field{"momentum", &Step::momentum, nullptr, kSgds},
    Field{"dampening", &Step::dampening, nullptr, kSgds},
    Field{"lr_decay", &Step::lr_decay, nullptr, kAdagrads},
    Field{"amsgrad", nullptr, &Step::amsgrad, kAdams},
    Field{"nesterov", nullptr, &Step::nesterov, kSgds},
    Field{"maximize", nullptr, &Step::maximize, kAdams | kSgds | kAdagrads},
};

constexpr std::array<std::string_view, 4> kOtherKernels = {"foreach", "fused", "capturable",
                                                           "differentiable"};

constexpr std::array<std::string_view, 5> kNames = {"AdamW", "Adam", "SGD", "Adagrad", "Lion"};

Status Take(const Option& option, Optimizer optimizer, std::string_view decay, Step* step,
            std::vector<std::string_view>* taken) {
  const std::string who = std::string(Name(optimizer)) + ": option " + Quoted(option.name);
  const auto is_flag = [&] { return option.value == 0 || option.value == 1; };
  if (std::find(taken->begin(), taken->end(), option.name) != taken->end()) {
    return BadInput(who, " is given twice");
  }
  if (std::find(kOtherKernels.begin(), kOtherKernels.end(), option.name) != kOtherKernels.end()) {
    if (option.value != 0) {
      return Fail(Errc::kUnsupported, who, ": these kernels round differently; expected 0, found ",
                  option.value);
    }
    return {};
  }
  if (option.name == decay) {
    if (!is_flag()) return BadInput(who, ": 0 or 1 expected, found ", option.value);
    taken->push_back(decay);
    step->optimizer = option.value == 1 ? Optimizer::kAdamW : Optimizer::kAdam;
    return {};
  }
  const auto* const field = std::find_if(kFields.begin(), kFields.end(), [&](const Field& each) {
    return each.name == option.name && (each.users & Bit(optimizer)) != 0;
  });
  if (field == kFields.end()) return Fail(Errc::kUnsupported, who, " is not known");
  if (field->flag != nullptr) {
    if (!is_flag()) return BadInput(who, ": 0 or 1 expected, found ", option.value);
    step->*field->flag = option.value == 1;
  } else {
    step->*field->number = option.value;
  }
  taken->push_back(field->name);
  return {};
}

}  // namespace

std::string_view Name(Optimizer optimizer) { return kNames[static_cast<std::size_t>(optimizer)]; }

Result<Step> StepOf(std::string_view optimizer, std::span<const Option> options) {
  const auto* const found = std::find(kNames.begin(), kNames.end(), optimizer);
  if (found == kNames.end()) {
    return Fail(Errc::kUnsupported, "optimizer ", Quoted(optimizer),
                ": only steps of AdamW, Adam, SGD, Adagrad and Lion can be replayed");
  }
  Step step;
  step.optimizer = static_cast<Optimizer>(found - kNames.begin());
  const Optimizer named = step.optimizer;
  // torch's AdamW is a subclass of Adam; this option distinguishes the two.
  const std::string_view decay = (kAdams & Bit(named)) != 0 ? "decoupled_weight_decay" : "";
  std::vector<std::string_view> taken;
  for (const Option& option : options) SW_TRY(Take(option, named, decay, &step, &taken));
  for (const Field& field : kFields) {
    const bool needed = (field.users & Bit(named)) != 0 && field.number != nullptr;
    if (needed && std::find(taken.begin(), taken.end(), field.name) == taken.end()) {
      return BadInput(optimizer, ": option ", Quoted(field.name), " is missing");
    }
  }
  if (step.nesterov && (step.momentum == 0 || step.dampening != 0)) {
    return BadInput("SGD: nesterov requires a momentum and no dampening, found momentum ",
                    step.momentum, " and dampening ", step.dampening);
  }
  return step;
}

std::vector<Option> OptionsOf(const Step& step) {
  std::vector<Option> options;
  for (const Field& field : kFields) {
    if ((field.users & Bit(step.optimizer)) == 0) continue;
    const double value =
        field.flag != nullptr ? static_cast<double>(step.*field.flag) : step.*field.number;
    options.push_back({std::string(field.name), value});
  }
  return options;
}

std::vector<std::string_view> StatesOf(const Step& step) {
  switch (step.optimizer) {
    case Optimizer::kAdamW:
    case Optimizer::kAdam:
      if (step.amsgrad) return {layout::kFirstMoment, layout::kSecondMoment, "max_exp_avg_sq"};
      return {layout::kFirstMoment, layout::kSecondMoment};
    case Optimizer::kSgd:
      if (step.momentum != 0) return {"momentum_buffer"};
      return {};
    case Optimizer::kAdagrad:
      return {"sum"};
    case Optimizer::kLion:
      return {layout::kFirstMoment};
  }
  return {};
}

}  // namespace shardwright::optimizer_steps
