// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace shardwright::placement {

/// Generates pseudorandom numbers from a seed, the same on every machine and with every library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  /// Returns 64 random bits. Source: splitmix64.
  std::uint64_t Next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  /// Returns a number below `bound`. The bias is at most bound / 2^64. \pre bound > 0
  std::uint64_t Below(std::uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>((static_cast<Wide>(Next()) * bound) >> 64);
  }

  /// Returns a number in [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace shardwright::placement
