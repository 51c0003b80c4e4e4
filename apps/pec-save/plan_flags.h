#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "base/result.h"
#include "cli/app.h"

namespace shardwright::apps {

/// The flags of pec-save that only --plan has.
struct PlanFlags {
  static constexpr std::uint64_t kUnset = std::numeric_limits<std::uint64_t>::max();

  std::uint64_t checkpoints = 1;
  std::uint64_t zero_stage = 0;
  std::uint64_t split_above = 0;
  std::string dead_ranks;
  std::uint64_t copies = kUnset;
  std::uint64_t pp = 1;
  std::uint64_t copy_bandwidth = 0;
  bool gradients = false;
  std::uint64_t full_every = 500;
  std::uint64_t micro_batches = kUnset;
  double forward_s = -1;
  double backward_s = -1;
  std::uint64_t chunks = 1;
  std::uint64_t capacity = kUnset;
  std::uint64_t lost_tokens = kUnset;
  double checkpoint_s = -1;
  double retrieval_s = -1;

  void AddTo(cli::App& app);
  /// Refuses flags without those that they belong to.
  /// \param store  the store of sizes; empty: the flags say them
  /// \error kUsage
  Status CheckRules(const cli::App& app, const std::string& store) const;
};

}  // namespace shardwright::apps
