// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <utility>

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "support/base/checked.h"

namespace shardwright {
namespace {

struct DTypeInfo {
  std::string_view name;
  std::uint64_t item_bytes;
};

constexpr std::array<DTypeInfo, 24> kDTypes = {{
    {"float64", 8},
    {"float32", 4},
    {"float16", 2},
    {"bfloat16", 2},
    {"int64", 8},
    {"int32", 4},
    {"int16", 2},
    {"int8", 1},
    {"uint64", 8},
    {"uint32", 4},
    {"uint16", 2},
    {"uint8", 1},
    {"bool", 1},
    {"complex128", 16},
    {"complex64", 8},
    {"complex32", 4},
    {"float8_e5m2", 1},
    {"float8_e4m3fn", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"float4_e2m1fn_x2", 1},
    {"float6_e2m3", 1},
    {"float6_e3m2", 1},
}};

}  // namespace

std::uint64_t ItemSize(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].item_bytes; }

std::string_view Name(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }

bool IsKnownToTorch(DType dtype) { return dtype != DType::kF6E2M3 && dtype != DType::kF6E3M2; }

bool IsFloating(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E5M2:
    case DType::kF8E4M3:
    case DType::kF8E5M2Fnuz:
    case DType::kF8E4M3Fnuz:
      return true;
    default:
      return false;
  }
}

std::optional<DType> DTypeFromName(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, DType>, 4> kShort = {{{"fp64", DType::kF64},
                                                                         {"fp32", DType::kF32},
                                                                         {"fp16", DType::kF16},
                                                                         {"bf16", DType::kBF16}}};
  for (const auto& [short_name, dtype] : kShort) {
    if (name == short_name) return dtype;
  }
  for (std::size_t i = 0; i < kDTypes.size(); ++i) {
    if (kDTypes[i].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

Result<std::uint64_t> CountElems(std::span<const std::uint64_t> shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) {
    SW_TRY_ASSIGN(count, CheckedMul(count, extent));
  }
  return count;
}

std::uint64_t Elems(std::span<const std::uint64_t> shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

std::vector<std::uint64_t> ContiguousStrides(std::span<const std::uint64_t> shape) {
  std::vector<std::uint64_t> strides(shape.size());
  std::uint64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

std::string ToString(std::span<const std::uint64_t> shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace shardwright
