// SPDX-License-Identifier: Apache-2.0
#include "engine/tensor/convert.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "engine/tensor/float_codes.h"
#include "support/base/result.h"

namespace shardwright {
namespace {

template <class T>
T Load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// One element of each floating dtype, loaded as a double or a float and
// stored from one. A float is not stored through a double: depending on
// the compiler, that would turn a signalling NaN into a quiet one.
struct F64 {
  static constexpr std::size_t kBytes = 8;
  static double Get(const std::byte* at) { return Load<double>(at); }
  static void Put(double v, std::byte* at) { std::memcpy(at, &v, sizeof v); }
};
struct F32 {
  static constexpr std::size_t kBytes = 4;
  static float Get(const std::byte* at) { return Load<float>(at); }
  static void Put(float v, std::byte* at) { std::memcpy(at, &v, sizeof v); }
  static void Put(double v, std::byte* at) { Put(static_cast<float>(v), at); }
};
struct F16 {
  static constexpr std::size_t kBytes = 2;
  static float Get(const std::byte* at) { return codes::FromF16(Load<std::uint16_t>(at)); }
  static void Put(float v, std::byte* at) {
    const std::uint16_t h = codes::ToF16(v);
    std::memcpy(at, &h, sizeof h);
  }
  static void Put(double v, std::byte* at) { Put(static_cast<float>(v), at); }
};
struct BF16 {
  static constexpr std::size_t kBytes = 2;
  static float Get(const std::byte* at) { return codes::FromBf16(Load<std::uint16_t>(at)); }
  static void Put(float v, std::byte* at) {
    const std::uint16_t h = codes::ToBf16(v);
    std::memcpy(at, &h, sizeof h);
  }
  static void Put(double v, std::byte* at) { Put(static_cast<float>(v), at); }
};

template <class Codec>
struct F8 {
  static constexpr std::size_t kBytes = 1;
  static float Get(const std::byte* at) { return kValues[std::to_integer<std::size_t>(*at)]; }
  static void Put(float v, std::byte* at) { *at = static_cast<std::byte>(Codec::Encode(v)); }
  static void Put(double v, std::byte* at) { Put(static_cast<float>(v), at); }

 private:
  static constexpr std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (std::size_t code = 0; code < values.size(); ++code) {
      values[code] = Codec::Decode(static_cast<std::uint8_t>(code));
    }
    return values;
  }();
};

/// Calls `visit` with the type tag of a floating dtype of more than 8 bits.
template <class Visit>
void ForWide(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF64:
      return visit(F64{});
    case DType::kF32:
      return visit(F32{});
    case DType::kF16:
      return visit(F16{});
    case DType::kBF16:
      return visit(BF16{});
    default:
      SW_CHECK(false && "not a wide floating dtype");
  }
}

/// Calls `visit` with the type tag of any floating dtype.
template <class Visit>
void ForFloat(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF8E4M3:
      return visit(F8<codes::Float8E4M3>{});
    case DType::kF8E5M2:
      return visit(F8<codes::Float8E5M2>{});
    case DType::kF8E4M3Fnuz:
      return visit(F8<codes::Float8E4M3Fnuz>{});
    case DType::kF8E5M2Fnuz:
      return visit(F8<codes::Float8E5M2Fnuz>{});
    default:
      return ForWide(dtype, std::forward<Visit>(visit));
  }
}

template <class In, class Out>
void ConvertAll(In in, std::span<const std::byte> source, Out out, std::span<std::byte> target) {
  const std::size_t count = source.size() / in.kBytes;
  SW_CHECK(target.size() == count * out.kBytes);
  for (std::size_t i = 0; i < count; ++i) {
    out.Put(in.Get(source.data() + i * in.kBytes), target.data() + i * out.kBytes);
  }
}

}  // namespace

bool CanAverage(DType dtype) { return IsFloating(dtype) && ItemSize(dtype) > 1; }

bool CanConvert(DType from, DType to) {
  if (from == to) return true;
  if (!IsFloating(from) || !IsFloating(to)) return false;
  // float64 to 8 bits is unsupported: a unit would need more memory than a
  // thread's workspace (engine/exec/gather.h), and weights are never float64.
  if (from == DType::kF64 && !CanAverage(to)) return false;
  return CanAverage(from) || CanAverage(to);
}

void Convert(DType from, std::span<const std::byte> source, DType to, std::span<std::byte> target) {
  if (from == to) {
    SW_CHECK(source.size() == target.size());
    if (!source.empty()) std::memcpy(target.data(), source.data(), source.size());
    return;
  }
  if (CanAverage(from)) {
    return ForWide(from, [&](auto in) {
      ForFloat(to, [&](auto out) { ConvertAll(in, source, out, target); });
    });
  }
  ForFloat(from,
           [&](auto in) { ForWide(to, [&](auto out) { ConvertAll(in, source, out, target); }); });
}

void Accumulate(DType dtype, std::span<const std::byte> source, std::span<double> sum) {
  ForWide(dtype, [&](auto in) {
    SW_CHECK(source.size() == sum.size() * in.kBytes);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += in.Get(source.data() + i * in.kBytes);
  });
}

void StoreMean(std::span<const double> sum, std::uint64_t count, DType dtype,
               std::span<std::byte> target) {
  ForWide(dtype, [&](auto out) {
    SW_CHECK(target.size() == sum.size() * out.kBytes);
    for (std::size_t i = 0; i < sum.size(); ++i) {
      out.Put(sum[i] / static_cast<double>(count), target.data() + i * out.kBytes);
    }
  });
}

}  // namespace shardwright
