#pragma once

#include <string>

#include "base/result.h"
#include "cli/app.h"

namespace shardwright::apps {

/// What a run of pec-save does. As bits, for sets of modes.
enum class Mode : unsigned {
  kSave = 1,
  kList = 2,
  kCheck = 4,
  kCollect = 8,  ///< --gc
  kAgent = 16,
  kAsk = 32,  ///< --status, --tell
  kSimulate = 64,
  kAuto = 128,
  kPlan = 256,
};

/// The flags that name a mode; none: save.
struct ModeFlags {
  bool check = false;
  bool gc = false;
  bool agent = false;
  bool status = false;
  std::string tell;
  bool simulate = false;
  bool choose = false;  ///< --auto
  bool plan = false;

  void AddTo(cli::App& app);
  /// The mode asked for.
  /// \error kUsage  two modes; a flag that does nothing in this one
  Result<Mode> Choose(const cli::App& app) const;
};

/// Lets a mode have fewer positional arguments than a save.
/// \error kUsage  one too many
Status CheckArguments(cli::App& app, Mode mode, const std::string& input,
                      const std::string& output);

}  // namespace shardwright::apps
