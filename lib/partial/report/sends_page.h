// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "support/base/result.h"

namespace shardwright::partial {

/// What an agent has sent around its last snapshots, above the times in which ranks idled, as one
/// self-contained HTML page without scripts.
/// \param sends  the agent's answer to the request of this name
/// \param address  the agent, UTF-8 without control characters
/// \error kBadInput  it is no such answer; kNotFound  nothing was sent yet
/// Pure. Source: docs/formats/agent.md, "Idle times".
Result<std::string> SendsPage(std::string_view sends, const std::string& address);

}  // namespace shardwright::partial
