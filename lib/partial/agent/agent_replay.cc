// SPDX-License-Identifier: Apache-2.0
// Replays experts in memory to the iteration of the newest snapshot, with the gradients
// that trainers have submitted: docs/lossless.md, "Replay in the memory of agents".

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "partial/agent/agent.h"
#include "partial/agent/memory/memory_replay.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

using Clock = std::chrono::steady_clock;

/// Time limit for the replay of a flush, and for waiting for another replay, shorter than
/// the timeout of clients. Experts that are not finished stay older until the next replay.
constexpr std::chrono::seconds kFlushReplay(60);

/// Checks that no restore to the snapshot's own iteration resumed with an older state
/// of the module: then the steps to that iteration belong to work that was rolled back.
/// \error kNotFound  there was such a restore, or one that does not record module versions
Status CheckGoneOn(const std::string& module, const MemoryCheckpoint& record,
                   const std::vector<RecoveryRecord>& recoveries) {
  for (const RecoveryRecord& one : recoveries) {
    if (one.sequence <= record.recovery || one.resume != record.manifest.iteration) continue;
    SW_TRY(CheckGoesOnWith(one, module, one.resume));
  }
  return {};
}

/// Finds the chain of an expert and takes memory for the result, if enough stays free.
Result<ModuleReplay> Prepare(const MemoryCheckpoint& record, const convert::Input& input,
                             const Module& module, std::uint32_t index,
                             const std::shared_ptr<MemoryPool>& pool, ReplayLog* log) {
  SW_TRY_ASSIGN(ModuleReplay out,
                FindReplay(input.checkpoint, module, index, record.manifest.modules[index],
                           record.blobs, record.manifest.iteration, log));
  std::uint64_t bytes = 0;
  for (const BlobPtr& old : out.old) bytes += old ? old->ref().bytes : 0;
  SW_TRY(pool->CheckSpare(bytes));
  SW_TRY(ReserveReplay(pool, &out));
  return out;
}

}  // namespace

Agent::ReplayJob Agent::NextReplay() const {
  ReplayJob job;
  const std::lock_guard lock(mutex_);
  const std::optional<std::size_t> newest = buffers_.NewestComplete();
  if (!newest) return job;
  job.record = records_[*newest];
  for (const auto& [id, blob] : buffers_.content(*newest)) {
    if (blob.version < buffers_.iteration(*newest)) {
      job.older.push_back({id, blob.data, blob.version});
    }
  }
  job.recovery = recovery_;
  return job;
}

Status Agent::Replay(const std::function<bool()>& stop,
                     std::optional<std::chrono::milliseconds> wait) {
  if (!options_.replay) return {};
  std::unique_lock one(replay_mutex_, std::defer_lock);
  if (!wait) {
    one.lock();
  } else if (!one.try_lock_for(*wait)) {
    return Fail(Errc::kBusy,
                "another replay is in progress; experts keep older iterations until it ends");
  }
  const Clock::time_point start = Clock::now();
  const GradientLogStatus logged = logs_.status();
  const std::shared_ptr<const MemoryCheckpoint> found = Newest();
  const bool again = replayed_.first.lock() == found && replayed_.second == logged.records;
  if (!found || again) return {};
  SW_TRY(CatchUp());
  ReplayJob job = NextReplay();
  if (!job.record) return {};
  MemoryReplays done;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(options_.save.store));
  if (!job.older.empty() && there) SW_TRY(BringForward(stop, &job, &done));
  if (!done.refused.empty() && !logged.forgotten.empty()) done.refused.push_back(logged.forgotten);
  // Unfinished experts have no reason for failure, so the next call retries.
  replayed_ = stop && stop() ? decltype(replayed_)() : std::pair(job.record, logged.records);
  const std::lock_guard lock(mutex_);
  MemoryReplays& all = status_.replays;
  all.modules += done.modules;
  all.gradient_bytes += done.gradient_bytes;
  if (done.modules > 0) {
    all.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  }
  all.refused = std::move(done.refused);
  const std::optional<std::size_t> newest = buffers_.NewestComplete();
  if (!newest) return {};
  std::uint64_t oldest = buffers_.iteration(*newest);
  for (const auto& [id, blob] : buffers_.content(*newest)) {
    oldest = std::min(oldest, blob.version);
  }
  logs_.Forget(oldest);  // no chain begins earlier
  return {};
}

