// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/ucp.h"
#include "partial/gradient_log/log_collect.h"
#include "partial/report/list_store.h"
#include "partial/restore/restore.h"
#include "partial/save/repair.h"
#include "partial/save/save.h"
#include "partial/store/check_store.h"
#include "partial/store/collect.h"
#include "partial/store/manifest.h"
#include "partial/store/undo.h"
#include "support/base/result.h"
#include "support/cli/app.h"
#include "support/os/tls.h"

namespace shardwright::apps {

/// What stands between the separators; empty parts too.
std::vector<std::string> Split(const std::string& text, char at);

/// What stands between the commas of all values of a flag.
std::vector<std::string> Words(const std::vector<std::string>& values);

/// Parses --keep: components, each once, separated by commas or given several times.
/// \error kUsage
Result<partial::KeptComponents> ParseKeep(const std::vector<std::string>& words);

/// Whose agents are accepted, at socket files and at ports. At ports: --key, or --insecure. On this
/// host too, where every user can reach a port; those of the agent's own have the socket file,
/// which needs neither.
struct KeyFlags {
  std::string key;  ///< a file
  bool insecure = false;
  TrustFlags trust;

  void AddTo(cli::App& app);
  /// Within a rule. \error kUsage  an address; a port that is given neither
  Status CheckRules(const cli::App& app, const std::vector<std::string>& addresses);
  /// Reads the key, on every rank; --insecure warns.
  /// \returns null: no address needs one
  /// \error as os::TlsKey::Read
  /// Collective.
  Result<std::shared_ptr<const os::TlsKey>> Read(cli::Context& context) const;

 private:
  std::string port_;  // the first address that is one
};

/// What a save did, or with --dry-run what it would do.
void ShowSave(cli::Context& context, const partial::SaveReport& report, bool dry_run);

/// The checkpoints of a store and how old their modules are.
void ShowListing(cli::Context& context, const partial::StoreListing& listing);

/// What is wrong with a store.
/// \error kMismatch  something is damaged
Status ShowCheck(cli::Context& context, const std::string& path, const partial::StoreCheck& check);

/// Shows the blobs that a repair has written again, and the remaining damage.
/// \error kMismatch  something is damaged
Status ShowRepair(cli::Context& context, const std::string& path,
                  const partial::StoreRepair& repair);

/// What a collection removed, or would remove.
void ShowCollected(cli::Context& context, const partial::Collected& collected,
                   const partial::CollectedLog& log, bool dry_run);

/// What pec-save undo did.
void ShowUndone(cli::Context& context, const partial::Undone& undone, bool confirmed);

/// What a restore chose: module, version, source; tokens lost; what is abandoned.
void ShowRestore(cli::Context& context, const partial::RestoreReport& report);

}  // namespace shardwright::apps
