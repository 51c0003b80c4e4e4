// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::optimizer_steps {

/// Square roots as the trainer's torch has them. torch.sqrt on the CPU calls MKL where it was built
/// with it, and MKL's float32 root is not always rounded correctly: it depends on the processor. It
/// is a function of significand and the exponent's last bit, scaled by powers of 2, and off by one
/// unit in the last place at most. So 2 bits for each of the 2^24 numbers of [1, 4) say all of it.
/// On some processors the same holds for subnormal numbers; on others theirs is rounded
/// correctly.
/// Source: docs/lossless.md, "Square roots".
class RootTable {
 public:
  static constexpr std::size_t kRoots = std::size_t{1} << 24;
  static constexpr std::size_t kBytes = kRoots / 4;
  /// Flag in `last`: subnormal numbers follow the table, too.
  static constexpr std::uint32_t kSubnormals = 0x80000000U;

  /// From the roots themselves.
  /// \param roots  of all float32 numbers of [1, 4), ascending
  /// \param last   bits of the largest number that follows them; greater ones are rounded
  ///               correctly, and so are subnormal numbers without kSubnormals
  /// \error kBadInput  another count, or a root that is off by more: names it
  static Result<RootTable> FromRoots(std::span<const float> roots, std::uint32_t last);

  /// From bytes().
  /// \error kBadInput  another size, a code that does not exist, or a bad `last`
  static Result<RootTable> FromBytes(std::span<const std::byte> bytes, std::uint32_t last);

  /// kBytes, four roots in each, the first in the lowest bits; 0, 1, 2 for one unit less, correct,
  /// one unit more. By bits & 0xFFFFFF.
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(words_)); }
  std::uint32_t last() const { return last_; }

  /// Whether every root is the correctly rounded one: then nobody needs the table.
  bool IsCorrect() const;

  /// The bytes as the kernels read them: 16 roots in each word.
  std::span<const std::uint32_t> words() const { return words_; }

 private:
  RootTable(std::vector<std::uint32_t> words, std::uint32_t last)
      : words_(std::move(words)), last_(last) {}

  std::vector<std::uint32_t> words_;
  std::uint32_t last_ = 0;
};

}  // namespace shardwright::optimizer_steps
