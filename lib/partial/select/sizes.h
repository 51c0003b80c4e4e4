// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Bytes of the components of a state.
struct ComponentBytes {
  std::uint64_t weights = 0;
  std::uint64_t master = 0;   ///< full-precision copy of the weights
  std::uint64_t moments = 0;  ///< all else of the optimizer

  bool operator==(const ComponentBytes&) const = default;
};

/// Components that are saved of every expert at every checkpoint, selected or not.
struct Keep {
  bool weights = false;
  bool master = false;
  bool moments = false;
};

/// What a checkpoint has of an expert: all of it, or only what `keep` names.
ComponentBytes SavedBytes(const ComponentBytes& bytes, bool selected, const Keep& keep);

/// Bytes of what `keep` names.
std::uint64_t KeptBytes(const ComponentBytes& bytes, const Keep& keep);

/// Bytes of all components. \error kBadInput  overflow
Result<std::uint64_t> TotalBytes(const ComponentBytes& bytes);

/// Adds to each component. \error kBadInput  overflow
Status AddTo(ComponentBytes* sum, const ComponentBytes& more);

/// Component bytes of `params` parameters.
/// \param per_param  bytes per parameter
/// \error kBadInput  overflow
/// Pure.
Result<ComponentBytes> BytesOfParams(std::uint64_t params, const ComponentBytes& per_param);

/// Real sizes of a model's modules.
struct ModelBytes {
  std::vector<ComponentBytes> nonexpert;  ///< by non-expert module; shared experts belong here
  PerExpert<ComponentBytes> expert;       ///< [layer][expert]
};

/// What a checkpoint holds.
struct CheckpointSize {
  ComponentBytes nonexpert;
  ComponentBytes expert;              ///< selected and kept
  std::uint64_t bytes = 0;            ///< of the checkpoint
  std::uint64_t full_bytes = 0;       ///< of the full one (eq 5)
  std::vector<std::string> warnings;  ///< K above N: which layer

  double ratio() const {
    return full_bytes == 0 ? 1 : static_cast<double>(bytes) / static_cast<double>(full_bytes);
  }
};

/// Bytes of a checkpoint with the given experts: the sum of real module sizes, so exact. With all
/// experts it equals the full checkpoint whatever is kept.
/// \error kMismatch, kBadInput  a selection that does not fit; kBadInput  overflow
/// Pure. Source: MoC-System eq 5, 6; docs/pec-planning.md section 1.
Result<CheckpointSize> SizeOfCheckpoint(const ModelBytes& model, const Selection& selection,
                                        const Keep& keep);

/// The same for any K experts of every layer, all of a layer being equal in size. K = 0: only what
/// every checkpoint has. K above N of a layer counts as N, with a warning.
/// \error kUsage  a layer with experts of different sizes: names it (its size depends on the
///        choice); kBadInput  overflow
/// Pure. Source: as above.
Result<CheckpointSize> SizeForK(const ModelBytes& model, std::uint32_t k, const Keep& keep);

}  // namespace shardwright::partial
