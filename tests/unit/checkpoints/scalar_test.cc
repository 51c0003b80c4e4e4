// SPDX-License-Identifier: Apache-2.0
// Reads optimizer scalars as numbers, and rejects values that are not scalars.

#include <gtest/gtest.h>

#include <cstring>

#include "checkpoints/model/checkpoint.h"

namespace shardwright::checkpoints {
namespace {

template <class T>
Scalar Tensor(DType dtype, std::initializer_list<T> elems) {
  Scalar scalar{"step", true, dtype, {elems.size()}, std::string(elems.size() * sizeof(T), '\0')};
  std::memcpy(scalar.bytes.data(), elems.begin(), scalar.bytes.size());
  return scalar;
}

TEST(Scalar, IsANumber) {
  EXPECT_EQ(NumberOf(Tensor<float>(DType::kF32, {7.5F})), 7.5);
  EXPECT_EQ(NumberOf(Tensor<double>(DType::kF64, {1e300})), 1e300);
  EXPECT_EQ(NumberOf(Tensor<std::uint16_t>(DType::kBF16, {0x4040})), 3.0);
  EXPECT_EQ(NumberOf(Tensor<std::int64_t>(DType::kI64, {1 << 24 | 1})), (1 << 24 | 1));
  pickle::Arena arena;
  Scalar plain;
  plain.value = arena.Int(12);
  EXPECT_EQ(NumberOf(plain), 12.0);
}

TEST(Scalar, IsNone) {
  EXPECT_FALSE(NumberOf(Tensor<float>(DType::kF32, {})));
  EXPECT_FALSE(NumberOf(Tensor<float>(DType::kF32, {1, 1})));
  EXPECT_FALSE(NumberOf(Tensor<std::uint8_t>(DType::kBool, {1})));
  Scalar plain;
  EXPECT_FALSE(NumberOf(plain));
  pickle::Arena arena;
  plain.value = arena.List({arena.Int(1)});
  EXPECT_FALSE(NumberOf(plain));
}

}  // namespace
}  // namespace shardwright::checkpoints
