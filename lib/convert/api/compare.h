// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/api/api.h"
#include "convert/api/ranks.h"
#include "convert/api/source.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright {

/// Options of a comparison.
struct CompareOptions {
  unsigned threads = 1;  ///< per rank
  /// Limit for the buffers of a rank, in bytes.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// Result of a comparison.
struct CompareReport {
  std::uint64_t tensors_equal = 0;
  std::uint64_t tensors_different = 0;
  std::uint64_t bytes_compared = 0;
  std::uint64_t difference_count = 0;    ///< 0: the same training state, bit for bit
  std::vector<std::string> differences;  ///< the first ones, one line each
  /// The whole report as a JSON object, equal to `result` of `ucp-load --check --json`.
  std::string json;
};

/// Compares two checkpoints of any layouts and formats, tensor by tensor, bit for bit.
/// \param first  translated by its maps to the names of `second`; the maps of `second` are ignored
/// \error as Describe, for either source. Differences are not errors.
/// Collective.
SW_API Result<CompareReport> Compare(Ranks& ranks, const Source& first, const Source& second,
                                     const CompareOptions& options, Sink& sink);

}  // namespace shardwright
