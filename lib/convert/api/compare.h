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

/// How a comparison works.
struct CompareOptions {
  unsigned threads = 1;  ///< of each rank
  /// Of buffers that a rank may use.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// What two checkpoints do not have in common.
struct CompareReport {
  std::uint64_t tensors_equal = 0;
  std::uint64_t tensors_different = 0;
  std::uint64_t bytes_compared = 0;
  std::uint64_t difference_count = 0;    ///< 0: the same training state, bit for bit
  std::vector<std::string> differences;  ///< the first of them, one line each
  /// All of it as a JSON object: the `result` of `ucp-load --check --json`.
  std::string json;
};

/// Compares two checkpoints of any layouts and formats, tensor by tensor, bit for bit.
/// \param first  its maps give it the names of `second`; those of `second` are not looked at
/// \error of either source, as Describe; differences are no error
/// Collective.
SW_API Result<CompareReport> Compare(Ranks& ranks, const Source& first, const Source& second,
                                     const CompareOptions& options, Sink& sink);

}  // namespace shardwright
