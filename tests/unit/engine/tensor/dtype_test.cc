// SPDX-License-Identifier: Apache-2.0
#include "engine/tensor/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace shardwright {
namespace {

// Names and sizes equal torch's.
const std::vector<std::pair<DType, std::pair<std::string, std::uint64_t>>> kAll = {
    {DType::kF64, {"float64", 8}},
    {DType::kF32, {"float32", 4}},
    {DType::kF16, {"float16", 2}},
    {DType::kBF16, {"bfloat16", 2}},
    {DType::kI64, {"int64", 8}},
    {DType::kI32, {"int32", 4}},
    {DType::kI16, {"int16", 2}},
    {DType::kI8, {"int8", 1}},
    {DType::kU64, {"uint64", 8}},
    {DType::kU32, {"uint32", 4}},
    {DType::kU16, {"uint16", 2}},
    {DType::kU8, {"uint8", 1}},
    {DType::kBool, {"bool", 1}},
    {DType::kC128, {"complex128", 16}},
    {DType::kC64, {"complex64", 8}},
    {DType::kC32, {"complex32", 4}},
    {DType::kF8E5M2, {"float8_e5m2", 1}},
    {DType::kF8E4M3, {"float8_e4m3fn", 1}},
    {DType::kF8E5M2Fnuz, {"float8_e5m2fnuz", 1}},
    {DType::kF8E4M3Fnuz, {"float8_e4m3fnuz", 1}},
    {DType::kF8E8M0, {"float8_e8m0fnu", 1}},
    {DType::kF4E2M1x2, {"float4_e2m1fn_x2", 1}},
};

TEST(DTypes, HaveTheirNamesAndSizes) {
  std::set<std::string> names;
  for (const auto& [dtype, known] : kAll) {
    EXPECT_EQ(Name(dtype), known.first);
    EXPECT_EQ(ItemSize(dtype), known.second) << known.first;
    EXPECT_EQ(DTypeFromName(known.first), dtype) << known.first;
    EXPECT_TRUE(names.insert(known.first).second) << known.first;
  }
}

TEST(DTypes, HaveShortNamesWhereTargetsNameThem) {
  EXPECT_EQ(DTypeFromName("fp64"), DType::kF64);
  EXPECT_EQ(DTypeFromName("fp32"), DType::kF32);
  EXPECT_EQ(DTypeFromName("fp16"), DType::kF16);
  EXPECT_EQ(DTypeFromName("bf16"), DType::kBF16);
}

TEST(DTypes, AreNotGuessed) {
  for (const char* name :
       {"", "float", "FP32", "float32 ", "torch.float32", "fp8", "float8", "f32"}) {
    EXPECT_EQ(DTypeFromName(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace shardwright
