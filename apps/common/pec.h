#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/app.h"
#include "common/ucp.h"
#include "os/tls.h"
#include "pec/log/log_collect.h"
#include "pec/report/list_store.h"
#include "pec/restore/restore.h"
#include "pec/save/repair.h"
#include "pec/save/save.h"
#include "pec/store/check_store.h"
#include "pec/store/collect.h"
#include "pec/store/manifest.h"
#include "pec/store/undo.h"

namespace shardwright::apps {

/// What stands between the separators; empty parts too.
std::vector<std::string> Split(const std::string& text, char at);

/// What stands between the commas of all values of a flag.
std::vector<std::string> Words(const std::vector<std::string>& values);

/// Parses --keep: components, each once, separated by commas or given several times.
/// \error kUsage
Result<pec::KeptComponents> ParseKeep(const std::vector<std::string>& words);

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
void ShowSave(cli::Context& context, const pec::SaveReport& report, bool dry_run);

/// The checkpoints of a store and how old their modules are.
void ShowListing(cli::Context& context, const pec::StoreListing& listing);

/// What is wrong with a store.
/// \error kMismatch  something is damaged
Status ShowCheck(cli::Context& context, const std::string& path, const pec::StoreCheck& check);

/// Shows the blobs that a repair has written again, and the remaining damage.
/// \error kMismatch  something is damaged
Status ShowRepair(cli::Context& context, const std::string& path, const pec::StoreRepair& repair);

/// What a collection removed, or would remove.
void ShowCollected(cli::Context& context, const pec::Collected& collected,
                   const pec::CollectedLog& log, bool dry_run);

/// What pec-save undo did.
void ShowUndone(cli::Context& context, const pec::Undone& undone, bool confirmed);

/// What a restore chose: module, version, source; tokens lost; what is abandoned.
void ShowRestore(cli::Context& context, const pec::RestoreReport& report);

}  // namespace shardwright::apps
