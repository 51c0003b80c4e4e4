// lib/pec/report: what commands on stores say.
// report_json.h turns reports of saves, restores, checks and agents into JSON; list_store.h lists
// what a store holds.

#pragma once

#include <nlohmann/json_fwd.hpp>

#include "pec/restore/restore.h"
#include "pec/save/save.h"
#include "pec/store/dynamic_run.h"

// What the reports of pec-save and pec-restore say as their `result`.

namespace shardwright::pec {

/// Of a save, or with `dry_run` of what it would do.
/// Pure.
nlohmann::json SaveJson(const SaveReport& report, bool dry_run);

/// Of a restore.
/// Pure.
nlohmann::json RestoreJson(const RestoreReport& report);

/// "dynamic_k" of both, and of a listing.
/// Pure.
nlohmann::json DynamicKJson(const DynamicKReport& report);

}  // namespace shardwright::pec
