#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "dialect/dialect.h"
#include "os/lock.h"
#include "pec/modules.h"
#include "pec/save.h"
#include "pec/store.h"
#include "pec/write_blobs.h"
#include "plan/target.h"
#include "ucp/input.h"

namespace shardwright::pec::save {

/// A component of a module that this checkpoint covers.
struct Wanted {
  std::uint32_t module = 0;
  Component component = Component::kWeights;
  std::uint32_t file = 0;  ///< in the target
  int rank = 0;            ///< that writes it
};

/// One save: its passes in order, and what they hand to each other.
class Saving {
 public:
  Saving(comm::Comm& comm, ucp::Input& input, const SaveRequest& options, Sink& sink)
      : comm_(comm), input_(input), options_(options), sink_(sink) {}
  Result<SaveReport> Go();
  Result<SnapshotChoice> Choose(const SelectionState* level);  // collective

 private:
  Status Understand();  // collective
  Status FindBase();    // collective: store, lock, the checkpoint to continue
  Status CheckKeep() const;
  Status CheckModel();
  Status FindParent();
  Status CheckPast(const Store& store) const;
  bool Dropped(const StoredCheckpoint& checkpoint) const;
  Status AbandonNewer(const Store& store) const;
  Status TakeState();
  Status TakeDynamicK(const std::optional<Recovery>& last);
  std::uint64_t Interval() const;
  std::uint32_t k_snapshot() const;
  std::uint32_t k_persist() const;
  Status Select();
  Result<bool> IsSavedAlready(std::uint32_t module);
  Status SelectAgain();
  Result<std::uint64_t> BudgetExperts() const;
  bool Keeps(Component component) const;
  void ListJobs();
  void AddBlob(std::uint32_t module, Component component);
  void AddPassed();
  Status ShareJobs();
  void FillReport();
  Status Write();         // collective
  Status OpenIncoming();  // collective
  Status ReadBack(const std::vector<BlobJob>& jobs, const std::vector<BlobResult>& results) const;
  Status ShareSums(exec::SourceSums* sums);                  // collective
  Status CommitOnRoot(const std::vector<BlobResult>& mine);  // collective
  Status Commit(const std::vector<BlobResult>& results);     // root
  Result<std::vector<BlobJob>> MyJobs();
  Result<HeldModule> BaseModule(std::uint32_t module);
  Result<std::string> ManifestText(const Manifest& manifest,
                                   const std::vector<BlobResult>& results);

  comm::Comm& comm_;
  ucp::Input& input_;
  const SaveRequest& options_;
  Sink& sink_;
  Model model_;
  os::Lock lock_;  // root only
  std::optional<Store> store_;
  std::optional<ManifestLines> base_;  // the newest checkpoint: what is unchanged is known from it
  std::vector<std::optional<HeldModule>> base_modules_;  // by module, those read from its line
  std::optional<ManifestLines> before_;  // its parent, where the newest is of this iteration
  const Manifest* parent_ = nullptr;     // whose selection this one continues
  ExpertMap map_;
  SelectionState state_;
  std::optional<TokenRecord> tokens_;
  plan::Target target_;
  std::vector<std::uint32_t> target_tensors_;  // by tensor of the target: the source tensor it is
  std::vector<Wanted> wanted_;                 // by file of the target but for the last
  std::optional<std::uint32_t> passed_file_;   // in the target
  std::string incoming_;
  bool differs_ = false;  // what was saved of this iteration before has other content; root only
  SaveReport report_;
};

}  // namespace shardwright::pec::save
