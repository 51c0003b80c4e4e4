// SPDX-License-Identifier: Apache-2.0
#include "pec-save/ask_agent.h"

#include <utility>

#include "support/base/stop.h"
#include "support/json/json.h"
#include "support/os/socket.h"

namespace shardwright::apps {

Result<std::unique_ptr<partial::AgentClient>> ConnectAgent(cli::Context& context,
                                                           const std::string& address,
                                                           const KeyFlags& key,
                                                           std::chrono::milliseconds patience) {
  SW_TRY_ASSIGN(os::Address where, os::ParseAddress(address));
  SW_TRY_ASSIGN(where.trusted_user, key.trust.User());
  SW_TRY_ASSIGN(auto secret, key.Read(context));
  return std::make_unique<partial::AgentClient>(std::move(where), std::move(secret),
                                                StopOf(context.sink()), patience);
}

Result<nlohmann::json> AskStatus(partial::AgentClient& client, const std::string& address) {
  SW_TRY_ASSIGN(const std::string text, client.AskText("status"));
  SW_TRY_ASSIGN(nlohmann::json json, json::Parse(text, address));
  if (!json.is_object()) {
    return Fail(Errc::kBadInput, address,
                ": the answer is not the status of an agent; check the address");
  }
  return json;
}

}  // namespace shardwright::apps
