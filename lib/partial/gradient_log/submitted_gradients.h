// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tensor/dtype.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Describes the gradients that a trainer's process submits after each optimizer step: the
/// offsets of the experts' gradients in shared memory. The memory has slots for several steps.
struct Handing {
  struct Piece {
    std::string param;
    std::uint64_t elems = 0;  ///< of the whole parameter
    std::uint64_t first = 0;
    std::uint64_t count = 0;
    DType dtype = DType::kF32;
    std::uint64_t offset = 0;  ///< bytes from the start of a slot
    std::uint32_t tensor = 0;  ///< optimizer tensor; indexes the steps of an iteration
  };
  struct Module {
    std::string name;
    std::vector<Piece> pieces;
  };
  std::uint32_t writer = 0;
  std::uint64_t recovery = 0;  ///< the store's last recovery when the trainer was filled
  std::uint64_t begun = 0;     ///< last iteration before the first submitted one
  std::uint64_t every = 0;     ///< iterations between snapshots; 0: unknown
  int zstd_level = 0;
  std::uint32_t places = 0;
  std::uint64_t place_bytes = 0;
  std::uint32_t tensors = 0;
  std::vector<Module> modules;
};

/// Parses a trainer's description. Splits pieces that exceed the size of a log record.
/// \error kBadInput, kUnsupported  describes the invalid field
Result<Handing> ParseHanding(std::string_view text, std::uint32_t writer, const std::string& where);

}  // namespace shardwright::partial
