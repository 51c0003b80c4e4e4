#pragma once

#include <cstdint>
#include <random>

namespace shardwright::pec {

// Cases of every property here. Sanitizers are ten times as slow, and look for other faults.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kCases = 2'000;
#else
inline constexpr int kCases = 100'000;
#endif

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

}  // namespace shardwright::pec
