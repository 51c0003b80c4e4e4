// lib/pec/report: what commands on stores say.
// report_json.h turns reports of saves, restores, checks and agents into JSON; list_store.h lists
// what a store holds.

#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "pec/agent/agent.h"
#include "pec/log/log_collect.h"
#include "pec/restore/restore.h"
#include "pec/save/repair.h"
#include "pec/save/save.h"
#include "pec/store/check_store.h"
#include "pec/store/collect.h"
#include "pec/store/dynamic_run.h"
#include "pec/store/undo.h"

// What the reports of pec-save and pec-restore say as their `result`.

namespace shardwright::pec {

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

}  // namespace shardwright::pec
