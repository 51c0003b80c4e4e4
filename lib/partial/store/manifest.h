// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/exec/integrity.h"
#include "partial/select/dynamic_k.h"
#include "partial/select/lost_tokens.h"
#include "partial/select/selection.h"
#include "partial/select/types.h"
#include "partial/store/modules.h"
#include "support/base/result.h"

// Text files of a store: docs/formats/store.md.

namespace shardwright::partial {

inline constexpr int kStoreSchema = 1;

/// Components that a store writes for every expert at every checkpoint, by component.
using KeptComponents = std::array<bool, kComponents>;

/// Identity of a store and the model that it is for. Written once.
struct StoreHead {
  exec::Digest fingerprint{};           ///< Model::fingerprint
  std::uint64_t modules = 0;            ///< of the model
  LayerExperts experts;                 ///< by MoE layer
  std::vector<std::uint32_t> layer_id;  ///< by MoE layer: its number in checkpoint files
  KeptComponents keep{};
  std::string id;  ///< random name of this store; empty: made by a release up to 0.2
};

/// Refers to a file of the store, which is named by its content.
struct BlobRef {
  exec::Digest digest{};    ///< tree digest of the plain bytes (docs/formats/manifest.md)
  std::uint64_t bytes = 0;  ///< plain
  std::uint32_t crc32 = 0;  ///< of the plain bytes
  exec::Digest head{};      ///< of the first unit: a cheap test that a module has changed
  bool zstd = false;        ///< the file holds zstd frames (engine/exec/zpack.h)

  friend bool operator==(const BlobRef&, const BlobRef&) = default;
};

/// A component of a module in a checkpoint.
struct StoredComponent {
  std::uint64_t version = 0;  ///< iteration
  BlobRef blob;

  friend bool operator==(const StoredComponent&, const StoredComponent&) = default;
};

/// The components of a module. Absent: the model has no such tensors, or none was saved yet.
using StoredModule = std::array<std::optional<StoredComponent>, kComponents>;

/// Input of the selection rules, by level.
struct SelectionState {
  LevelState snapshot;
  LevelState persist;
  /// Last iteration with counted tokens; absent: tokens were not counted.
  std::optional<std::uint64_t> counted_to;
  std::optional<DynamicK> dynamic_k;  ///< absent: no save has used dynamic K
};

/// One checkpoint of a store: for every module the newest version at that time.
struct Manifest {
  std::uint64_t sequence = 0;  ///< ascending over all saves, including abandoned ones
  std::uint64_t parent = 0;    ///< sequence of the continued checkpoint; 0: none
  std::uint64_t iteration = 0;
  std::string tag;  ///< of the checkpoint that was saved
  std::string policy;
  std::uint64_t k_snapshot = 0;
  std::uint64_t k_persist = 0;
  std::string store;                  ///< in memory: StoreHead::id, empty if unknown
  exec::Digest catalogue{};           ///< of the file catalogues/<name>.swc
  std::optional<BlobRef> passed;      ///< tensors in client state and similar; absent: none
  std::vector<std::string> names;     ///< by module
  std::vector<StoredModule> modules;  ///< by module, in Model's order
  SelectionState state;               ///< empty tables for a model without experts
};

/// A manifest with modules as unparsed text, one line each. A save copies most
/// lines unchanged, and parsing them would cost more than hashing a small module.
struct ManifestLines {
  Manifest head;                            ///< without `names` and `modules`
  std::shared_ptr<const std::string> text;  ///< text that the lines are views of
  std::vector<std::string_view> lines;      ///< by module
};

/// Tokens of the iterations after the previous record, up to and including `iteration`.
struct TokenSum {
  std::uint64_t iteration = 0;
  Counts tokens;  ///< [layer][expert]
};

/// Tokens between two checkpoints of a chain.
struct TokenRecord {
  std::uint64_t parent = 0;    ///< sequence of the checkpoint with the previous record; 0: none
  std::vector<TokenSum> sums;  ///< ascending
  /// Sequence of the record's own checkpoint; absent: written by an older release.
  std::optional<std::uint64_t> sequence = std::nullopt;
};

/// A restore from which training has resumed.
struct RecoveryRecord {
  std::uint64_t sequence = 0;            ///< number of this recovery
  std::uint64_t manifest = 0;            ///< sequence of the restored manifest
  std::uint64_t resume = 0;              ///< X
  std::vector<std::uint64_t> abandoned;  ///< sequences of all newer manifests, ascending
  SelectionState state;                  ///< for the next save
  std::optional<LossLedger> ledger;      ///< absent: tokens were not counted
  /// Versions of modules that training resumed with in
  /// a state older than X, by name. Absent: unknown.
  std::optional<std::map<std::string, std::uint64_t>> older;
};

/// Returns true if a restore rolls back the work at an iteration that training reached when
/// the store's last recovery was `recovery` (0: none): the restore is later and resumed
/// before that iteration. Work that no restore rolls back belongs to the current history.
bool GivesUp(const RecoveryRecord& restore, std::uint64_t recovery, std::uint64_t iteration);

/// Text of begun.json, the marker of a folder in which a run will create a store.
std::string BegunText();
std::string ToText(const StoreHead& head);
std::string ToText(const Manifest& manifest);
/// \param lines  one per module, in order; manifest.modules is ignored
std::string ToText(const Manifest& manifest, std::span<const std::string_view> lines);
/// Returns the line of a module.
std::string ModuleLine(const std::string& name, const StoredModule& module);
std::string ToText(const TokenRecord& record);
std::string ToText(const RecoveryRecord& recovery);

/// Parse the texts above.
/// \param where  name of the text, for messages
/// \error kBadInput  malformed (names the field), or its digest
///        does not match; kUnsupported  the schema is newer
/// Pure.
Status ParseBegun(std::string_view text, const std::string& where);
Result<StoreHead> ParseHead(std::string_view text, const std::string& where);
Result<Manifest> ParseManifest(std::string_view text, const std::string& where);
/// Parses all but the modules.
Result<ManifestLines> SplitManifest(std::string text, const std::string& where);
/// Parses the line of a module.
/// \error kBadInput  malformed, or the line of another module
Result<StoredModule> ParseModule(std::string_view line, const std::string& name,
                                 const std::string& where);
Result<TokenRecord> ParseTokens(std::string_view text, const std::string& where);
Result<RecoveryRecord> ParseRecovery(std::string_view text, const std::string& where);
/// Parses only the numbers before `state`, which takes most of the time.
Result<RecoveryRecord> ParseRecoveryHead(std::string_view text, const std::string& where);

}  // namespace shardwright::partial