/// Replays as far as possible within the time limit of a flush.
void Agent::ReplayInTime(Sink& sink) {
  const Clock::time_point end = Clock::now() + kFlushReplay;
  const Status replayed = Replay([end] { return Clock::now() >= end; }, kFlushReplay);
  if (!replayed) sink.Warn(StrCat("replay in memory: ", replayed.error().message));
}

/// \pre the caller has locked replay_mutex_
Status Agent::BringForward(const std::function<bool()>& stop, ReplayJob* job, MemoryReplays* done) {
  SW_TRY_ASSIGN(const Store store, Store::Open(options_.save.store));
  SW_TRY_ASSIGN(const std::unique_ptr<convert::Input> input,
                OpenMemory(*job->record, options_.pattern_files));
  SW_TRY_ASSIGN(const Model model, DescribeModel(input->checkpoint));
  SW_TRY_ASSIGN(std::vector<RecoveryRecord> recoveries, store.RecoveriesAfter(0));
  ReplayLog log{logs_.Kept(), store.path() + "/logs", std::move(recoveries), {}};
  std::set<std::uint32_t> modules;
  for (const OlderPart& part : job->older) modules.insert(model.index_of(part.id));
  std::vector<ModuleReplay> all;
  for (const std::uint32_t index : modules) {
    const Module& module = model.modules[index];
    if (stop && stop()) {
      done->refused.push_back(module.name + ": " + kReplayStopped);
      continue;
    }
    const Status gone_on = CheckGoneOn(module.name, *job->record, log.recoveries);
    Result<ModuleReplay> one = gone_on ? Prepare(*job->record, *input, module, index, pool_, &log)
                                       : tl::unexpected<Error>(gone_on.error());
    if (one) {
      all.push_back(*std::move(one));
    } else {
      done->refused.push_back(module.name + ": " + one.error().message);
    }
  }
  LogReads reads(log.log);
  tbb::enumerable_thread_specific<ReplayWorkspace> work;
  tbb::task_arena arena(exec::ArenaThreads(options_.save.threads));
  SW_TRY(exec::ForEach(arena, all.size(), [&](std::uint64_t i) -> Status {
    ModuleReplay& one = all[i];
    const Module& module = model.modules[one.module];
    const Status made = stop && stop() ? Fail(Errc::kStopped, kReplayStopped)
                                       : MakeReplay(module, input->checkpoint.map, log, reads,
                                                    pool_, stop, &work.local(), &one);
    if (!made) one.refused = module.name + ": " + made.error().message;
    return {};
  }));
  std::vector<std::pair<OlderPart, Blob>> made;
  for (ModuleReplay& one : all) {
    one.rooms.clear();
    if (!one.refused.empty()) {
      done->refused.push_back(std::move(one.refused));
      continue;
    }
    ++done->modules;
    done->gradient_bytes += one.chain.bytes;
    for (const OlderPart& part : job->older) {
      if (model.index_of(part.id) != one.module) continue;
      const auto* from = static_cast<const ModuleCopy*>(part.data.get());
      auto copy = std::make_shared<ModuleCopy>();
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (from->parts[c]) copy->parts[c] = one.made[c];
      }
      copy->replayed_from = from->replayed_from.value_or(part.version);
      made.emplace_back(part, Blob{job->record->manifest.iteration, std::move(copy)});
    }
  }
  Publish(model, made, job);
  return {};
}

/// Puts the computed blobs into their buffer and into newer buffers that have inherited the
/// same old blobs. Does nothing after an unknown restore, which may have rolled them back.
void Agent::Publish(const Model& model, const std::vector<std::pair<OlderPart, Blob>>& made,
                    ReplayJob* job) {
  if (made.empty()) return;
  const std::uint64_t iteration = job->record->manifest.iteration;
  const std::lock_guard lock(mutex_);
  if (recovery_ != job->recovery) return;
  for (std::size_t i = 0; i < SnapshotBuffers::kBuffers; ++i) {
    if (buffers_.state(i) == BufferState::kIdle) continue;
    const bool own = records_[i] == job->record;
    if (!own && buffers_.iteration(i) <= iteration) continue;
    bool changed = false;
    for (const auto& [part, blob] : made) {
      changed = buffers_.Advance(i, part.id, part.data, blob) || changed;
    }
    if (!changed || !records_[i]) continue;
    auto record = std::make_shared<MemoryCheckpoint>(*records_[i]);
    Hold(buffers_.content(i), model, record.get());
    records_[i] = std::move(record);
    if (own) job->record = records_[i];
  }
}

}  // namespace shardwright::partial
