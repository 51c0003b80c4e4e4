// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "convert/input.h"
#include "engine/plan/target.h"
#include "partial/save/blob_writers.h"
#include "partial/save/save.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"
#include "partial/store/write_blobs.h"
#include "support/comm/comm.h"
#include "support/os/lock.h"

namespace shardwright::partial::save {

// A save is a list of passes (Save in save.cc). Each uses the results of the passes before it.

/// Context of all passes.
struct Job {
  comm::Comm& comm;
  convert::Input& input;
  const SaveRequest& options;
  Sink& sink;
};

/// The checkpoint to save.
struct Subject {
  Model model;
  std::uint64_t iteration = 0;
};

/// State of the store at the beginning of the save.
struct Base {
  os::Lock lock;                         ///< root only, not in a dry run
  std::optional<Store> store;            ///< absent: dry run without an existing store
  std::uint64_t sequence = 1;            ///< of the new checkpoint
  std::optional<ManifestLines> newest;   ///< checkpoint to compare for unchanged blobs
  std::optional<ManifestLines> earlier;  ///< its parent, read if `newest` has this iteration
  bool continues_newest = false;
  std::vector<std::optional<StoredModule>> modules;  ///< of `newest`: those parsed so far
  std::vector<std::uint32_t> lost;                   ///< modules of `newest` with a missing blob
  KeptComponents keep{};

  /// Returns the checkpoint that the new one takes its selection
  /// state from: `newest` or `earlier`; null: there is none.
  const Manifest* parent() const {
    if (continues_newest) return &newest->head;
    return earlier ? &earlier->head : nullptr;
  }
  bool keeps(Component component) const { return keep[static_cast<std::size_t>(component)]; }
};

/// Result of selecting experts.
struct Chosen {
  ExpertMap map;
  SelectionState state;  ///< of both levels before the save, including its tokens
  std::optional<TokenRecord> tokens;
  std::uint32_t k_snapshot = 1;
  std::uint32_t k_persist = 1;
  std::optional<DynamicKReport> dynamic_k;
  TwoLevelSelection selection;
  std::optional<TokensAtRisk> at_risk;
};

/// A component of a module that the checkpoint contains.
struct Wanted {
  std::uint32_t module = 0;
  Component component = Component::kWeights;
  std::uint32_t file = 0;  ///< index in the target
  int rank = 0;            ///< rank that writes it
};

/// Blobs of the checkpoint.
struct Blobs {
  plan::Target target;
  std::vector<std::uint32_t> tensors;        ///< by tensor of the target: its source tensor
  std::vector<Wanted> wanted;                ///< by file of the target, except the last
  std::optional<std::uint32_t> passed_file;  ///< index in the target
  std::uint64_t full_bytes = 0;              ///< `full_bytes` and `bytes` are as in SaveReport
  std::uint64_t bytes = 0;
  BlobWriters writers;
};

/// Result of Write. Numbers are as in SaveReport, those of the commit on the root only.
struct Written {
  std::uint64_t bytes = 0;
  std::uint64_t blobs = 0;
  std::uint64_t blobs_unchanged = 0;
  std::uint64_t blobs_restored = 0;
  std::uint64_t text_bytes = 0;
  std::uint64_t members_verified = 0;
  std::uint64_t members_in_part = 0;
};

/// save_base.cc: opens or creates the store, locks it, and reads the state to continue from.
/// \error kMismatch  another model, other kept components, a newer store; kBusy; kIo
/// Collective.
Result<Base> FindBase(const Job& job, const Subject& subject);

/// Checks that a checkpoint has the model of the store.
/// \error kMismatch  names both models and their first difference
/// Local.
Status ExpectModel(const Store& store, const convert::Input& input, const Model& model);

/// Returns a module of the newest checkpoint. Parses its line once; empty without a checkpoint.
/// \error kBadInput  malformed line
/// Local.
Result<StoredModule> NewestOf(Base* base, const Model& model, std::uint32_t module);

/// Checks that the tokens are given which the policy counts.
/// \error kUsage
/// Pure.
Status CheckTokens(const SaveRequest& options);

/// Checks that a snapshot belongs to the history that training continues. The result stays
/// valid until the manifest exists, because recoveries are written under the lock of this save.
/// \error as Store::CheckPast
Status CheckPast(const Job& job, const Subject& subject, const Store& store);

/// save_select.cc: counts tokens and selects the experts.
/// \param level  as ChooseSnapshot
/// \error as Save
/// Local; all ranks select the same.
Result<Chosen> Choose(const Job& job, const Subject& subject, const SelectionState* level,
                      Base* base);

/// save_write.cc: lists the blobs and assigns each to a rank.
/// \error as AssignBlobs
/// Local; all ranks list the same.
Result<Blobs> ListBlobs(const Job& job, const Subject& subject, const Base& base,
                        const Chosen& chosen);

/// Creates a folder for blobs in progress, with one folder per rank in it.
/// \pre the store is locked
/// \error kIo
/// Collective.
Result<std::string> OpenIncoming(comm::Comm& comm, const Store& store);

/// Reads back every blob that this rank has written.
/// \error kIo  the content of a blob differs from the written content
/// Local.
Status ReadBack(const Store& store, const plan::Target& target, const std::vector<BlobJob>& jobs,
                const std::vector<BlobResult>& results);

/// Removes the folder of blobs in progress and releases the lock. The
/// checkpoint is already saved, so failures are only warnings. Root.
void CleanUp(const std::string& incoming, const Store& store, os::Lock* lock, Sink& sink);

/// Writes the blobs, then the manifest. A failed save leaves no unnamed blobs.
/// \error as Save
/// Collective.
Result<Written> Write(const Job& job, const Subject& subject, const Chosen& chosen,
                      const Blobs& blobs, Base* base);

}  // namespace shardwright::partial::save
