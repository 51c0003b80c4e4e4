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

/// Most iterations, tokens or checkpoints that a flag takes.
inline constexpr std::uint64_t kMany = std::uint64_t{1} << 53;

/// The words of --policy.
const std::vector<std::pair<std::string, partial::Policy>>& PolicyWords();

/// The flags that choose experts, of a save, an agent and a plan.
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
  /// Rules that join several flags.
  /// \error kUsage
  Status CheckRules(const cli::App& app) const;
};

/// The flags of a save and of an agent, which saves too.
struct SaveFlags {
  SourceFlags source;
  SelectionFlags selection;
  partial::SaveRequest request;
  std::vector<std::string> keep;
  std::string compress = "none";
  std::optional<std::uint64_t> iterations;
  bool agent = false;  ///< of an agent, which gradients may come to

  void AddTo(cli::App& app);
  /// And what an agent finds out for itself.
  void AddSaveOnlyTo(cli::App& app);
  /// \error kUsage
  Status CheckRules(const cli::App& app);
  /// As the library takes them, but for the tokens.
  partial::SaveRequest Options(const cli::CommonFlags& common) const;

 private:
  Status CheckDynamicK(const cli::App& app) const;
};

}  // namespace shardwright::apps
