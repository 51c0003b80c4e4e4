// SPDX-License-Identifier: Apache-2.0
// Copies runs of bytes: gather, scatter, transposition of blocks.

#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/device/kernels/portable.h"

namespace shardwright::device::kernels {

/// One run, with the fields of device::Run.
struct MovedRun {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t bytes;
};

/// Bytes of one piece, the work of one index. Targets are split at multiples of it.
inline constexpr unsigned kRunPiece = 16;

/// Returns the number of pieces of a run.
SW_HOST_DEVICE inline std::uint64_t RunPieces(const std::byte* to, const MovedRun& run) {
  const std::uint64_t before = reinterpret_cast<std::uintptr_t>(to + run.to) % kRunPiece;
  return run.bytes == 0 ? 0 : (before + run.bytes + kRunPiece - 1) / kRunPiece;
}

template <class Word>
SW_HOST_DEVICE inline void MoveWords(std::byte* to, const std::byte* from) {
  for (unsigned i = 0; i < kRunPiece / sizeof(Word); ++i) {
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
  }
}

/// Copies piece `index` of a run in the widest words that source and target are aligned to.
SW_HOST_DEVICE inline void MovePiece(std::byte* to, const std::byte* from, const MovedRun& run,
                                     std::uint64_t index) {
  std::byte* const target = to + run.to;
  const std::byte* const source = from + run.from;
  const std::uint64_t before = reinterpret_cast<std::uintptr_t>(target) % kRunPiece;
  const std::uint64_t first = index == 0 ? 0 : index * kRunPiece - before;
  std::uint64_t last = (index + 1) * kRunPiece - before;
  if (last > run.bytes) last = run.bytes;
  std::byte* const at = target + first;
  const std::byte* const its = source + first;
  struct alignas(16) Words {
    std::uint64_t low, high;
  };
  const auto apart = reinterpret_cast<std::uintptr_t>(its) % kRunPiece;
  if (last - first < kRunPiece || apart % 4 != 0) {
    for (std::uint64_t i = first; i < last; ++i) target[i] = source[i];
  } else if (apart == 0) {
    MoveWords<Words>(at, its);
  } else if (apart % 8 == 0) {
    MoveWords<std::uint64_t>(at, its);
  } else {
    MoveWords<std::uint32_t>(at, its);
  }
}

}  // namespace shardwright::device::kernels
