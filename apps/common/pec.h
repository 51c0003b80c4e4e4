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

/// Splits a text at a separator. Keeps empty parts.
std::vector<std::string> Split(const std::string& text, char at);

/// Splits all values of a flag at commas, and joins the parts to one list.
std::vector<std::string> Words(const std::vector<std::string>& values);

/// Parses --keep: each component at most once, separated by commas or in several flags.
/// \error kUsage
Result<partial::KeptComponents> ParseKeep(const std::vector<std::string>& words);

/// Flags that decide which agents are accepted. A port requires --key or --insecure,
/// even on this host, where every user can reach it. The socket file of an agent
/// requires neither: only the agent's own user, root and --trust-user can connect to it.
struct KeyFlags {
  std::string key;  ///< path of the key file
  bool insecure = false;
  TrustFlags trust;

  void AddTo(cli::App& app);
  /// Checks the flags. \error kUsage  an invalid address; a port without --key or --insecure
  Status CheckRules(const cli::App& app, const std::vector<std::string>& addresses);
  /// Reads the key on every rank. Warns with --insecure.
  /// \param later_ports  addresses with ports may follow, as in a new plan of an agent
  /// \returns null if no address needs a key
  /// \error as os::TlsKey::Read
  /// Collective.
  Result<std::shared_ptr<const os::TlsKey>> Read(cli::Context& context,
                                                 bool later_ports = false) const;

 private:
  std::string port_;  // the first address that is a port
};

/// Shows the result of a save, or its forecast with --dry-run.
void ShowSave(cli::Context& context, const partial::SaveReport& report, bool dry_run);

/// Shows the checkpoints of a store and the age of their modules.
void ShowListing(cli::Context& context, const partial::StoreListing& listing);

/// Shows the damage of a store.
/// \error kMismatch  something is damaged
Status ShowCheck(cli::Context& context, const std::string& path, const partial::StoreCheck& check);

/// Shows the blobs that a repair has written again, and the remaining damage.
/// \error kMismatch  something is damaged
Status ShowRepair(cli::Context& context, const std::string& path,
                  const partial::StoreRepair& repair);

/// Shows the files that a collection removed, or with --dry-run would remove.
void ShowCollected(cli::Context& context, const partial::Collected& collected,
                   const partial::CollectedLog& log, bool dry_run);

/// Shows the result of pec-save undo.
void ShowUndone(cli::Context& context, const partial::Undone& undone, bool confirmed);

/// Shows the restored version and source of each module, lost tokens, and abandoned checkpoints.
void ShowRestore(cli::Context& context, const partial::RestoreReport& report);

}  // namespace shardwright::apps
