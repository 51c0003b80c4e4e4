// SPDX-License-Identifier: Apache-2.0
// Intervals of the agent's threads.

#pragma once

#include <chrono>

namespace shardwright::partial {

/// Interval at which a thread looks for work, and for the end of the agent.
inline constexpr std::chrono::milliseconds kAgentTick(50);

/// Delay before a failed persist, copy or replay is tried again.
inline constexpr std::chrono::milliseconds kAgentRetry(1000);

}  // namespace shardwright::partial
