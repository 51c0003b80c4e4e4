// SPDX-License-Identifier: Apache-2.0
// lib/engine/tensor: element types, shapes and conversions.
// Element types have their torch names, and conversions round as
// torch does. There are no tensor objects: a tensor is an entry
// of a shard map (lib/engine/layout), and its bytes are in files.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardwright {

/// Element types, named as in torch. No file format depends on the order. Types of less than
/// a byte are packed: one element of them is a byte, and no code reads single values from it.
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
  kF4E2M1x2,  ///< two values in each byte
  kF6E2M3,    ///< four values in three bytes; unknown to torch
  kF6E3M2,    ///< four values in three bytes; unknown to torch
};

/// Returns the bytes of one element.
std::uint64_t ItemSize(DType dtype);

/// Returns the torch name without its module: "float32", "bfloat16", "float8_e4m3fn".
std::string_view Name(DType dtype);

/// Returns false for types that torch lacks; `.pt` files cannot contain them.
bool IsKnownToTorch(DType dtype);

/// Returns true for floating-point types in which weights are trained: 64 to
/// 8 bits, without the scales of float8_e8m0fnu and without packed types.
bool IsFloating(DType dtype);

/// Returns the dtype for a torch name ("float32") or a short
/// form used in target specifications ("fp32", "bf16", "fp16").
std::optional<DType> DTypeFromName(std::string_view name);

}  // namespace shardwright
