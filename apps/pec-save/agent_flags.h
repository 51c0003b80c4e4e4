#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/app.h"
#include "pec-save/flags.h"
#include "pec/agent_run.h"

namespace shardwright::apps {

/// The flags of pec-save --agent.
struct AgentFlags {
  bool copies_only = false;
  std::vector<std::string> listen;
  std::vector<std::string> peers;
  std::string name;
  std::uint64_t memory_limit = std::uint64_t{8} << 30;
  std::uint64_t bandwidth = 0;

  void AddTo(cli::App& app);
  /// \error kUsage  --copies-only without --listen; a text that is no address
  Status CheckRules(const SaveFlags& save) const;

  /// Runs the agent until it is told to stop.
  Status Run(cli::Context& context, const cli::App& app, const SaveFlags& save) const;
};

/// Answers --status, or --tell with a request.
Status AskAgent(cli::Context& context, const std::string& address, const std::string& request);

}  // namespace shardwright::apps
