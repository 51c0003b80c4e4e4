// SPDX-License-Identifier: Apache-2.0
// Takes snapshots, and selects the gradients to buffer for
// the next one: docs/formats/agent.md, "Gradients".

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "checkpoints/registry.h"
#include "engine/layout/states.h"
#include "partial/agent/agent.h"
#include "partial/select/catch_up.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"
#include "support/comm/comm.h"

namespace shardwright::partial {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRestoredMeanwhile = "the store was restored while the snapshot was taken";

exec::Digest CatalogueDigest(const convert::Input& input) {
  const std::string catalogue = checkpoints::Serialize(input.set);
  return exec::DigestOf(std::as_bytes(std::span(catalogue)));
}

/// Selects also the modules of an earlier snapshot of the same iteration, read or replayed,
/// because its files had other content and a version must identify one state of all modules.
void AddHeld(const Manifest& earlier, const Model& model, Selection* selection) {
  for (std::size_t m = 0; m < selection->size(); ++m) {
    std::vector<std::uint32_t>& ids = (*selection)[m];
    for (std::uint32_t e = 0; e < model.experts[m]; ++e) {
      const StoredModule& module = earlier.modules[model.expert_module(m, e)];
      const bool chosen = std::find(ids.begin(), ids.end(), e) != ids.end();
      if (!chosen && IsAllOf(module, earlier.iteration)) ids.push_back(e);
    }
  }
}

/// Returns the source of the newest checkpoint of a store.
Result<checkpoints::SourceSet> NewestSource(const std::string& path) {
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) return Fail(Errc::kNotFound, path, ": there is no snapshot and no checkpoint yet");
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> all, store.List());
  const StoredCheckpoint* newest = nullptr;
  for (const StoredCheckpoint& one : all) {
    if (!one.abandoned) newest = &one;
  }
  if (newest == nullptr)
    return Fail(Errc::kNotFound, path,
                ": the store has no checkpoint that training continues from");
  SW_TRY_ASSIGN(const Manifest manifest, store.ReadManifest(*newest));
  return store.ReadCatalogue(manifest);
}

}  // namespace

Result<std::uint64_t> Agent::Snapshot(convert::Input& input, std::uint64_t known, Sink& sink,
                                      const Copied& copied, const FillSource& fill) {
  const std::lock_guard one(snapshot_mutex_);
  const Clock::time_point start = Clock::now();
  const auto note_copied = [&](std::uint64_t iteration) {
    {
      const std::lock_guard lock(mutex_);
      copied_seconds_ = std::chrono::duration<double>(Clock::now() - start).count();
    }
    limiter_.Begin(iteration);
    if (copied) copied(iteration);
  };
  const auto take = [&]() -> Result<std::uint64_t> {
    SW_TRY(CatchUp());
    auto record = std::make_shared<MemoryCheckpoint>();
    SW_TRY_ASSIGN(record->tokens, OpenTokens());
    SaveRequest options = RequestOfSave();
    options.existing_store = false;  // the store may be created after a snapshot
    options.tokens = record->tokens.get();
    record->recovery = known;
    std::optional<SelectionState> level;
    SW_TRY_ASSIGN(const std::uint64_t asked,
                  options.iteration ? *options.iteration : input.checkpoint.iteration);
    std::shared_ptr<const MemoryCheckpoint> again;  // a snapshot of this iteration
    {
      const std::lock_guard lock(mutex_);
      // A restore may have rolled back the files since they were opened.
      if (recovery_ != known) return Fail(Errc::kMismatch, kRestoredMeanwhile);
      const std::optional<std::size_t> newest = buffers_.NewestComplete();
      again = newest && buffers_.iteration(*newest) == asked ? records_[*newest] : nullptr;
      level = again ? level_before_ : level_;
      if (next_)
        options.replay.before = again ? next_->iteration - next_->interval : next_->iteration;
    }
    options.replay.logged_since = logs_.logged_since();
    // A hook may ask for the same checkpoint that `latest` has announced before.
    if (again && again->manifest.catalogue == CatalogueDigest(input)) return asked;
    const std::unique_ptr<comm::Comm> comm = comm::MakeSerialComm();
    SW_TRY_ASSIGN(SnapshotChoice choice,
                  ChooseSnapshot(*comm, input, options, level ? &*level : nullptr, sink));
    {
      const std::lock_guard lock(mutex_);
      if (recovery_ != known) return Fail(Errc::kMismatch, kRestoredMeanwhile);
      if (again) {
        // The current content, with which the new buffer begins: a replay may have changed it.
        const std::optional<std::size_t> newest = buffers_.NewestComplete();
        AddHeld(records_[*newest]->manifest, choice.model, &choice.selection);
      }
      SW_TRY(buffers_.Begin(choice.iteration));
      DropIdle();
    }
    const std::uint64_t iteration = choice.iteration;
    Status filled = Fill(input, choice, options, std::move(record), sink, note_copied, fill);
    if (filled) return iteration;
    const std::lock_guard lock(mutex_);
    buffers_.AbandonFilling();
    next_.reset();
    logs_.DiscardAll();
    return tl::unexpected<Error>(std::move(filled).error());
  };
  Result<std::uint64_t> iteration = take();
  const std::lock_guard lock(mutex_);
  if (iteration) {
    ++status_.snapshots;
  } else {
    ++status_.snapshots_failed;
    status_.last_error = iteration.error().message;
  }
  return iteration;
}

