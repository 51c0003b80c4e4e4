// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "engine/tensor/dtype.h"

namespace shardwright::safetensors {

struct TypeInfo {
  std::string_view word;
  DType dtype;
  std::uint64_t bits;  ///< of a value
};

/// The format's element types in the order of their tensors in a file, widest first.
inline constexpr std::array<TypeInfo, 22> kTypes = {{
    {"U64", DType::kU64, 64},
    {"I64", DType::kI64, 64},
    {"F64", DType::kF64, 64},
    {"C64", DType::kC64, 64},
    {"F32", DType::kF32, 32},
    {"U32", DType::kU32, 32},
    {"I32", DType::kI32, 32},
    {"BF16", DType::kBF16, 16},
    {"F16", DType::kF16, 16},
    {"U16", DType::kU16, 16},
    {"I16", DType::kI16, 16},
    {"F8_E5M2FNUZ", DType::kF8E5M2Fnuz, 8},
    {"F8_E4M3FNUZ", DType::kF8E4M3Fnuz, 8},
    {"F8_E8M0", DType::kF8E8M0, 8},
    {"F8_E4M3", DType::kF8E4M3, 8},
    {"F8_E5M2", DType::kF8E5M2, 8},
    {"I8", DType::kI8, 8},
    {"U8", DType::kU8, 8},
    {"F6_E3M2", DType::kF6E3M2, 6},
    {"F6_E2M3", DType::kF6E2M3, 6},
    {"F4", DType::kF4E2M1x2, 4},
    {"BOOL", DType::kBool, 8},
}};

/// Returns the smallest number of values that fill whole bytes: 2 of 4 bits, 4 of 6 bits, or 1.
constexpr std::uint64_t ValuesTogether(std::uint64_t bits) {
  return bits == 4 ? 2 : bits == 6 ? 4 : 1;
}

}  // namespace shardwright::safetensors
