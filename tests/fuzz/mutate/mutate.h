// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mutations that know a format: most of their outputs are still well formed up to the changed
// place, so that a fuzz target passes the length and checksum tests that stop random bytes.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright::fuzz {

/// Source of randomness for a mutation, and of byte changes without knowledge of a format.
class Chance {
 public:
  using Plain = std::function<std::string(std::string)>;

  Chance(std::uint32_t seed, Plain plain) : random_(seed), plain_(std::move(plain)) {}

  /// A number below `count`, which is not 0.
  std::size_t Below(std::size_t count) { return random_() % count; }
  bool OneIn(std::size_t count) { return Below(count) == 0; }
  std::string Change(std::string bytes) { return plain_(std::move(bytes)); }
  /// A typical limit: 0, 1, powers of two and the numbers next to them.
  std::uint64_t Odd();

 private:
  std::mt19937 random_;
  Plain plain_;
};

/// The lowest `bytes` bytes of a number, and a number of up to eight bytes: little endian.
std::string Little(std::uint64_t number, std::size_t bytes);
std::uint64_t Number(std::string_view little_endian);

/// Each of these mutates input of an unknown format as plain bytes. Pure but for chance. They
/// accept any input.
std::string MutatePickle(std::string_view bytes, Chance& chance);
/// Two pickles after the offset of the second, as fuzz::TwoPickles reads them.
std::string MutateTwoPickles(std::string_view bytes, Chance& chance);
/// Archives of stored or deflated members. Checksums, sizes and the directory match the changed
/// contents, except in one of three outputs.
std::string MutateZip(std::string_view bytes, Chance& chance);
/// Headers keep their length, and most outputs store the tensors one after another as required.
std::string MutateSafetensors(std::string_view bytes, Chance& chance);

using Mutation = std::string (*)(std::string_view bytes, Chance& chance);

}  // namespace shardwright::fuzz

// SW_FUZZ_MUTATION(Mutation) in a fuzz target adds the mutation to libFuzzer's own. Builds that
// only replay inputs have no mutation.
#ifdef SW_FUZZ
namespace shardwright::fuzz {
std::size_t MutateFor(Mutation mutation, std::uint8_t* data, std::size_t bytes, std::size_t most,
                      std::uint32_t seed);
}  // namespace shardwright::fuzz
#define SW_FUZZ_MUTATION(mutation)                                                              \
  extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t bytes,         \
                                                 std::size_t most, unsigned int seed) {         \
    return shardwright::fuzz::MutateFor(&shardwright::fuzz::mutation, data, bytes, most, seed); \
  }
#else
#define SW_FUZZ_MUTATION(mutation)
#endif
