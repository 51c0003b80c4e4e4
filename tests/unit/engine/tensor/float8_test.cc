// SPDX-License-Identifier: Apache-2.0
// 8-bit floating types: their values, and rounding to the nearest of them.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor/convert.h"
#include "engine/tensor/dtype.h"

namespace shardwright {
namespace {

constexpr DType kTypes[] = {DType::kF8E4M3, DType::kF8E5M2, DType::kF8E4M3Fnuz, DType::kF8E5M2Fnuz};

float Value(DType dtype, std::uint8_t code) {
  float value = 0;
  Convert(dtype, std::as_bytes(std::span(&code, 1)), DType::kF32,
          std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

std::uint8_t Code(DType dtype, float value) {
  std::uint8_t code = 0;
  Convert(DType::kF32, std::as_bytes(std::span(&value, 1)), dtype,
          std::as_writable_bytes(std::span(&code, 1)));
  return code;
}

struct Known {
  DType dtype;
  std::uint8_t code;
  float value;
};

TEST(Float8, ValuesOfTheirTables) {
  const Known known[] = {
      {DType::kF8E4M3, 0x38, 1.0F},         {DType::kF8E4M3, 0x7E, 448.0F},
      {DType::kF8E4M3, 0x01, 0x1p-9F},      {DType::kF8E4M3, 0x08, 0x1p-6F},
      {DType::kF8E4M3, 0xC1, -2.25F},       {DType::kF8E5M2, 0x3C, 1.0F},
      {DType::kF8E5M2, 0x7B, 57344.0F},     {DType::kF8E5M2, 0x01, 0x1p-16F},
      {DType::kF8E5M2, 0x04, 0x1p-14F},     {DType::kF8E4M3Fnuz, 0x40, 1.0F},
      {DType::kF8E4M3Fnuz, 0x7F, 240.0F},   {DType::kF8E4M3Fnuz, 0x01, 0x1p-10F},
      {DType::kF8E5M2Fnuz, 0x40, 1.0F},     {DType::kF8E5M2Fnuz, 0x7F, 57344.0F},
      {DType::kF8E5M2Fnuz, 0x01, 0x1p-17F}, {DType::kF8E5M2Fnuz, 0xFF, -57344.0F},
  };
  for (const Known& one : known) {
    EXPECT_EQ(Value(one.dtype, one.code), one.value) << Name(one.dtype) << " " << int{one.code};
    EXPECT_EQ(Code(one.dtype, one.value), one.code) << Name(one.dtype) << " " << one.value;
  }
}

TEST(Float8, WhatIsTooLargeOrNoNumber) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(Value(DType::kF8E4M3, 0x7F)));
  EXPECT_TRUE(std::isnan(Value(DType::kF8E4M3, 0xFF)));
  EXPECT_EQ(Value(DType::kF8E5M2, 0x7C), kInf);
  EXPECT_EQ(Value(DType::kF8E5M2, 0xFC), -kInf);
  EXPECT_TRUE(std::isnan(Value(DType::kF8E5M2, 0x7D)));
  EXPECT_TRUE(std::isnan(Value(DType::kF8E4M3Fnuz, 0x80)));
  EXPECT_TRUE(std::isnan(Value(DType::kF8E5M2Fnuz, 0x80)));
  EXPECT_EQ(Code(DType::kF8E4M3, 470.0F), 0x7E);
  EXPECT_EQ(Code(DType::kF8E4M3, 1e30F), 0x7E);
  EXPECT_EQ(Code(DType::kF8E4M3, -kInf), 0xFE);
  EXPECT_EQ(Code(DType::kF8E5M2, 61440.0F), 0x7C);
  EXPECT_EQ(Code(DType::kF8E5M2, 61439.0F), 0x7B);
  EXPECT_EQ(Code(DType::kF8E4M3Fnuz, 1000.0F), 0x80);
  EXPECT_EQ(Code(DType::kF8E5M2Fnuz, -kInf), 0x80);
  EXPECT_EQ(Code(DType::kF8E4M3Fnuz, -0.0F), 0x00);
  EXPECT_EQ(Code(DType::kF8E4M3, -0.0F), 0x80);
  for (const DType dtype : kTypes) {
    EXPECT_TRUE(std::isnan(Value(dtype, Code(dtype, nan)))) << Name(dtype);
  }
}

TEST(Float8, EveryValueComesBack) {
  for (const DType dtype : kTypes) {
    for (int code = 0; code < 256; ++code) {
      const float value = Value(dtype, static_cast<std::uint8_t>(code));
      if (std::isnan(value)) continue;
      EXPECT_EQ(Code(dtype, value), code) << Name(dtype);
    }
  }
}

TEST(Float8, RoundsToTheNearestAndTiesToEven) {
  std::mt19937 random(7);
  for (const DType dtype : kTypes) {
    std::vector<float> values;  // finite and not negative, ascending: the index is the code
    for (int code = 0; code < 128; ++code) {
      const float value = Value(dtype, static_cast<std::uint8_t>(code));
      if (!std::isfinite(value)) break;
      values.push_back(value);
    }
    for (std::size_t code = 0; code + 1 < values.size(); ++code) {
      const float middle = (values[code] + values[code + 1]) / 2;
      const std::size_t even = code % 2 == 0 ? code : code + 1;
      EXPECT_EQ(Code(dtype, middle), even) << Name(dtype) << " " << middle;
      EXPECT_EQ(Code(dtype, std::nextafter(middle, 0.0F)), code) << Name(dtype) << " " << middle;
      EXPECT_EQ(Code(dtype, std::nextafter(middle, 1e9F)), code + 1) << Name(dtype);
      for (int i = 0; i < 8; ++i) {
        const float at =
            std::uniform_real_distribution<float>(values[code], values[code + 1])(random);
        EXPECT_EQ(Code(dtype, at), at < middle   ? code
                                   : at > middle ? code + 1
                                                 : even)
            << Name(dtype) << " " << at;
      }
    }
  }
}

TEST(Convert, KnowsItsPairs) {
  EXPECT_TRUE(CanConvert(DType::kF32, DType::kF8E4M3));
  EXPECT_TRUE(CanConvert(DType::kF8E5M2, DType::kF64));
  EXPECT_FALSE(CanConvert(DType::kF64, DType::kF8E5M2));
  EXPECT_FALSE(CanConvert(DType::kF8E5M2, DType::kF8E4M3));
  EXPECT_FALSE(CanConvert(DType::kF8E8M0, DType::kF32));
  EXPECT_FALSE(CanConvert(DType::kF4E2M1x2, DType::kF32));
  EXPECT_FALSE(CanConvert(DType::kI32, DType::kI64));
  EXPECT_TRUE(CanConvert(DType::kF6E2M3, DType::kF6E2M3));
  EXPECT_FALSE(CanAverage(DType::kF8E4M3));
  EXPECT_TRUE(CanAverage(DType::kBF16));
}

TEST(DType, TypesThatTorchLacksHaveNames) {
  EXPECT_EQ(Name(DType::kF6E2M3), "float6_e2m3");
  EXPECT_EQ(DTypeFromName("float6_e3m2"), DType::kF6E3M2);
  EXPECT_FALSE(IsKnownToTorch(DType::kF6E3M2));
  EXPECT_TRUE(IsKnownToTorch(DType::kF4E2M1x2));
}

}  // namespace
}  // namespace shardwright
