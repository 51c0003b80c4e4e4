// SPDX-License-Identifier: Apache-2.0
// Connects the mutations with libFuzzer and its own mutation, which knows no format.

#include <algorithm>
#include <cstring>

#include "fuzz/mutate/mutate.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t bytes, std::size_t most);

namespace shardwright::fuzz {

std::size_t MutateFor(Mutation mutation, std::uint8_t* data, std::size_t bytes, std::size_t most,
                      std::uint32_t seed) {
  Chance chance(seed, [most](std::string part) {
    const std::size_t before = part.size();
    part.resize(std::min(most, before + 64));
    auto* const first = reinterpret_cast<std::uint8_t*>(part.data());
    part.resize(LLVMFuzzerMutate(first, std::min(before, part.size()), part.size()));
    return part;
  });
  if (chance.OneIn(4)) return LLVMFuzzerMutate(data, bytes, most);
  const std::string made = mutation({reinterpret_cast<const char*>(data), bytes}, chance);
  if (made.empty() || made.size() > most) return LLVMFuzzerMutate(data, bytes, most);
  std::memcpy(data, made.data(), made.size());
  return made.size();
}

}  // namespace shardwright::fuzz
