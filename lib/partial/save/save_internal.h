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

// A save is a list of passes (Save in save.cc). Each takes what the passes before it have returned.

/// What every pass may use.
struct Job {
  comm::Comm& comm;
  convert::Input& input;
  const SaveRequest& options;
  Sink& sink;
};

/// The checkpoint that is saved.
struct Subject {
  Model model;
  std::uint64_t iteration = 0;
};

/// The store as the save finds it.
struct Base {
  os::Lock lock;                         ///< root only, and not in a dry run
  std::optional<Store> store;            ///< absent: a dry run, and there is none yet
  std::uint64_t sequence = 1;            ///< of the checkpoint that is made
  std::optional<ManifestLines> newest;   ///< checkpoint from which is known what is unchanged
  std::optional<ManifestLines> earlier;  ///< its parent, read where `newest` is of this iteration
  bool continues_newest = false;
  std::vector<std::optional<HeldModule>> modules;  ///< of `newest`: those read from their lines
  std::vector<std::uint32_t> lost;  ///< modules of `newest` with a blob that the store has lost
  KeptComponents keep{};

  /// The checkpoint whose selection the new one continues: `newest`, or `earlier`; null: there is
  /// none.
  const Manifest* parent() const {
    if (continues_newest) return &newest->head;
    return earlier ? &earlier->head : nullptr;
  }
  bool keeps(Component component) const { return keep[static_cast<std::size_t>(component)]; }
};

/// Which experts are saved.
struct Chosen {
  ExpertMap map;
  SelectionState state;  ///< of both levels before the save, tokens counted
  std::optional<TokenRecord> tokens;
  std::uint32_t k_snapshot = 1;
  std::uint32_t k_persist = 1;
  std::optional<DynamicKReport> dynamic_k;
  TwoLevelSelection selection;
  std::optional<TokensAtRisk> at_risk;
};

/// A component of a module that the checkpoint covers.
struct Wanted {
  std::uint32_t module = 0;
  Component component = Component::kWeights;
  std::uint32_t file = 0;  ///< in the target
  int rank = 0;            ///< that writes it
};

/// The blobs of the checkpoint.
struct Blobs {
  plan::Target target;
  std::vector<std::uint32_t> tensors;        ///< by tensor of the target: the source tensor it is
  std::vector<Wanted> wanted;                ///< by file of the target but for the last
  std::optional<std::uint32_t> passed_file;  ///< in the target
  std::uint64_t full_bytes = 0;              ///< as SaveReport, as is `bytes`
  std::uint64_t bytes = 0;
  BlobWriters writers;
};

/// What Write did; numbers as in SaveReport, those of the commit on the root only.
struct Written {
  std::uint64_t bytes = 0;
  std::uint64_t blobs = 0;
  std::uint64_t blobs_unchanged = 0;
  std::uint64_t blobs_restored = 0;
  std::uint64_t text_bytes = 0;
  std::uint64_t members_verified = 0;
  std::uint64_t members_in_part = 0;
};

/// save_base.cc: opens or makes the store, locks it, and reads what the new checkpoint continues.
/// \error kMismatch  another model, other kept components, a store that is ahead; kBusy; kIo
/// Collective.
Result<Base> FindBase(const Job& job, const Subject& subject);

/// Refuses a checkpoint of another model than the store's.
/// \error kMismatch  names both sides and their first difference
/// Local.
Status ExpectModel(const Store& store, const convert::Input& input, const Model& model);

/// What the newest checkpoint holds of a module, read from its line once; nothing without one.
/// \error kBadInput  a line that is none
/// Local.
Result<HeldModule> NewestOf(Base* base, const Model& model, std::uint32_t module);

/// Whether a snapshot is of the past that training goes on from. Recoveries are written under the
/// lock that a save holds, so that the answer stays until the manifest is there.
/// \error as Store::CheckPast
Status CheckPast(const Job& job, const Subject& subject, const Store& store);

/// save_select.cc: counts tokens and chooses the experts.
/// \param level  as ChooseSnapshot
/// \error as Save
/// Local; all ranks choose the same.
Result<Chosen> Choose(const Job& job, const Subject& subject, const SelectionState* level,
                      Base* base);

/// save_write.cc: lists the blobs and says who writes which.
/// \error as AssignBlobs
/// Local; all ranks list the same.
Result<Blobs> ListBlobs(const Job& job, const Subject& subject, const Base& base,
                        const Chosen& chosen);

/// Makes a folder for the blobs under way, with a folder for each rank in it.
/// \pre the store is locked
/// \error kIo
/// Collective.
Result<std::string> OpenIncoming(comm::Comm& comm, const Store& store);

/// Reads every blob again that this rank has written.
/// \error kIo  one of them has not the content that was written
/// Local.
Status ReadBack(const Store& store, const plan::Target& target, const std::vector<BlobJob>& jobs,
                const std::vector<BlobResult>& results);

/// Removes the folder of the blobs under way and releases the lock. All is saved: failures are
/// warnings. Root.
void CleanUp(const std::string& incoming, const Store& store, os::Lock* lock, Sink& sink);

/// Writes the blobs, and the manifest last. Of a save that fails no blobs without a name are left.
/// \error as Save
/// Collective.
Result<Written> Write(const Job& job, const Subject& subject, const Chosen& chosen,
                      const Blobs& blobs, Base* base);

}  // namespace shardwright::partial::save
