#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "pec/report/list_store.h"
#include "pec/restore/restore.h"
#include "pec/save/save.h"
#include "pec/store/check_store.h"
#include "pec/store/collect.h"
#include "pec/store/manifest.h"

namespace shardwright::apps {

/// What stands between the separators; empty parts too.
std::vector<std::string> Split(const std::string& text, char at);

/// What stands between the commas of all values of a flag.
std::vector<std::string> Words(const std::vector<std::string>& values);

/// Parses --keep: components, each once, separated by commas or given several times.
/// \error kUsage
Result<pec::KeptComponents> ParseKeep(const std::vector<std::string>& words);

/// What a save did, or with --dry-run what it would do.
void ShowSave(cli::Context& context, const pec::SaveReport& report, bool dry_run);

/// The checkpoints of a store and how old their modules are.
void ShowListing(cli::Context& context, const pec::StoreListing& listing);

/// What is wrong with a store.
/// \error kMismatch  something is damaged
Status ShowCheck(cli::Context& context, const std::string& path, const pec::StoreCheck& check);

/// What a collection removed, or would remove.
void ShowCollected(cli::Context& context, const pec::Collected& collected, bool dry_run);

/// What a restore chose: module, version, source; tokens lost; what is abandoned.
void ShowRestore(cli::Context& context, const pec::RestoreReport& report);

}  // namespace shardwright::apps
