#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cli/app.h"
#include "common/ucp.h"
#include "pec-save/modes.h"
#include "pec-save/planning.h"
#include "pec/collect.h"
#include "pec/save.h"

namespace shardwright::apps {

/// The flags of pec-save.
struct SaveFlags {
  static constexpr std::uint64_t kUnset = std::numeric_limits<std::uint64_t>::max();

  SourceFlags source;
  ModeFlags modes;
  Mode mode = Mode::kSave;  ///< set by CheckRules
  PlanningFlags planning;
  std::string store;
  pec::Policy policy = pec::Policy::kSequential;
  std::uint64_t k = 1;
  std::uint64_t k_persist = kUnset;
  double dynamic_k = 0;
  std::string dynamic_k_mode = "react";
  std::uint64_t max_age = kUnset;
  std::uint64_t budget = 0;
  std::uint64_t resumed_from = kUnset;
  std::uint64_t iteration = kUnset;
  std::uint64_t keep_last = 1;
  std::uint64_t keep_every = kUnset;
  std::string tokens;
  std::string compress = "none";
  std::vector<std::string> keep;
  bool partial_start = false;

  void AddTo(cli::App& app);
  /// Chooses the mode; rules that join several flags.
  /// \error kUsage
  Status CheckRules(cli::App& app);
  /// As the library takes them, but for the tokens.
  /// \error kUsage
  Result<pec::SaveRequest> Options(const cli::App& app, const cli::CommonFlags& common) const;
  pec::Retention Rules() const;

 private:
  Status CheckDynamicK(const cli::App& app) const;
};

}  // namespace shardwright::apps
