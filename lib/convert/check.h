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

/// What two checkpoints do not have in common.
struct CheckReport {
  std::uint64_t tensors_equal = 0;
  std::uint64_t tensors_different = 0;
  std::uint64_t bytes_compared = 0;
  /// The first differences, one line each: missing tensors, shapes, scalars, groups, and then
  /// tensors, those with the largest difference first. The line of a tensor has its first differing
  /// element with both sides, and the largest and the mean difference of its elements.
  std::vector<std::string> differences;
  std::uint64_t difference_count = 0;
  std::vector<std::string> notes;  ///< properties that only one side records; not compared
};

inline constexpr std::size_t kShownDifferences = 20;

/// Compares two checkpoints of any layouts, logical tensor by logical tensor, bit for bit; a
/// compute weight that one side lacks is compared with the rounded master. Steps, the iteration and
/// the samples of training as far as both tell them, parameter groups and who is in them, tied
/// names and kinds are compared too; of checkpoints of two formats the options of the groups that
/// each parameter is in. Numbers are compared by value: a step of 4 is the tensor 4.0. Properties
/// that only one of two formats records are noted. Every source member read is compared with its
/// checksum.
/// \param only  "weight" or "master": compares only the model's tensors, trained parameters by
///        their compute weights or by their master weights, either of which may be made of the
///        other. Compute weights of two types are compared in the narrower one. Empty: everything.
/// \error kBadInput, kNotFound  an input; differences are not errors
/// Collective.
Result<CheckReport> Check(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options,
                          Sink& sink, const std::string& only = {});

}  // namespace shardwright::convert
