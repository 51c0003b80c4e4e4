// SPDX-License-Identifier: Apache-2.0
// lib/partial/report: reports of the commands on stores.
// report_json.h converts the results of saves, restores, checks and
// agents into JSON; list_store.h lists the contents of a store.

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

// The functions make the `result` of the JSON reports of pec-save and pec-restore.

namespace shardwright::partial {

/// Converts the report of a save, or with `dry_run` the forecast of one.
/// Pure.
nlohmann::json SaveJson(const SaveReport& report, bool dry_run);

/// Converts the report of a restore.
/// Pure.
nlohmann::json RestoreJson(const RestoreReport& report);

/// Converts the result of pec-save check.
/// Pure.
nlohmann::json CheckJson(const StoreCheck& check);

/// Converts the result of pec-save check --repair.
/// Pure.
nlohmann::json RepairJson(const StoreRepair& repair);

/// Converts the result of pec-save undo.
/// Pure.
nlohmann::json UndoneJson(const Undone& undone, bool confirmed);

/// Converts the result of pec-save gc, or with `dry_run` the forecast of one.
/// Pure.
nlohmann::json CollectedJson(const Collected& collected, const CollectedLog& log, bool dry_run);

/// Returns the iteration of each checkpoint.
/// Pure.
std::vector<std::uint64_t> IterationsOf(const std::vector<StoredCheckpoint>& checkpoints);

/// Converts the final status of an agent.
/// Pure.
nlohmann::json AgentJson(const AgentStatus& status);

/// Makes "dynamic_k" of saves, restores and listings.
/// Pure.
nlohmann::json DynamicKJson(const DynamicKReport& report);

}  // namespace shardwright::partial