Status Agent::Fill(convert::Input& input, const SnapshotChoice& choice, const SaveRequest& options,
                   std::shared_ptr<MemoryCheckpoint> record, Sink& sink, const Copied& copied,
                   const FillSource& fill) {
  SW_TRY_ASSIGN(const auto taking, SnapshotCopy::Copy(input, choice, pool_, options, sink, fill));
  SelectionState after = choice.state;
  if (!choice.model.experts.empty()) {
    SW_TRY(CompleteSave(&after.snapshot,
                        BeginSave(after.snapshot, choice.selection, choice.iteration)));
  }
  // Before training resumes, because the plan is about its next gradients.
  NotePlan(choice, after, record->recovery);
  copied(choice.iteration);
  SW_TRY_ASSIGN(Taken taken, taking->Seal());
  record->catalogue = checkpoints::Serialize(input.set);
  Manifest& manifest = record->manifest;
  manifest.iteration = choice.iteration;
  manifest.tag = input.checkpoint.tag;
  manifest.policy = std::string(Name(options.policy));
  manifest.k_snapshot = choice.k_snapshot;
  manifest.k_persist = choice.k_persist;
  manifest.store = options.store_id;
  manifest.catalogue = exec::DigestOf(std::as_bytes(std::span(record->catalogue)));
  for (const Module& module : choice.model.modules) manifest.names.push_back(module.name);
  manifest.modules.resize(choice.model.modules.size());
  if (taken.passed) {
    manifest.passed = taken.passed->ref();
    record->blobs.emplace(taken.passed->ref().digest, taken.passed);
  }
  manifest.state = after;
  const std::uint64_t bytes = taken.bytes;
  const std::lock_guard lock(mutex_);
  const std::optional<std::size_t> filling = buffers_.Find(BufferState::kFilling);
  if (!filling) return Fail(Errc::kMismatch, kRestoredMeanwhile);
  SW_TRY(Put(choice, std::move(taken)));
  Hold(buffers_.content(*filling), choice.model, record.get());
  SW_TRY(buffers_.End());
  if (recovery_ == record->recovery) {
    level_before_ = choice.state;
    level_ = std::move(after);
  }
  records_[*filling] = std::move(record);
  status_.snapshot_bytes += bytes;
  status_.snapshot_seconds += copied_seconds_;
  pool_->Reserve(bytes);  // for the next snapshot
  return {};
}

/// Makes a record describe the content of a buffer. \pre manifest.modules has all modules
void Agent::Hold(const SnapshotBuffers::Content& content, const Model& model,
                 MemoryCheckpoint* record) {
  Manifest& manifest = record->manifest;
  const std::optional<BlobRef>& passed = manifest.passed;
  BlobMap blobs;
  if (passed) blobs.emplace(passed->digest, record->blobs.at(passed->digest));
  record->replayed.clear();
  record->own_bytes = passed ? passed->bytes : 0;
  for (const auto& [id, blob] : content) {
    const auto* copy = static_cast<const ModuleCopy*>(blob.data.get());
    const std::uint32_t index = model.index_of(id);
    if (copy->replayed_from) record->replayed[model.modules[index].name] = *copy->replayed_from;
    for (std::size_t c = 0; c < kComponents; ++c) {
      if (!copy->parts[c]) continue;
      const BlobRef& ref = copy->parts[c]->ref();
      manifest.modules[index][c] = StoredComponent{blob.version, ref};
      blobs.emplace(ref.digest, copy->parts[c]);
      const bool read = blob.version == manifest.iteration && !copy->replayed_from;
      if (read) record->own_bytes += ref.bytes;
    }
  }
  record->blobs = std::move(blobs);
}

