// SPDX-License-Identifier: Apache-2.0
// Replays experts in memory to the iteration of the newest snapshot, with the gradients
// that trainers have submitted: docs/lossless.md, "Replay in the memory of agents".

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/task_arena.h>

#include "engine/exec/for_each.h"
#include "engine/layout/states.h"
#include "engine/tensor/convert.h"
#include "partial/agent/agent.h"
#include "partial/gradient_log/module_chain.h"
#include "partial/store/modules.h"
#include "partial/store/store.h"
#include "partial/store/write_blobs.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

using Clock = std::chrono::steady_clock;

/// Time limit for the replay of a flush, and for waiting for another replay, shorter than
/// the timeout of clients. Experts that are not finished stay older until the next replay.
constexpr std::chrono::seconds kFlushReplay(60);

constexpr const char* kStopped = "the replay was stopped before it was done";

/// Pool memory for a blob that is being computed.
class Room {
 public:
  Room() = default;
  Room(std::shared_ptr<MemoryPool> pool, BlobMemory buffer, std::uint64_t bytes)
      : pool_(std::move(pool)), buffer_(std::move(buffer)), bytes_(bytes) {}
  Room(Room&&) noexcept = default;
  Room& operator=(Room&&) = delete;
  ~Room() {
    if (buffer_) pool_->Give(std::move(buffer_), bytes_);
  }

  explicit operator bool() const { return buffer_ != nullptr; }
  std::span<std::byte> bytes() const { return {buffer_.get(), bytes_}; }
  BlobMemory Take() { return std::move(buffer_); }

 private:
  std::shared_ptr<MemoryPool> pool_;
  BlobMemory buffer_;
  std::uint64_t bytes_ = 0;
};

/// Maximum number of elements of a parameter that are computed at once: about 20 MiB per thread.
constexpr std::uint64_t kMostElems = std::uint64_t{1} << 20;

/// Buffers of a thread that applies steps.
struct Workspace {
  std::vector<float> values;
  std::vector<std::byte> gradient;
};

/// An expert during its replay to the iteration of the snapshot.
struct Brought {
  std::uint32_t module = 0;
  ReplayedModule chain;
  std::array<BlobPtr, kComponents> old;   ///< null: of that iteration already, or absent
  std::vector<Room> rooms;                ///< by component
  std::array<BlobPtr, kComponents> made;  ///< replaces `old`
  std::string refused;                    ///< why it stays older; empty: it does not
};

BlobRef SumsOf(std::span<const std::byte> bytes, const std::vector<std::uint32_t>& unit_bytes) {
  std::vector<exec::UnitSum> sums;
  sums.reserve(unit_bytes.size());
  for (const std::uint32_t unit : unit_bytes) {
    sums.push_back(exec::SumOf(bytes.first(unit)));
    bytes = bytes.subspan(unit);
  }
  return Summarize(sums);
}

/// Applies the steps of all parameters to copies of their blobs.
/// \error kStopped; as MakeSteps
Status MakeParams(const ReplayLog& log, LogReads& reads, const std::function<bool()>& stop,
                  Workspace* work, Brought* one) {
  for (std::size_t p = 0; p < one->chain.params.size(); ++p) {
    const ReplayedParam& param = one->chain.params[p];
    const std::vector<ReplayStep> steps = StepsOf(one->chain, p, log);
    if (steps.empty()) continue;
    std::vector<std::span<std::byte>> places;
    const auto add = [&](const BlobTensor& tensor) {
      const Room& room = one->rooms[static_cast<std::size_t>(tensor.component)];
      places.push_back(room.bytes().subspan(tensor.offset, param.elems * sizeof(float)));
    };
    add(param.param);
    for (const BlobTensor& state : param.states) add(state);
    const std::uint64_t range = RangeOf(one->chain, p, kMostElems);
    for (std::uint64_t first = 0; first < param.elems; first += range) {
      if (stop && stop()) return Fail(Errc::kStopped, kStopped);
      const std::uint64_t count = std::min(range, param.elems - first);
      work->values.resize(places.size() * count);
      std::vector<std::span<float>> arrays;
      for (std::size_t i = 0; i < places.size(); ++i) {
        arrays.push_back(std::span(work->values).subspan(i * count, count));
        std::memcpy(arrays[i].data(), places[i].data() + first * sizeof(float),
                    count * sizeof(float));
      }
      SW_TRY(MakeSteps(steps, first, arrays, reads, &work->gradient));
      for (std::size_t i = 0; i < places.size(); ++i) {
        std::memcpy(places[i].data() + first * sizeof(float), arrays[i].data(),
                    count * sizeof(float));
      }
    }
  }
  return {};
}

