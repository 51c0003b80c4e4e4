#include "tensor/convert.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/result.h"
#include "tensor/float8_internal.h"

namespace shardwright {
namespace {

float FromBf16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

// As the 8-bit types, these work out all cases and choose one: compilers turn a loop over them into
// vector instructions.

using internal::Choose;

std::uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return static_cast<std::uint16_t>(nan ? 0x7FC0U : rounded);  // as torch: one quiet NaN for all
}

float FromF16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000U} << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  const auto subnormal = std::bit_cast<std::uint32_t>(
      static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
  std::uint32_t bits = (magnitude << 13) + (112U << 23);
  bits = Choose(magnitude < 0x0400U, subnormal, bits);
  bits = Choose(magnitude >= 0x7C00U, 0x7F800000U | ((magnitude & 0x3FFU) << 13), bits);
  return std::bit_cast<float>(sign | bits);
}

std::uint16_t ToF16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Subnormal: adding 0.5 lines the 24-bit mantissa up so that the FPU rounds to nearest even at
  // 2^-24.
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000U;
  std::uint32_t half = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  half = Choose(magnitude < 0x38800000U, subnormal, half);
  half = Choose(magnitude >= 0x477FF000U, 0x7C00U, half);  // rounds to 65536 or more
  half = Choose(magnitude > 0x7F800000U, 0x7E00U, half);
  return static_cast<std::uint16_t>(sign | half);
}

template <class T>
T Load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// One element of each floating dtype, seen as a double or a float and stored from one.
struct F64 {
  static constexpr std::size_t kBytes = 8;
  static double Get(const std::byte* at) { return Load<double>(at); }
  static void Put(double v, std::byte* at) { std::memcpy(at, &v, sizeof v); }
};
struct F32 {
  static constexpr std::size_t kBytes = 4;
  static float Get(const std::byte* at) { return Load<float>(at); }
  static void Put(double v, std::byte* at) {
    const auto f = static_cast<float>(v);
    std::memcpy(at, &f, sizeof f);
  }
};
struct F16 {
  static constexpr std::size_t kBytes = 2;
  static float Get(const std::byte* at) { return FromF16(Load<std::uint16_t>(at)); }
  static void Put(double v, std::byte* at) {
    const std::uint16_t h = ToF16(static_cast<float>(v));
    std::memcpy(at, &h, sizeof h);
  }
};
struct BF16 {
  static constexpr std::size_t kBytes = 2;
  static float Get(const std::byte* at) { return FromBf16(Load<std::uint16_t>(at)); }
  static void Put(double v, std::byte* at) {
    const std::uint16_t h = ToBf16(static_cast<float>(v));
    std::memcpy(at, &h, sizeof h);
  }
};

template <class Codec>
struct F8 {
  static constexpr std::size_t kBytes = 1;
  static float Get(const std::byte* at) { return kValues[std::to_integer<std::size_t>(*at)]; }
  static void Put(double v, std::byte* at) {
    *at = static_cast<std::byte>(Codec::Encode(static_cast<float>(v)));
  }

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

/// The same for every floating dtype.
template <class Visit>
void ForFloat(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::kF8E4M3:
      return visit(F8<internal::Float8E4M3>{});
    case DType::kF8E5M2:
      return visit(F8<internal::Float8E5M2>{});
    case DType::kF8E4M3Fnuz:
      return visit(F8<internal::Float8E4M3Fnuz>{});
    case DType::kF8E5M2Fnuz:
      return visit(F8<internal::Float8E5M2Fnuz>{});
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
  // A unit of 8-bit elements would need more memory than a thread has (exec/gather.h), and weights
  // are never float64.
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
