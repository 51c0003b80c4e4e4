// SPDX-License-Identifier: Apache-2.0
// Converts elements with the same bits as shardwright::Convert on x86-64. Uses the
// codes of lib/engine/tensor/float_codes.h. The rest handles NaN, where processors
// differ: a GPU turns every NaN into one fixed NaN when it converts between float
// and double. These functions therefore convert the bits of NaN themselves.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "engine/device/kernels/portable.h"
#include "engine/tensor/dtype.h"
#include "engine/tensor/float_codes.h"

namespace shardwright::device::kernels {

struct F64 {
  using Bits = std::uint64_t;
};
struct F32 {
  using Bits = std::uint32_t;
};
struct F16 {
  using Bits = std::uint16_t;
  static constexpr float Get(Bits bits) { return codes::FromF16(bits); }
  static constexpr Bits Put(float value) { return codes::ToF16(value); }
};
struct BF16 {
  using Bits = std::uint16_t;
  static constexpr float Get(Bits bits) { return codes::FromBf16(bits); }
  static constexpr Bits Put(float value) { return codes::ToBf16(value); }
};
template <class Code>
struct F8 {
  using Bits = std::uint8_t;
  static constexpr float Get(Bits bits) { return Code::Decode(bits); }
  static constexpr Bits Put(float value) { return Code::Encode(value); }
};

/// Converts double to float, rounding to nearest even. NaN keeps sign and leading bits, made quiet.
SW_HOST_DEVICE constexpr std::uint32_t NarrowBits(std::uint64_t bits) {
  const std::uint64_t magnitude = bits & 0x7FFFFFFFFFFFFFFFU;
  if (magnitude > 0x7FF0000000000000U) {
    return static_cast<std::uint32_t>(bits >> 32 & 0x80000000U) | codes::kQuietNan |
           static_cast<std::uint32_t>(bits >> 29 & 0x3FFFFFU);
  }
  return std::bit_cast<std::uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
}

/// Converts float to double exactly. A NaN keeps its bits and becomes quiet.
SW_HOST_DEVICE constexpr std::uint64_t WidenBits(std::uint32_t bits) {
  if ((bits & 0x7FFFFFFFU) > codes::kInfinity) {
    return std::uint64_t{bits & 0x80000000U} << 32 | 0x7FF8000000000000U |
           std::uint64_t{bits & 0x3FFFFFU} << 29;
  }
  return std::bit_cast<std::uint64_t>(static_cast<double>(std::bit_cast<float>(bits)));
}

/// Converts one element. \pre In and Out differ
template <class In, class Out>
SW_HOST_DEVICE constexpr typename Out::Bits ConvertBits(typename In::Bits bits) {
  std::uint32_t middle = 0;  // the bits of a float
  if constexpr (sizeof(bits) == 8) {
    middle = NarrowBits(bits);
  } else if constexpr (sizeof(bits) == 4) {
    middle = bits;
  } else {
    middle = std::bit_cast<std::uint32_t>(In::Get(bits));
  }
  if constexpr (sizeof(typename Out::Bits) == 8) {
    return WidenBits(middle);
  } else if constexpr (sizeof(typename Out::Bits) == 4) {
    return middle;
  } else {
    return Out::Put(std::bit_cast<float>(middle));
  }
}

/// Elements that one kernel index converts; they fill the widest loads and stores.
inline constexpr unsigned kConvertGroup = 8;

/// Elements that are loaded and stored as one word, or as several words if they have 8 bytes.
template <class Bits>
struct alignas(sizeof(Bits) * kConvertGroup < 16 ? sizeof(Bits) * kConvertGroup : 16) Group {
  Bits elems[kConvertGroup];
};

/// Converts up to kConvertGroup elements, the first of which has
/// number index * kConvertGroup, and stops at element `elems`.
/// \param wide  source and target are both aligned to their Group
template <class In, class Out>
SW_HOST_DEVICE inline void ConvertGroup(typename Out::Bits* to, const typename In::Bits* from,
                                        std::uint64_t elems, bool wide, std::uint64_t index) {
  using InGroup = Group<typename In::Bits>;
  using OutGroup = Group<typename Out::Bits>;
  const std::uint64_t first = index * kConvertGroup;
  if (wide && first + kConvertGroup <= elems) {
    const InGroup in = *reinterpret_cast<const InGroup*>(from + first);
    OutGroup out;
    for (unsigned i = 0; i < kConvertGroup; ++i) {
      out.elems[i] = ConvertBits<In, Out>(in.elems[i]);
    }
    *reinterpret_cast<OutGroup*>(to + first) = out;
    return;
  }
  const std::uint64_t last = first + kConvertGroup < elems ? first + kConvertGroup : elems;
  for (std::uint64_t i = first; i < last; ++i) to[i] = ConvertBits<In, Out>(from[i]);
}

/// Calls `visit` with the tags of the pair.
/// \returns false if there is no such conversion: the pairs
///        are those of CanConvert, without equal types
template <class Visit>
bool ForConversion(DType from, DType to, Visit&& visit) {
  const auto wide = [](DType dtype, auto&& then) {
    switch (dtype) {
      case DType::kF64:
        return then(F64{});
      case DType::kF32:
        return then(F32{});
      case DType::kF16:
        return then(F16{});
      case DType::kBF16:
        return then(BF16{});
      default:
        return false;
    }
  };
  const auto narrow = [](DType dtype, auto&& then) {
    switch (dtype) {
      case DType::kF8E4M3:
        return then(F8<codes::Float8E4M3>{});
      case DType::kF8E5M2:
        return then(F8<codes::Float8E5M2>{});
      case DType::kF8E4M3Fnuz:
        return then(F8<codes::Float8E4M3Fnuz>{});
      case DType::kF8E5M2Fnuz:
        return then(F8<codes::Float8E5M2Fnuz>{});
      default:
        return false;
    }
  };
  const auto pair = [&](auto in, auto out) {
    if constexpr (__is_same(decltype(in), decltype(out)) ||
                  (sizeof(typename decltype(in)::Bits) == 8 &&
                   sizeof(typename decltype(out)::Bits) == 1)) {
      return false;
    } else {
      visit(in, out);
      return true;
    }
  };
  return wide(from,
              [&](auto in) {
                const auto then = [&](auto out) { return pair(in, out); };
                return wide(to, then) || narrow(to, then);
              }) ||
         narrow(from, [&](auto in) { return wide(to, [&](auto out) { return pair(in, out); }); });
}

}  // namespace shardwright::device::kernels
