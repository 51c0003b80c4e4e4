// SPDX-License-Identifier: Apache-2.0
#include "partial/optimizer_steps/apply.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "engine/tensor/convert.h"
#include "partial/optimizer_steps/kernels_internal.h"

namespace shardwright::optimizer_steps {
namespace {

constexpr std::size_t kBlockElems = 2048;

Status CheckSizes(const std::vector<std::string_view>& names, const Elements& elements) {
  const std::size_t count = elements.param.size();
  const auto expect = [&](std::string_view what, std::size_t found) -> Status {
    if (found == count) return {};
    return BadInput(what, ": expected ", count, " elements like the parameter, found ", found);
  };
  for (std::size_t i = 0; i < names.size(); ++i)
    SW_TRY(expect(names[i], elements.states[i].size()));
  const std::uint64_t bytes = count * ItemSize(elements.gradient_dtype);
  if (elements.gradient.size() != bytes) {
    return BadInput("gradient: ", bytes, " bytes expected for ", count, " elements of ",
                    Name(elements.gradient_dtype), ", found ", elements.gradient.size());
  }
  return {};
}

}  // namespace

Status Apply(const Step& step, const Elements& elements, const RootTable* roots) {
  const DType dtype = elements.gradient_dtype;
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
    return Fail(Errc::kUnsupported, "gradients in ", Name(dtype),
                ": only float32, bfloat16 and float16 can be replayed");
  }
  const std::vector<std::string_view> names = StatesOf(step);
  SW_TRY(CheckSizes(names, elements));
  if (step.skipped) return {};

  const Numbers numbers = NumbersOf(step, roots);
  const Isa isa = BestIsa();
  const std::byte* source = elements.gradient.data();
  const bool in_place =
      dtype == DType::kF32 && reinterpret_cast<std::uintptr_t>(source) % alignof(float) == 0;
  const std::uint64_t item = ItemSize(dtype);
  alignas(64) float widened[kBlockElems];
  const std::size_t count = elements.param.size();
  for (std::size_t at = 0; at < count;) {
    Arrays arrays;
    arrays.count = in_place ? count : std::min(kBlockElems, count - at);
    arrays.param = elements.param.data() + at;
    for (std::size_t i = 0; i < names.size(); ++i) {
      arrays.states[i] = elements.states[i].data() + at;
    }
    if (in_place) {
      arrays.gradient = reinterpret_cast<const float*>(source);
    } else {
      const auto block = std::span(widened).first(arrays.count);
      Convert(dtype, elements.gradient.subspan(at * item, arrays.count * item), DType::kF32,
              std::as_writable_bytes(block));
      arrays.gradient = widened;
    }
    RunKernel(step, numbers, isa, arrays);
    at += arrays.count;
  }
  return {};
}

}  // namespace shardwright::optimizer_steps
