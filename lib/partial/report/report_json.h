// SPDX-License-Identifier: Apache-2.0
// lib/partial/report: what commands on stores say.
// report_json.h turns reports of saves, restores, checks and agents into JSON; list_store.h lists
// what a store holds.

#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "partial/agent/agent.h"
#include "partial/gradient_log/log_collect.h"
#include "partial/restore/restore.h"
#include "partial/save/repair.h"
#include "partial/save/save.h"
#include "partial/store/check_store.h"
#include "partial/store/collect.h"
#include "partial/store/dynamic_run.h"
#include "partial/store/undo.h"

// What the reports of pec-save and pec-restore say as their `result`.

namespace shardwright::partial {

/// Of a save, or with `dry_run` of what it would do.
/// Pure.
nlohmann::json SaveJson(const SaveReport& report, bool dry_run);

/// Of a restore.
/// Pure.
nlohmann::json RestoreJson(const RestoreReport& report);

/// Of pec-save check.
/// Pure.
nlohmann::json CheckJson(const StoreCheck& check);

/// Of pec-save check --repair.
/// Pure.
nlohmann::json RepairJson(const StoreRepair& repair);

/// Of pec-save undo.
/// Pure.
nlohmann::json UndoneJson(const Undone& undone, bool confirmed);

/// Of pec-save gc, or with `dry_run` of what it would do.
/// Pure.
nlohmann::json CollectedJson(const Collected& collected, const CollectedLog& log, bool dry_run);

/// The iteration of each checkpoint.
/// Pure.
std::vector<std::uint64_t> IterationsOf(const std::vector<StoredCheckpoint>& checkpoints);

/// Of an agent that has ended.
/// Pure.
nlohmann::json AgentJson(const AgentStatus& status);

/// "dynamic_k" of both, and of a listing.
/// Pure.
nlohmann::json DynamicKJson(const DynamicKReport& report);

}  // namespace shardwright::partial
