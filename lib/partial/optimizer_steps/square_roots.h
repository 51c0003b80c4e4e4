// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::optimizer_steps {

/// Square roots as computed by the trainer's torch. torch.sqrt on the CPU calls MKL
/// if torch was built with it, and MKL's float32 root depends on the processor and
/// is not always rounded correctly. It is a function of the significand and the
/// exponent's last bit, scaled by powers of 2, with an error of at most one unit in
/// the last place. So 2 bits for each of the 2^24 numbers of [1, 4) define it. On
/// some processors that includes subnormal numbers; others round theirs correctly.
/// Source: docs/lossless.md, "Square roots".
class RootTable {
 public:
  static constexpr std::size_t kRoots = std::size_t{1} << 24;
  static constexpr std::size_t kBytes = kRoots / 4;
  /// Flag in `last`: subnormal numbers follow the table too.
  static constexpr std::uint32_t kSubnormals = 0x80000000U;

  /// Makes a table from a list of all square roots.
  /// \param roots  square roots of all float32 numbers of [1, 4), ascending
  /// \param last   bits of the largest number that follows the table; greater ones are
  ///               rounded correctly, and without kSubnormals also subnormal numbers
  /// \error kBadInput  wrong count, or a root with a larger error: names it
  static Result<RootTable> FromRoots(std::span<const float> roots, std::uint32_t last);

  /// Makes a table from the result of bytes().
  /// \error kBadInput  wrong size, an unknown code, or an invalid `last`
  static Result<RootTable> FromBytes(std::span<const std::byte> bytes, std::uint32_t last);

  /// Returns kBytes bytes with four square roots each, the first in the lowest bits, indexed
  /// by bits & 0xFFFFFF. Codes are 0, 1, 2 for one unit less, correct, one unit more.
  std::span<const std::byte> bytes() const { return std::as_bytes(std::span(words_)); }
  std::uint32_t last() const { return last_; }

  /// Returns true if every root is rounded correctly, so that the table is not needed.
  bool IsCorrect() const;

  /// Returns the bytes as the kernels read them, with 16 square roots per word.
  std::span<const std::uint32_t> words() const { return words_; }

 private:
  RootTable(std::vector<std::uint32_t> words, std::uint32_t last)
      : words_(std::move(words)), last_(last) {}

  std::vector<std::uint32_t> words_;
  std::uint32_t last_ = 0;
};

}  // namespace shardwright::optimizer_steps
