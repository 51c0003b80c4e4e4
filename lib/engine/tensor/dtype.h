// SPDX-License-Identifier: Apache-2.0
// lib/engine/tensor: what an element is.
// Element types under their names in torch, shapes, and the conversion of elements, rounded as
// torch rounds. There are no tensor objects: a tensor is an entry of a shard map
// (lib/engine/layout), and its bytes are in files.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace shardwright {

/// Element types, named as in torch. The order is part of no file format. Types of less than a byte
/// are packed, and an element is one byte of them; nothing reads single values out of it.
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
  kF6E3M2,    ///< likewise
};

/// Bytes of one element.
std::uint64_t ItemSize(DType dtype);

/// The torch name without its module: "float32", "bfloat16", "float8_e4m3fn".
std::string_view Name(DType dtype);

/// False for the types that torch lacks: no `.pt` file holds them.
bool IsKnownToTorch(DType dtype);

/// True for types whose elements are floating-point numbers that weights are trained in: 64 to 8
/// bits, not the scales of float8_e8m0fnu and not packed types.
bool IsFloating(DType dtype);

/// The dtype of a torch name ("float32") or of a short form used in target specifications ("fp32",
/// "bf16", "fp16").
std::optional<DType> DTypeFromName(std::string_view name);

}  // namespace shardwright