/// Computes weights with a master by rounding the master.
Status RoundWeights(const Module& module, const layout::ShardMap& map, Brought* one) {
  const Room& weights = one->rooms[static_cast<std::size_t>(Component::kWeights)];
  if (!weights) return {};
  for (const ModuleTensor& tensor : module.part(Component::kWeights).tensors) {
    const layout::LogicalTensor& logical = map.tensors[tensor.tensor];
    const auto param = std::ranges::find(one->chain.params, logical.name, &ReplayedParam::name);
    if (logical.state != layout::kWeight || param == one->chain.params.end() ||
        param->param.component != Component::kMaster) {
      continue;
    }
    if (!CanConvert(DType::kF32, logical.dtype)) {
      return Fail(Errc::kUnsupported, Quoted(logical.name),
                  ": float32 master weights cannot be rounded to ", Name(logical.dtype));
    }
    const Room& master = one->rooms[static_cast<std::size_t>(Component::kMaster)];
    Convert(DType::kF32, master.bytes().subspan(param->param.offset, param->elems * sizeof(float)),
            logical.dtype, weights.bytes().subspan(tensor.offset, tensor.bytes));
  }
  return {};
}

/// \error kBadInput  corrupt memory; as MakeSteps
Status Make(const Module& module, const layout::ShardMap& map, const ReplayLog& log,
            LogReads& reads, const std::shared_ptr<MemoryPool>& pool,
            const std::function<bool()>& stop, Workspace* work, Brought* one) {
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!one->rooms[c]) continue;
    const MemoryBlob& old = *one->old[c];
    std::ranges::copy(old.bytes(), one->rooms[c].bytes().begin());
    if (SumsOf(one->rooms[c].bytes(), old.unit_bytes()).digest != old.ref().digest) {
      return BadInput("blob ", exec::Hex(old.ref().digest),
                      " is corrupt: its content has changed in memory");
    }
  }
  SW_TRY(MakeParams(log, reads, stop, work, one));
  SW_TRY(RoundWeights(module, map, one));
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!one->rooms[c]) continue;
    const MemoryBlob& old = *one->old[c];
    const BlobRef ref = SumsOf(one->rooms[c].bytes(), old.unit_bytes());
    one->made[c] =
        ref.digest == old.ref().digest
            ? one->old[c]
            : std::make_shared<const MemoryBlob>(pool, one->rooms[c].Take(), ref, old.unit_bytes());
  }
  one->rooms.clear();
  return {};
}

/// Finds the chain of an expert and allocates memory for the result.
Result<Brought> Prepare(const MemoryCheckpoint& record, const convert::Input& input,
                        const Module& module, std::uint32_t index,
                        const std::shared_ptr<MemoryPool>& pool, ReplayLog* log) {
  const StoredModule& held = record.manifest.modules[index];
  const std::uint64_t to = record.manifest.iteration;
  Brought out;
  out.module = index;
  SW_TRY_ASSIGN(out.chain, FindChain(input.checkpoint, module, held, to, log));
  std::uint64_t bytes = 0;
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!held[c] || held[c]->version == to) continue;
    out.old[c] = record.blobs.at(held[c]->blob.digest);
    bytes += held[c]->blob.bytes;
  }
  SW_TRY(pool->CheckSpare(bytes));
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!out.old[c]) {
      out.rooms.emplace_back();
      continue;
    }
    const std::uint64_t size = out.old[c]->ref().bytes;
    SW_TRY_ASSIGN(BlobMemory buffer, pool->Take(size));
    out.rooms.emplace_back(pool, std::move(buffer), size);
  }
  return out;
}

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
  std::vector<Brought> all;
  for (const std::uint32_t index : modules) {
    const Module& module = model.modules[index];
    if (stop && stop()) {
      done->refused.push_back(module.name + ": " + kStopped);
      continue;
    }
    const Status gone_on = CheckGoneOn(module.name, *job->record, log.recoveries);
    Result<Brought> one = gone_on ? Prepare(*job->record, *input, module, index, pool_, &log)
                                  : tl::unexpected<Error>(gone_on.error());
    if (one) {
      all.push_back(*std::move(one));
    } else {
      done->refused.push_back(module.name + ": " + one.error().message);
    }
  }
  LogReads reads(log.log);
  tbb::enumerable_thread_specific<Workspace> work;
  tbb::task_arena arena(exec::ArenaThreads(options_.save.threads));
  SW_TRY(exec::ForEach(arena, all.size(), [&](std::uint64_t i) -> Status {
    Brought& one = all[i];
    const Module& module = model.modules[one.module];
    const Status made = stop && stop() ? Fail(Errc::kStopped, kStopped)
                                       : Make(module, input->checkpoint.map, log, reads, pool_,
                                              stop, &work.local(), &one);
    if (!made) one.refused = module.name + ": " + made.error().message;
    return {};
  }));
  std::vector<std::pair<OlderPart, Blob>> made;
  for (Brought& one : all) {
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
