// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/ucp.h"
#include "partial/save/save.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Limit for iterations, tokens or checkpoints in a flag.
inline constexpr std::uint64_t kMany = std::uint64_t{1} << 53;

/// Returns the values of --policy.
const std::vector<std::pair<std::string, partial::Policy>>& PolicyWords();

/// Flags that choose experts, for a save, an agent and a plan.
struct SelectionFlags {
  partial::Policy policy = partial::Policy::kSequential;
  std::uint64_t k = 1;
  std::optional<std::uint64_t> k_persist;
  std::optional<std::uint64_t> max_age;
  std::uint64_t budget = 0;
  std::optional<double> dynamic_k;
  std::string dynamic_k_mode = "react";
  std::string tokens;

  void AddTo(cli::App& app);
  /// Checks rules that combine several flags.
  /// \error kUsage
  Status CheckRules(const cli::App& app) const;
};

/// Flags of a save, and of an agent, which saves its snapshots.
struct SaveFlags {
  SourceFlags source;
  SelectionFlags selection;
  partial::SaveRequest request;
  std::vector<std::string> keep;
  std::string compress = "none";
  std::optional<std::uint64_t> iterations;
  bool agent = false;  ///< true for an agent, which can receive gradients

  void AddTo(cli::App& app);
  /// Adds flags for values that an agent determines by itself.
  void AddSaveOnlyTo(cli::App& app);
  /// \error kUsage
  Status CheckRules(const cli::App& app);
  /// Returns the request for the library, without the token counts.
  partial::SaveRequest Options(const cli::CommonFlags& common) const;

 private:
  Status CheckDynamicK(const cli::App& app) const;
};

}  // namespace shardwright::apps
