#pragma once

#include <nlohmann/json_fwd.hpp>

#include "moe-replace/flags.h"
#include "moe-replace/tasks.h"
#include "moe/replay.h"

namespace shardwright::apps {

// The answers for programs: docs/report.md, "moe-replace".

/// What was read.
nlohmann::json InputJson(const MoeInput& input);

/// A plan with everything that is known of it, or why there is none.
nlohmann::json RowJson(const MoeFlags& flags, const MoeInput& input, const MoeRow& row);

/// A replay, moment by moment.
nlohmann::json ReplayJson(const moe::ReplayResult& result);

}  // namespace shardwright::apps
