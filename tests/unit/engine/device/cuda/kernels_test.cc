// SPDX-License-Identifier: Apache-2.0
// Tests lib/engine/device/kernels compiled for the CPU, the code that nvcc compiles for devices.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/device/kernels/convert.h"
#include "engine/device/kernels/runs.h"
#include "engine/tensor/convert.h"
#include "inputs.h"

namespace shardwright::device::kernels {
namespace {

TEST(Kernels, ConvertEveryPairAsTheHostDoes) {
  int pairs = 0;
  for (const DType from : kFloating) {
    const auto inputs = Inputs(from);
    const std::uint64_t elems = inputs.size() / ItemSize(from);
    for (const DType to : kFloating) {
      std::vector<std::byte> found(elems * ItemSize(to));
      const bool known = ForConversion(from, to, [&](auto in, auto out) {
        using In = decltype(in);
        using Out = decltype(out);
        auto* const target = reinterpret_cast<typename Out::Bits*>(found.data());
        const auto* const source = reinterpret_cast<const typename In::Bits*>(inputs.data());
        for (std::uint64_t i = 0; i * kConvertGroup < elems; ++i) {
          ConvertGroup<In, Out>(target, source, elems, i % 2 == 0, i);
        }
      });
      EXPECT_EQ(known, from != to && CanConvert(from, to)) << Name(from) << " to " << Name(to);
      if (!known) continue;
      ++pairs;
      std::vector<std::byte> expected(found.size());
      Convert(from, inputs, to, expected);
      const auto [one, other] = std::mismatch(expected.begin(), expected.end(), found.begin());
      EXPECT_TRUE(one == expected.end())
          << Name(from) << " to " << Name(to) << ", element "
          << static_cast<std::uint64_t>(one - expected.begin()) / ItemSize(to);
    }
  }
  EXPECT_EQ(pairs, 40);
  EXPECT_FALSE(ForConversion(DType::kI64, DType::kF32, [](auto, auto) {}));
}

// Every relative alignment of source and target, every short length, and random longer ones.
TEST(Kernels, MoveRuns) {
  std::mt19937_64 random(1);
  alignas(16) std::byte from[512];
  for (std::byte& each : from) each = static_cast<std::byte>(random());
  for (std::uint64_t source = 0; source < 32; ++source) {
    for (std::uint64_t target = 0; target < 32; ++target) {
      for (std::uint64_t length = 0; length < 70; ++length) {
        const MovedRun run = {source, target, length < 64 ? length : random() % 400};
        alignas(16) std::byte found[512] = {};
        std::byte expected[512] = {};
        std::memcpy(expected + target, from + source, run.bytes);
        // In any order, as threads do.
        for (std::uint64_t i = RunPieces(found, run); i > 0; --i)
          MovePiece(found, from, run, i - 1);
        ASSERT_EQ(std::memcmp(found, expected, sizeof found), 0)
            << source << " to " << target << ", " << run.bytes << " bytes";
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::device::kernels