/// Puts the copied modules into the buffer that is being
/// filled. Stores content that is already in memory only once.
/// \pre the caller has locked mutex_
Status Agent::Put(const SnapshotChoice& choice, Taken taken) {
  const std::optional<std::size_t> newest = buffers_.NewestComplete();
  const MemoryCheckpoint* before = newest ? records_[*newest].get() : nullptr;
  for (std::size_t i = 0; i < choice.model.modules.size(); ++i) {
    for (const auto& [part, mask] : PartsOf(choice.model.modules[i], choice.keep)) {
      auto copy = std::make_shared<ModuleCopy>();
      bool any = false;
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (!mask[c] || !taken.modules[i][c]) continue;
        any = true;
        copy->parts[c] = std::move(taken.modules[i][c]);
        if (before == nullptr) continue;
        const auto known = before->blobs.find(copy->parts[c]->ref().digest);
        if (known != before->blobs.end()) copy->parts[c] = known->second;
      }
      if (!any && choice.model.modules[i].bytes() > 0) continue;
      ModuleId id = choice.model.modules[i].id;
      id.part = part;
      SW_TRY(buffers_.Put(id, std::move(copy)));
    }
  }
  return {};
}

/// \param after  state of both levels after a snapshot
/// \param known  last restore that the snapshot knows of
void Agent::NotePlan(const SnapshotChoice& choice, const SelectionState& after,
                     std::uint64_t known) {
  if (options_.save.policy != Policy::kReplay || choice.model.experts.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    if (recovery_ != known) return;
    next_ = PlanAfter(choice, after);
  }
  PlanLogs();
}

/// \pre the caller has locked mutex_
Agent::NextPlan Agent::PlanAfter(const SnapshotChoice& choice, const SelectionState& after) const {
  NextPlan next;
  next.iteration = choice.iteration;
  if (next_) {
    const bool again = next_->iteration == choice.iteration;
    next.interval = again ? next_->interval : choice.iteration - next_->iteration;
  }
  next.map = choice.map;
  next.snapshot = after.snapshot;
  next.persist = after.persist;
  next.bytes = BytesOf(choice.model);
  next.k = choice.k_snapshot;
  for (std::size_t m = 0; m < choice.model.experts.size(); ++m) {
    std::vector<std::string>& names = next.names.emplace_back();
    for (std::uint32_t e = 0; e < choice.model.experts[m]; ++e) {
      names.push_back(choice.model.modules[choice.model.expert_module(m, e)].name);
    }
  }
  return next;
}

void Agent::PlanLogs() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t every = logs_.every();
  const std::uint64_t interval = every > 0 ? every : next_ ? next_->interval : 0;
  if (!next_ || interval == 0) return logs_.DiscardAll();
  const ReplayPoint point{next_->iteration + interval,
                          interval,
                          logs_.logged_since(),
                          options_.save.replay.full_every,
                          options_.save.budget_bytes.value_or(0),
                          &next_->bytes};
  const Result<TransferPlan> plan =
      SelectReplay(next_->map, next_->snapshot.cursor, ChainStarts(next_->snapshot, next_->persist),
                   next_->k, point);
  // The snapshot itself will report the error.
  if (!plan || !point.logged_since) return logs_.DiscardAll();
  ModuleNames names;
  for (std::size_t m = 0; m < plan->full.size(); ++m) {
    for (const std::uint32_t e : plan->full[m]) names.insert(next_->names[m][e]);
  }
  logs_.Hold(next_->iteration, std::move(names));
}

Result<std::vector<ExpertParam>> Agent::ExpertParams() {
  WaitForSnapshot();
  checkpoints::SourceSet set;
  if (const auto newest = Newest(); newest) {
    SW_TRY_ASSIGN(set, checkpoints::DeserializeSource(newest->catalogue));
  } else {
    SW_TRY_ASSIGN(set, NewestSource(options_.save.store));
  }
  SW_TRY_ASSIGN(const auto patterns, convert::ReadPatterns(options_.pattern_files));
  SW_TRY_ASSIGN(const checkpoints::Checkpoint checkpoint,
                checkpoints::ReadCheckpoint(set, patterns));
  SW_TRY_ASSIGN(const Model model, DescribeModel(checkpoint));
  std::vector<ExpertParam> params;
  for (std::size_t i = model.nonexpert_count; i < model.modules.size(); ++i) {
    const Module& module = model.modules[i];
    std::map<std::string, std::uint64_t> trained;
    for (const ModulePart& part : module.parts) {
      for (const ModuleTensor& each : part.tensors) {
        const layout::LogicalTensor& tensor = checkpoint.map.tensors[each.tensor];
        const bool of_optimizer =
            !layout::IsModelState(tensor.state) || tensor.state == layout::kMaster;
        if (!of_optimizer || layout::IsPadding(tensor.state)) continue;
        SW_TRY_ASSIGN(trained[tensor.name], CountElems(tensor.shape));
      }
    }
    for (const auto& [name, elems] : trained) params.push_back({module.name, name, elems});
  }
  return params;
}

}  // namespace shardwright::partial
