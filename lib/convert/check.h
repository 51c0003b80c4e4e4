// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/compare.h"
#include "convert/input.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Result of a comparison of two checkpoints.
struct CheckReport {
  std::uint64_t tensors_equal = 0;
  std::uint64_t tensors_different = 0;
  std::uint64_t bytes_compared = 0;
  /// The first differences, one line each: missing tensors, shapes, scalars, groups,
  /// then tensors by descending largest difference. The line of a tensor has its first
  /// differing element in both checkpoints, and the largest and the mean difference.
  std::vector<std::string> differences;
  std::uint64_t difference_count = 0;
  std::vector<std::string> notes;  ///< properties that only one checkpoint records; not compared
};

inline constexpr std::size_t kShownDifferences = 20;

/// Compares two checkpoints of any layouts bit for bit, one logical tensor at a time. A compute
/// weight that one checkpoint lacks is compared with the rounded master. Also compares steps,
/// iteration and training samples if both record them, parameter groups and their members, tied
/// names, and kinds. If the formats differ, compares the options of the groups that contain each
/// parameter, and notes the properties that only one format records. Numbers are compared by
/// value: a step of 4 equals the tensor 4.0. Every source member that is read is compared with
/// its checksum.
/// \param only  "weight" or "master": compares only the model's tensors, trained parameters by
///        their compute weights or by their master weights. Either can be derived from the other.
///        Compute weights of two types are compared in the narrower one. Empty: everything.
/// \error kBadInput, kNotFound  an input; differences are not errors
/// Collective.
Result<CheckReport> Check(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options,
                          Sink& sink, const std::string& only = {});

}  // namespace shardwright::convert
