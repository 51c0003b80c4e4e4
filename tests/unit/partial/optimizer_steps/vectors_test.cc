// SPDX-License-Identifier: Apache-2.0
// Steps computed by torch, repeated on every instruction set that the processor has: vectors.jsonl,
// made by tests/interop/replay/make_vectors.py.

#include <bit>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "engine/tensor/convert.h"
#include "partial/optimizer_steps/apply.h"
#include "partial/optimizer_steps/kernels_internal.h"

namespace shardwright::optimizer_steps {
namespace {

using Json = nlohmann::json;

std::vector<float> Floats(const Json& words) {
  std::vector<float> values;
  for (const Json& word : words) {
    const auto bits = static_cast<std::uint32_t>(std::stoul(word.get<std::string>(), nullptr, 16));
    values.push_back(std::bit_cast<float>(bits));
  }
  return values;
}

std::vector<std::uint16_t> Halves(const Json& words) {
  std::vector<std::uint16_t> values;
  for (const Json& word : words) {
    values.push_back(static_cast<std::uint16_t>(std::stoul(word.get<std::string>(), nullptr, 16)));
  }
  return values;
}

std::vector<std::uint32_t> Bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits;
  bits.reserve(values.size());
  for (const float value : values) bits.push_back(std::bit_cast<std::uint32_t>(value));
  return bits;
}

Step StepFrom(const Json& run, const Json& made, bool first) {
  std::vector<Option> options;
  for (const auto& [name, value] : made.at("options").items()) {
    options.push_back({name, value.get<double>()});
  }
  auto step = StepOf(run.at("optimizer").get<std::string>(), options);
  EXPECT_TRUE(step.has_value()) << step.error().message;
  step->rounding = run.at("separate").get<bool>() ? Rounding::kSeparate : Rounding::kFused;
  step->count = made.at("count").get<float>();
  step->gradient_factor = made.at("gradient_factor").get<double>();
  step->first_momentum = first && step->optimizer == Optimizer::kSgd;
  return *step;
}

std::vector<Json> Runs() {
  std::vector<Json> runs;
  std::ifstream in(SW_VECTORS);
  for (std::string line; std::getline(in, line);) runs.push_back(Json::parse(line));
  return runs;
}

TEST(Vectors, ApplyMakesTheStepsOfTorch) {
  const std::vector<Json> runs = Runs();
  ASSERT_EQ(runs.size(), 20U);
  for (const Json& run : runs) {
    const Json& snapshots = run.at("snapshots");
    std::vector<std::vector<float>> held;
    for (const Json& array : snapshots.at(0)) held.push_back(Floats(array));
    for (std::size_t i = 0; i < run.at("steps").size(); ++i) {
      const Json& made = run.at("steps").at(i);
      const Step step = StepFrom(run, made, i == 0);
      const std::vector<std::uint16_t> gradient = Halves(made.at("gradient"));
      ASSERT_EQ(gradient.size(), 6U);
      ASSERT_EQ(StatesOf(step).size() + 1, held.size());
      // Two ranges: elements beyond a cut are not read.
      for (const auto& [first, count] : {std::pair{std::size_t{0}, std::size_t{4}}, {4, 2}}) {
        Elements range;
        range.param = std::span(held[0]).subspan(first, count);
        for (std::size_t s = 1; s < held.size(); ++s) {
          range.states[s - 1] = std::span(held[s]).subspan(first, count);
        }
        range.gradient_dtype = DType::kBF16;
        range.gradient = std::as_bytes(std::span(gradient).subspan(first, count));
        ASSERT_TRUE(Apply(step, range, nullptr));
      }
      for (std::size_t s = 0; s < held.size(); ++s) {
        EXPECT_EQ(Bits(held[s]), Bits(Floats(snapshots.at(i + 1).at(s))))
            << run.at("optimizer") << ", step " << i << ", array " << s << ": "
            << made.at("options").dump();
      }
    }
  }
}

TEST(Vectors, EverySetOfInstructionsGivesTheSameBits) {
  // Codes 1, 2, 1, 0 in turn.
  const std::vector<std::byte> codes(RootTable::kBytes, std::byte{0x19});
  const auto table = RootTable::FromBytes(codes, 0x7F000000U);
  ASSERT_TRUE(table);
  std::vector<Json> runs = Runs();
  for (std::size_t i = 0; i < 2 * runs.size(); ++i) {
    const Json& run = runs[i / 2];
    const Step step = StepFrom(run, run.at("steps").at(0), false);
    std::vector<std::vector<std::uint32_t>> expected;
    for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
      if (!HasIsa(isa)) continue;
      // Longer than any vector, with a rest; all kinds of values.
      constexpr std::size_t kElems = 1003;
      std::vector<std::vector<float>> arrays(5, std::vector<float>(kElems));
      std::uint32_t random = 12345;
      for (std::size_t a = 0; a < arrays.size(); ++a) {
        for (float& value : arrays[a]) {
          random = random * 1664525U + 1013904223U;
          // Finite numbers; second moments and their like are not negative.
          const std::uint32_t mask = a == 0 || a == 1 || a == 4 ? 0xBFFFFFFFU : 0x3FFFFFFFU;
          value = std::bit_cast<float>((random ^ (random >> 15)) & mask);
        }
      }
      Arrays pointers;
      pointers.count = kElems;
      pointers.param = arrays[0].data();
      const bool sum = step.optimizer == Optimizer::kAdagrad;
      pointers.states = {arrays[sum ? 2 : 1].data(), arrays[sum ? 1 : 2].data(), arrays[3].data()};
      pointers.gradient = arrays[4].data();
      RunKernel(step, NumbersOf(step, i % 2 == 0 ? nullptr : &*table), isa, pointers);
      std::vector<std::vector<std::uint32_t>> found;
      found.reserve(arrays.size());
      for (const auto& array : arrays) found.push_back(Bits(array));
      if (expected.empty()) {
        expected = found;
      } else {
        EXPECT_EQ(found, expected) << run.at("optimizer") << " on " << static_cast<int>(isa);
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::optimizer_steps
