// SPDX-License-Identifier: Apache-2.0
// Moves tokens to experts and back. A token has `hidden` elements and is sent to `choices` rows of
// a send buffer; place[token * choices + choice] is the row, or negative for none. No two choices
// have the same row. Pack and Unpack are transposes of each other, and Dots is the derivative of
// both with respect to the weights, so that the three are closed under differentiation.
//
// Each function does the work of one token on the CPU. T is double, float, or a 16-bit type that
// converts to and from float. On GPUs the package uses PyTorch operators instead.

#pragma once

#include <algorithm>
#include <cstdint>

namespace shardwright::trainer_torch {

/// Elements that UnpackToken and SumParts add up at once, so that compilers vectorize the loop.
inline constexpr std::int64_t kSumBlock = 64;

/// Type of the accumulators and weights for elements of type T.
template <class T>
struct SumType {
  using Type = float;
};
template <>
struct SumType<double> {
  using Type = double;
};
template <class T>
using Sum = typename SumType<T>::Type;

/// Describes how tokens map to rows.
template <class T>
struct TokenRows {
  const std::int64_t* place = nullptr;  ///< [tokens][choices]
  const Sum<T>* weights = nullptr;      ///< [tokens][choices]; null: all are 1
  std::int64_t choices = 0;
  std::int64_t hidden = 0;
};

/// Computes rows[place] = weight * token for all choices of a token.
/// \param rows    [rows][hidden]
/// \param tokens  [tokens][hidden]
template <class T>
void PackToken(const TokenRows<T>& work, T* rows, const T* tokens, std::int64_t token) {
  const T* from = tokens + token * work.hidden;
  for (std::int64_t k = token * work.choices; k < (token + 1) * work.choices; ++k) {
    if (work.place[k] < 0) continue;
    T* to = rows + work.place[k] * work.hidden;
    if (work.weights == nullptr) {
      for (std::int64_t h = 0; h < work.hidden; ++h) to[h] = from[h];
    } else {
      const Sum<T> weight = work.weights[k];
      for (std::int64_t h = 0; h < work.hidden; ++h) {
        to[h] = static_cast<T>(static_cast<Sum<T>>(from[h]) * weight);
      }
    }
  }
}

/// Computes token = sum of weight * rows[place] over its choices, in their order, rounded
/// once; zeros if the token has no choice.
template <class T>
void UnpackToken(const TokenRows<T>& work, T* tokens, const T* rows, std::int64_t token) {
  T* to = tokens + token * work.hidden;
  for (std::int64_t first = 0; first < work.hidden; first += kSumBlock) {
    const std::int64_t count = std::min(work.hidden - first, kSumBlock);
    Sum<T> sum[kSumBlock];
    bool none = true;
    for (std::int64_t k = token * work.choices; k < (token + 1) * work.choices; ++k) {
      if (work.place[k] < 0) continue;
      const T* from = rows + work.place[k] * work.hidden + first;
      const Sum<T> weight = work.weights == nullptr ? Sum<T>(1) : work.weights[k];
      if (none) {  // assigned, not added to zero, which would turn -0 into +0
        for (std::int64_t i = 0; i < count; ++i) sum[i] = weight * static_cast<Sum<T>>(from[i]);
      } else {
        for (std::int64_t i = 0; i < count; ++i) sum[i] += weight * static_cast<Sum<T>>(from[i]);
      }
      none = false;
    }
    for (std::int64_t i = 0; i < count; ++i) to[first + i] = none ? T(0) : static_cast<T>(sum[i]);
  }
}

/// Returns the dot product of a token and the row that it was sent to. k numbers the pairs of token
/// and chosen expert over all tokens. Returns 0 if pair k was sent nowhere. Adds up kLanes
/// interleaved parts, so that every compiler gives the same bits.
template <class T>
Sum<T> DotOf(const TokenRows<T>& work, const T* rows, const T* tokens, std::int64_t k) {
  constexpr int kLanes = 16;
  if (work.place[k] < 0) return Sum<T>(0);
  const T* a = rows + work.place[k] * work.hidden;
  const T* b = tokens + k / work.choices * work.hidden;
  Sum<T> part[kLanes] = {};
  std::int64_t h = 0;
  for (; h + kLanes <= work.hidden; h += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      part[i] += static_cast<Sum<T>>(a[h + i]) * static_cast<Sum<T>>(b[h + i]);
    }
  }
  for (int i = 0; h < work.hidden; ++h, ++i) {
    part[i] += static_cast<Sum<T>>(a[h]) * static_cast<Sum<T>>(b[h]);
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) part[i] += part[i + width];
  }
  return part[0];
}

/// Computes to[i] = sum of parts[p][i] over p, in that order, rounded once, for i in [first, last).
/// \param parts  [count][elems]; count >= 1
template <class T>
void SumParts(T* to, const T* parts, std::int64_t count, std::int64_t elems, std::int64_t first,
              std::int64_t last) {
  for (; first < last; first += kSumBlock) {
    const std::int64_t width = std::min(last - first, kSumBlock);
    Sum<T> sum[kSumBlock];
    for (std::int64_t i = 0; i < width; ++i) sum[i] = static_cast<Sum<T>>(parts[first + i]);
    for (std::int64_t p = 1; p < count; ++p) {
      const T* from = parts + p * elems + first;
      for (std::int64_t i = 0; i < width; ++i) sum[i] += static_cast<Sum<T>>(from[i]);
    }
    for (std::int64_t i = 0; i < width; ++i) to[first + i] = static_cast<T>(sum[i]);
  }
}

}  // namespace shardwright::trainer_torch
