// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "partial/select/types.h"
#include "support/base/result.h"

namespace shardwright::partial {

/// Sizes of the components of a module or checkpoint, in bytes.
struct ComponentBytes {
  std::uint64_t weights = 0;
  std::uint64_t master = 0;   ///< full-precision copy of the weights
  std::uint64_t moments = 0;  ///< all other optimizer state

  bool operator==(const ComponentBytes&) const = default;
};

/// Components that every checkpoint saves for all experts, selected or not.
struct Keep {
  bool weights = false;
  bool master = false;
  bool moments = false;
};

/// Returns the part of an expert that a checkpoint saves: all, or only the kept components.
ComponentBytes SavedBytes(const ComponentBytes& bytes, bool selected, const Keep& keep);

/// Returns the bytes of the kept components.
std::uint64_t KeptBytes(const ComponentBytes& bytes, const Keep& keep);

/// Returns the sum of all components. \error kBadInput  overflow
Result<std::uint64_t> TotalBytes(const ComponentBytes& bytes);

/// Adds `more` to `sum` by component. \error kBadInput  overflow
Status AddTo(ComponentBytes* sum, const ComponentBytes& more);

/// Returns the component sizes of `params` parameters.
/// \param per_param  bytes per parameter
/// \error kBadInput  overflow
/// Pure.
Result<ComponentBytes> BytesOfParams(std::uint64_t params, const ComponentBytes& per_param);

/// Actual sizes of a model's modules.
struct ModelBytes {
  std::vector<ComponentBytes> nonexpert;  ///< by non-expert module, including shared experts
  PerExpert<ComponentBytes> expert;       ///< [layer][expert]
};

/// Size of a checkpoint.
struct CheckpointSize {
  ComponentBytes nonexpert;
  ComponentBytes expert;              ///< selected experts, and kept components
  std::uint64_t bytes = 0;            ///< of the checkpoint
  std::uint64_t full_bytes = 0;       ///< of the full checkpoint (eq 5)
  std::vector<std::string> warnings;  ///< layers with K above N

  double ratio() const {
    return full_bytes == 0 ? 1 : static_cast<double>(bytes) / static_cast<double>(full_bytes);
  }
};

/// Computes the bytes of a checkpoint with the given experts from actual module sizes, so
/// the result is exact. With all experts it equals the full checkpoint for any `keep`.
/// \error kMismatch, kBadInput  a selection that does not fit; kBadInput  overflow
/// Pure. Source: MoC-System eq 5, 6; docs/pec-planning.md section 1.
Result<CheckpointSize> SizeOfCheckpoint(const ModelBytes& model, const Selection& selection,
                                        const Keep& keep);

/// Computes the size for any K experts of every layer, if those of a layer are equal in size. K =
/// 0 counts only non-expert modules and kept components. K above N counts as N, with a warning.
/// \error kUsage  a layer with experts of different sizes (named),
///        because its size depends on the selection; kBadInput  overflow
/// Pure. Source: as above.
Result<CheckpointSize> SizeForK(const ModelBytes& model, std::uint32_t k, const Keep& keep);

}  // namespace shardwright::partial
