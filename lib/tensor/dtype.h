#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardwright {

/// Element types, named as in torch. The order is part of no file format.
enum class DType : std::uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU64,
  kU32,
  kU16,
  kU8,
  kBool,
  kC128,
  kC64,
  kC32,
  kF8E5M2,
  kF8E4M3,
  kF8E5M2Fnuz,
  kF8E4M3Fnuz,
  kF8E8M0,
  kF4E2M1x2,
};

/// Bytes of one element.
std::uint64_t ItemSize(DType dtype);

/// The torch name without its module: "float32", "bfloat16", "float8_e4m3fn".
std::string_view Name(DType dtype);

/// The dtype of a torch name ("float32") or of a short form used in target specifications ("fp32",
/// "bf16", "fp16").
std::optional<DType> DTypeFromName(std::string_view name);

}  // namespace shardwright
