// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>

namespace shardwright::partial {

// Numbers in [first, last] from a seed, the same everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t In(std::uint64_t first, std::uint64_t last) {
    return first + engine_() % (last - first + 1);
  }
  std::uint32_t Small(std::uint32_t first, std::uint32_t last) {
    return static_cast<std::uint32_t>(In(first, last));
  }
  bool Chance(std::uint32_t percent) { return engine_() % 100 < percent; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace shardwright::partial
