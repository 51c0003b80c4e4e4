// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "common/pec.h"
#include "partial/agent/agent_client.h"
#include "support/base/result.h"
#include "support/cli/app.h"

namespace shardwright::apps {

/// Returns a client of the agent at an address, unix:PATH or HOST:PORT.
/// \param patience  time limit of each answer
/// \error kUsage  not an address; as KeyFlags::Read
/// Collective.
Result<std::unique_ptr<partial::AgentClient>> ConnectAgent(
    cli::Context& context, const std::string& address, const KeyFlags& key,
    std::chrono::milliseconds patience = partial::kAgentPatience);

/// Asks for the status of an agent.
/// \error kBadInput  the answer is not a JSON object; as AgentClient::AskText
/// Local.
Result<nlohmann::json> AskStatus(partial::AgentClient& client, const std::string& address);

}  // namespace shardwright::apps
