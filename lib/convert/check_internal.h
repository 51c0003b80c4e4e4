// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "convert/check.h"
#include "convert/element_text.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/plan.h"
#include "engine/plan/target_builder.h"

namespace shardwright::convert {

/// The tensors to compare, as a target that is never written. It has one file per tensor.
class Common {
 public:
  void Add(const layout::LogicalTensor& tensor) {
    const std::uint32_t file = builder_.AddFile(tensor.name);
    builder_.AddWhole(file, 0, tensor.name, tensor.state, tensor.dtype, tensor.shape, tensor.state);
  }
  const plan::Target& target() const { return builder_.target(); }

 private:
  plan::TargetBuilder builder_;
};

/// Differences between the elements of two tensors.
struct Apart {
  double largest = 0;  ///< absolute; infinite if only one of two is a number
  double sum = 0;      ///< sum of absolute differences
};

/// Description of a tensor that differs.
struct Difference {
  std::uint64_t unit = 0;  ///< the first unit that differs
  std::string text;        ///< text of the first difference
  Apart apart;             ///< total of all units; stays zero for integers
};

/// One run of Check. check.cc compares names, shapes and elements of tensors; check_params.cc
/// compares kinds, ties and optimizer scalars of parameters, parameter groups, and the progress of
/// training.
class Checker {
 public:
  Checker(comm::Comm& comm, Input& a, Input& b, const CompareOptions& options, std::string only,
          Sink& sink);

  Result<CheckReport> Run();

 private:
  void CompareNames();
  void CompareModel();
  void CompareParams();
  void CompareProgress();
  void CompareGroups();
  void CompareGroupsOfParams(bool one_format);
  void Differ(std::string line) {
    const std::lock_guard lock(mutex_);
    ++report_.difference_count;
    if (report_.differences.size() < kShownDifferences)
      report_.differences.push_back(std::move(line));
  }
  /// Returns the pass over optimizer states that only one checkpoint
  /// has. Their parameters have no state in the other checkpoint yet.
  std::size_t IdlePass(bool first) const { return commons_.size() - (first ? kSides : 1); }
  bool IsIdle(std::size_t pass) const { return pass >= IdlePass(true); }
  void AddUnpaired(const layout::LogicalTensor& tensor, bool first);
  const layout::ShardMap& MapOfA(std::size_t pass) const {
    if (pass > 0) return alike_.tied[pass - 1].a;
    return alike_.maps ? alike_.maps->a : a_.checkpoint.map;
  }
  const layout::ShardMap& MapOfB(std::size_t pass) const {
    if (pass > 0) return alike_.tied[pass - 1].b;
    return alike_.maps ? alike_.maps->b : b_.checkpoint.map;
  }
  Status ComparePayloads(std::size_t pass);
  Status ShareDifferences();
  void CompareBytes(std::size_t pass, std::uint64_t index, const plan::Unit& unit,
                    std::span<const std::byte> of_a, std::span<const std::byte> of_b);

  comm::Comm& comm_;
  Input& a_;
  Input& b_;
  const CompareOptions& options_;
  const std::string only_;  // as in Check
  Sink& sink_;
  Alike alike_;
  static constexpr std::size_t kSides = 2;
  const std::set<std::string> idle_a_;  // trained parameters without optimizer state
  const std::set<std::string> idle_b_;
  std::vector<std::string> idle_;  // those with states in the other checkpoint only
  std::vector<Common> commons_;    // for alike_.maps, each of alike_.tied, and both IdlePass
  std::mutex mutex_;
  using Tensor = std::pair<std::size_t, std::uint32_t>;  // index in commons_, tensor
  std::map<Tensor, Difference> different_;
  CheckReport report_;
};

}  // namespace shardwright::convert
