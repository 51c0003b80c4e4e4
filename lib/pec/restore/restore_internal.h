#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "dialect/dialects.h"
#include "os/lock.h"
#include "pec/agent/agent_client.h"
#include "pec/restore/recovery.h"
#include "pec/restore/restore.h"
#include "pec/store/modules.h"
#include "pec/store/read_blobs.h"
#include "pec/store/store.h"
#include "ucp/input.h"

namespace shardwright::pec::restore {

/// A checkpoint in the memory of an agent.
struct AgentCopy {
  std::size_t agent = 0;
  std::uint32_t node = 0;      ///< of the recovery plan: 0 is this one
  std::uint64_t recovery = 0;  ///< as MemoryCheckpoint
  Manifest manifest;
};

/// One restore: its passes in order, and what they hand to each other.
class Restoring {
 public:
  Restoring(comm::Comm& comm, const RestoreOptions& options, Sink& sink)
      : comm_(comm), options_(options), sink_(sink) {}
  Result<RestoreReport> Go();

 private:
  // restore_plan.cc: which version of every module. Every rank reads for itself.
  Status OpenStore();
  Status ReadManifests();
  void DropStrangers();
  Status Understand(const Manifest& manifest);
  Status Choose();
  Result<RecoveryPlan> Plan() const;
  void ListCopies(const Manifest& manifest, std::optional<std::uint32_t> node,
                  RecoveryInput* input) const;
  std::vector<std::pair<Part, Mask>> PartsOf(const Module& module) const;
  bool Holds(const Manifest& manifest, std::size_t index, const Mask& mask,
             std::uint64_t version) const;
  const HeldModule* CopyOf(std::size_t index, const Mask& mask, std::uint64_t version) const;
  const AgentCopy* AgentCopyOf(std::size_t index, const Mask& mask, const Restore& restore) const;
  Status TakeOne(const ModuleVersion& one, const Restore& restore);
  Status TakeChosen(const RecoveryPlan& plan);
  Status CheckChosen(bool* again);
  Status CheckBlob(std::uint32_t module, Component component, const BlobRef& ref);
  Status CheckRest(const Manifest& manifest);
  bool IsDamaged(const BlobRef& ref) const { return damaged_.contains(ref.digest); }
  void NoteDamage(const Error& error);
  void DescribeModules(const RecoveryPlan& plan);
  Status RefuseStale() const;

  // restore_agents.cc: what agents hold.
  Status AskAgents();  // collective
  Result<std::vector<bool>> FindAgents() const;
  Status ExpectNoCopies() const;
  Result<std::string> FlushAndList() const;
  Status TakeLists(const std::string& text);
  Status DropGivenUp();
  os::Stop Stop() const {
    return [this] { return sink_.stop_requested(); };
  }
  Result<dialect::SourceSet> CatalogueOf(const Manifest& manifest) const;
  ReadRemote ReaderOf(std::size_t agent, const exec::Digest& digest) const;

  // restore_source.cc: a source whose tensors come from blobs of different versions.
  Status BuildSource();
  void AddTensor(const layout::LogicalTensor& tensor, const layout::Array& array,
                 layout::ShardMap* map) const;
  Status AddBlobs(layout::ShardMap* map, std::vector<BlobSource>* files);
  Status AddPassed(layout::ShardMap* map, std::vector<BlobSource>* files);
  Status AddRestarted(layout::ShardMap* map);

  // restore.cc
  Status FindStore();           // collective
  Result<bool> IsEmptyStore();  // collective
  Status TakeLoss();
  Status EnterLoss(std::optional<double> plt);
  Status Write();   // collective
  Status Record();  // collective
  bool IsNewer(const StoredCheckpoint& checkpoint) const;

  comm::Comm& comm_;
  const RestoreOptions& options_;
  Sink& sink_;
  os::Lock lock_;  // root only
  std::optional<Store> store_;
  std::vector<StoredCheckpoint> all_;  // every checkpoint of the store
  std::vector<Manifest> manifests_;    // usable ones, ascending sequence
  std::vector<std::shared_ptr<AgentClient>> agents_;
  std::vector<AgentCopy> copies_;
  std::set<exec::Digest> damaged_;     // blobs that cannot be used
  std::set<exec::Digest> good_;        // blobs that were looked at
  std::unique_ptr<ucp::Input> other_;  // --restart-missing
  std::uint64_t other_iteration_ = 0;
  ucp::Input input_;  // the source as it will be read
  Model model_;
  const Manifest* at_ = nullptr;  // the manifest of X
  RecoveryPlan plan_;
  std::vector<HeldModule> chosen_;  // by module
  /// By module: the agent that a component is read from; absent: the store.
  std::vector<std::array<std::optional<std::size_t>, kComponents>> from_agent_;
  std::vector<Source> source_;   // by module: the farthest that any part comes from
  std::vector<bool> restarted_;  // by module
  std::vector<std::array<bool, kComponents>> dropped_;  // weights that the master replaces
  SelectionState state_;                                // for the next save
  std::optional<LossLedger> ledger_;
  RestoreReport report_;
};

}  // namespace shardwright::pec::restore
