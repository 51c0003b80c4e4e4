// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright::partial {

/// Makes a self-contained HTML report without scripts: bytes that an agent
/// sent around its last snapshots, above the idle intervals of the ranks.
/// \param sends  the agent's answer to the request "sends"
/// \param address  address of the agent, UTF-8 without control characters
/// \error kBadInput  malformed answer; kNotFound  nothing was sent yet
/// Pure. Source: docs/formats/agent.md, "Idle times".
Result<std::string> SendsPage(std::string_view sends, const std::string& address);

}  // namespace shardwright::partial
