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

// The texts of a store: docs/formats/store.md.

namespace shardwright::partial {

inline constexpr int kStoreSchema = 1;

/// Which components a store writes for every expert at every checkpoint, by component.
using KeptComponents = std::array<bool, kComponents>;

/// What a store is for; written once.
struct StoreHead {
  exec::Digest fingerprint{};           ///< Model::fingerprint
  std::uint64_t modules = 0;            ///< of the model
  LayerExperts experts;                 ///< by MoE layer
  std::vector<std::uint32_t> layer_id;  ///< by MoE layer: its number in checkpoint files
  KeptComponents keep{};
  std::string id;  ///< random name of this store; empty: made by a release up to 0.2
};

/// A file of the store that is named by its content.
struct BlobRef {
  exec::Digest digest{};    ///< tree digest of the plain bytes (docs/formats/manifest.md)
  std::uint64_t bytes = 0;  ///< plain
  std::uint32_t crc32 = 0;  ///< of the plain bytes
  exec::Digest head{};      ///< of the first unit: tells cheaply that a module has changed
  bool zstd = false;        ///< the file holds zstd frames (engine/exec/zpack.h)

  friend bool operator==(const BlobRef&, const BlobRef&) = default;
};

/// A component of a module as a checkpoint has it.
struct Held {
  std::uint64_t version = 0;  ///< iteration
  BlobRef blob;

  friend bool operator==(const Held&, const Held&) = default;
};

/// A component is absent where the model has no such tensors, or no version was saved yet.
using HeldModule = std::array<std::optional<Held>, kComponents>;

/// What the selection rules know, by level.
struct SelectionState {
  LevelState snapshot;
  LevelState persist;
  /// Last iteration whose tokens are counted; absent: tokens were not counted.
  std::optional<std::uint64_t> counted_to;
  std::optional<DynamicK> dynamic_k;  ///< absent: no save was made with it
};

/// One checkpoint of a store: for every module the newest version at that moment.
struct Manifest {
  std::uint64_t sequence = 0;  ///< ascending over all saves, also abandoned ones
  std::uint64_t parent = 0;    ///< sequence that this one continues; 0: none
  std::uint64_t iteration = 0;
  std::string tag;  ///< of the checkpoint that was saved
  std::string policy;
  std::uint64_t k_snapshot = 0;
  std::uint64_t k_persist = 0;
  exec::Digest catalogue{};         ///< of the file catalogues/<name>.swc
  std::optional<BlobRef> passed;    ///< tensors in client state and the like; absent: none
  std::vector<std::string> names;   ///< by module
  std::vector<HeldModule> modules;  ///< by module, in Model's order
  SelectionState state;             ///< empty tables for a model without experts
};

/// A manifest whose modules are left as text, one line each: a save carries most of them on as they
/// are, and reading them would cost more than hashing a small module.
struct ManifestLines {
  Manifest head;                            ///< without `names` and `modules`
  std::shared_ptr<const std::string> text;  ///< what the lines are views of
  std::vector<std::string_view> lines;      ///< by module
};

/// Tokens of the iterations after the record before, up to and with `iteration`.
struct TokenSum {
  std::uint64_t iteration = 0;
  Counts tokens;  ///< [layer][expert]
};

/// Tokens between two checkpoints of a chain.
struct TokenRecord {
  std::uint64_t parent = 0;    ///< sequence of the checkpoint whose record comes before, 0: none
  std::vector<TokenSum> sums;  ///< ascending
  /// Of the checkpoint that it is of; absent: of an older release.
  std::optional<std::uint64_t> sequence = std::nullopt;
};

/// A restore that training has gone on from.
struct RecoveryRecord {
  std::uint64_t sequence = 0;            ///< of recoveries
  std::uint64_t manifest = 0;            ///< sequence of the manifest restored
  std::uint64_t resume = 0;              ///< X
  std::vector<std::uint64_t> abandoned;  ///< sequences of all manifests that were newer, ascending
  SelectionState state;                  ///< for the next save
  std::optional<LossLedger> ledger;      ///< absent where tokens were not counted
  /// Modules that training has gone on with in an older state than that of X: their versions.
  /// Absent: nobody knows.
  std::optional<std::map<std::string, std::uint64_t>> older;
};

/// Whether a restore has given up what training made at an iteration when the store's last recovery
/// was `recovery` (0: there was none): it came later and went back behind the iteration. What no
/// restore gives up is of the past that training goes on from.
bool GivesUp(const RecoveryRecord& restore, std::uint64_t recovery, std::uint64_t iteration);

/// The mark of a folder that a run will make a store of.
std::string BegunText();
std::string ToText(const StoreHead& head);
std::string ToText(const Manifest& manifest);
/// \param lines  of the modules, in order; manifest.modules is not looked at
std::string ToText(const Manifest& manifest, std::span<const std::string_view> lines);
/// The line of a module.
std::string ModuleLine(const std::string& name, const HeldModule& module);
std::string ToText(const TokenRecord& record);
std::string ToText(const RecoveryRecord& recovery);

/// The inverses.
/// \param where  names the text in messages
/// \error kBadInput  not such a text: names the field; its digest is of another text; kUnsupported
///        of a newer schema
/// Pure.
Status ParseBegun(std::string_view text, const std::string& where);
Result<StoreHead> ParseHead(std::string_view text, const std::string& where);
Result<Manifest> ParseManifest(std::string_view text, const std::string& where);
/// Reads all but the modules.
Result<ManifestLines> SplitManifest(std::string text, const std::string& where);
/// Reads the line of a module.
/// \error kBadInput  it is of another module
Result<HeldModule> ParseModule(std::string_view line, const std::string& name,
                               const std::string& where);
Result<TokenRecord> ParseTokens(std::string_view text, const std::string& where);
Result<RecoveryRecord> ParseRecovery(std::string_view text, const std::string& where);

}  // namespace shardwright::partial
