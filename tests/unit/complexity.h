// SPDX-License-Identifier: Apache-2.0
// The processor time of a parser as its text grows.

#pragma once

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>

namespace shardwright {

/// Processor time of this thread in seconds.
inline double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Returns how many times the processor time of `parse` grows when its input is twice as large.
/// Measures inputs of size n and 2n in turn, until the least times of both show at most `good`
/// times, or 120 times. Noise only adds time, so the least times come near to the true ones.
/// \param make  returns the input of a size: make(n)
/// \param parse  is called with the input; its result is ignored
template <class Make, class Parse>
double GrowthWhenDoubled(std::size_t n, double good, Make&& make, Parse&& parse) {
  const auto small = make(n);
  const auto large = make(2 * n);
  constexpr double kNone = std::numeric_limits<double>::infinity();
  double least_small = kNone;
  double least_large = kNone;
  const auto measure = [&](const auto& input, double* least) {
    const double begun = ThreadSeconds();
    parse(input);
    *least = std::min(*least, ThreadSeconds() - begun);
  };
  for (int i = 0; i < 120; ++i) {
    measure(small, &least_small);
    measure(large, &least_large);
    if (i >= 2 && least_large <= good * least_small) break;
  }
  return least_large / least_small;
}

/// The growth that tests allow: linear with a logarithm, plus the effect of caches.
inline constexpr double kMostGrowth = 2.2;

/// Expects the processor time of `parse` to grow at most kMostGrowth times from inputs of size n to
/// those of size 2n, or from n / 4 to n / 2: on a busy machine other processes use the caches,
/// which only large inputs need. See GrowthWhenDoubled. In a build with sanitizers `parse` runs
/// once and is not measured, because the allocator of a sanitizer slows down as the number of
/// blocks grows.
template <class Make, class Parse>
void ExpectLinear(std::size_t n, Make&& make, Parse&& parse) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  parse(make(n));
#else
  double growth = GrowthWhenDoubled(n, kMostGrowth, make, parse);
  if (growth > kMostGrowth) growth = GrowthWhenDoubled(n / 4, kMostGrowth, make, parse);
  EXPECT_LE(growth, kMostGrowth) << "sizes " << n << " and " << n / 4;
#endif
}

/// Eight digits.
inline std::string Digits(std::size_t number) {
  const std::string digits = std::to_string(number);
  return std::string(8 - std::min<std::size_t>(8, digits.size()), '0') + digits;
}

/// Returns a function of n that makes "OPEN part(0) BETWEEN part(1) ... CLOSE" of n parts.
template <class Part>
auto Listed(const std::string& open, Part part, const std::string& close,
            const std::string& between = ",") {
  return [=](std::size_t n) {
    std::string text = open;
    for (std::size_t i = 0; i < n; ++i) {
      if (i > 0) text += between;
      text += part(i);
    }
    return text + close;
  };
}

/// Returns a function of n that makes a JSON object of n members, which no reader knows.
inline auto UnknownKeys() {
  return Listed(
      "{", [](std::size_t i) { return "\"k" + Digits(i) + "\":0"; }, "}");
}

}  // namespace shardwright
