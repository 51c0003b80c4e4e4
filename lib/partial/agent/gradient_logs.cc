// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/gradient_logs.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "partial/store/store.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace {

/// Time that a persist waits for processes with outstanding gradients.
constexpr std::chrono::seconds kUnderWay(10);
constexpr std::size_t kRootTables = 16;

}  // namespace

GradientLogs::Writer& GradientLogs::Find(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Writer>& writer = writers_[number];
  if (!writer) {
    writer = std::make_unique<Writer>();
    writer->number = number;
  }
  return *writer;
}

std::vector<GradientLogs::Writer*> GradientLogs::All() {
  const std::lock_guard lock(mutex_);
  std::vector<Writer*> all;
  for (const auto& [number, writer] : writers_) all.push_back(writer.get());
  return all;
}

void GradientLogs::Enter(std::uint32_t writer, std::uint64_t begun, bool restored,
                         std::uint64_t every) {
  Writer& entered = Find(writer);
  const std::lock_guard lock(mutex_);
  if (status_.writers == 0) {  // perhaps a trainer with other processes
    for (const auto& [number, one] : writers_) one->counts = false;
  }
  ++entered.entered;
  ++status_.writers;
  entered.counts = true;
  entered.newest = begun;
  entered.since = restored ? 0 : begun;
  entered.every = every;
}

std::optional<std::uint64_t> GradientLogs::logged_since() const {
  const std::lock_guard lock(mutex_);
  std::optional<std::uint64_t> since;
  for (const auto& [number, writer] : writers_) {
    if (!writer->counts) continue;
    if (writer->entered == 0) return std::nullopt;
    since = std::max(since.value_or(0), writer->since);
  }
  return since;
}

std::uint64_t GradientLogs::every() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t every = 0;
  for (const auto& [number, writer] : writers_) {
    if (writer->counts) every = std::max(every, writer->every);
  }
  return every;
}

void GradientLogs::Hold(std::uint64_t since, ModuleNames modules) {
  constexpr std::size_t kPlans = 4;  // gradients are at most this many snapshots late
  const std::lock_guard lock(mutex_);
  held_.erase(held_.lower_bound(since), held_.end());
  held_.emplace(since, std::move(modules));
  if (held_.size() > kPlans) held_.erase(held_.begin());
}

void GradientLogs::DiscardAll() {
  const std::lock_guard lock(mutex_);
  held_.clear();
}

/// Returns true if a plan buffers these gradients.
bool GradientLogs::Planned(std::uint64_t iteration, const std::string& module) const {
  const std::lock_guard lock(mutex_);
  const auto after = held_.lower_bound(iteration);
  return after != held_.begin() && std::prev(after)->second.contains(module);
}

/// Reserves memory for buffered gradients and counts it; false if the limit is reached.
bool GradientLogs::TakeRoom(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t held = status_.held_bytes + held_records_ * kBufferedRecordBytes;
  if (bytes + kBufferedRecordBytes > most_held_ - std::min(most_held_, held)) return false;
  status_.held_bytes += bytes;
  ++held_records_;
  return true;
}

void GradientLogs::Leave(std::uint32_t writer) {
  Writer& left = Find(writer);
  const std::lock_guard lock(mutex_);
  --left.entered;
  --status_.writers;
  appended_.notify_all();
}

Result<std::optional<exec::Digest>> GradientLogs::AddRoots(optimizer_steps::RootTable roots) {
  if (roots.IsCorrect()) return std::optional<exec::Digest>();
  const exec::Digest digest = DigestOf(roots);
  const std::lock_guard lock(mutex_);
  if (roots_.size() >= kRootTables && !roots_.contains(digest)) {
    return Fail(Errc::kLimit, "more than ", kRootTables,
                " tables of square roots that no step uses yet");
  }
  roots_.emplace(digest, std::move(roots));
  return std::optional(digest);
}

/// Writes the tables that steps name, before the steps.
Status GradientLogs::PutRootsOf(std::span<const LogStep> steps) {
  const std::lock_guard lock(mutex_);
  for (const LogStep& step : steps) {
    if (!step.roots) continue;
    const auto found = roots_.find(*step.roots);
    if (found == roots_.end()) continue;
    SW_TRY(os::MakeDirs(store_ + "/logs"));
    SW_TRY(PutRoots(store_ + "/logs", found->second));
    roots_.erase(found);
  }
  return {};
}

/// \pre the caller has locked writer->mutex
Status GradientLogs::Open(std::uint64_t recovery, int zstd_level, Writer* writer) {
  if (writer->log && writer->zstd_level == zstd_level) {
    writer->log->set_recovery(recovery);
    return {};
  }
  writer->log.reset();
  SW_TRY_ASSIGN(const Store store, Store::Open(store_));
  LogWriterOptions options;
  options.writer = writer->number;
  options.recovery = recovery;
  options.fingerprint = store.head().fingerprint;
  options.zstd_level = zstd_level;
  SW_TRY_ASSIGN(writer->log, LogWriter::Open(store_ + "/logs", options));
  writer->zstd_level = zstd_level;
  const std::lock_guard lock(mutex_);
  status_.cut_bytes += writer->log->cut_bytes();
  return {};
}

/// \pre the caller has locked writer->mutex
Status GradientLogs::AppendModule(const Handing& handing, const Handing::Module& module,
                                  std::uint64_t iteration, std::span<const std::byte> place,
                                  std::span<const LogStep> steps, Writer* writer) {
  std::vector<LogStep> used;
  std::map<std::uint32_t, std::uint32_t> index;  // by tensor
  std::vector<GradientRange> ranges;
  std::size_t bytes = 0;
  for (const Handing::Piece& piece : module.pieces) {
    const auto [at, is_new] = index.emplace(piece.tensor, static_cast<std::uint32_t>(used.size()));
    if (is_new) used.push_back(steps[piece.tensor]);
    const std::uint64_t size =
        steps[piece.tensor].step.skipped ? 0 : piece.count * ItemSize(piece.dtype);
    ranges.push_back({piece.param, piece.elems, piece.first, piece.dtype, at->second, piece.count,
                      place.subspan(piece.offset, size)});
    bytes += size;
  }
  // Rejects gradients that a log cannot store now, while the trainer gets the error.
  const bool held = Planned(iteration, module.name) &&
                    LogWriter::Check(iteration, module.name, used, ranges) && TakeRoom(bytes);
  std::vector<std::byte> kept(held ? bytes : 0);
  // The trainer could change it between digest and write, so copy it.
  if (!held) writer->own.resize(std::max(writer->own.size(), bytes));
  std::byte* end = held ? kept.data() : writer->own.data();
  for (GradientRange& range : ranges) {
    const std::span<std::byte> own(end, range.gradient.size());
    std::ranges::copy(range.gradient, own.begin());
    range.gradient = own;
    end += own.size();
  }
  if (!held) {
    LoggedRecord logged;
    SW_TRY(writer->log->Append(iteration, module.name, used, ranges, pool_ ? &logged : nullptr));
    if (pool_) Keep(std::move(logged));
    return {};
  }
  Used& one = writer->held.emplace_back();
  one.iteration = iteration;
  one.recovery = handing.recovery;
  one.zstd_level = handing.zstd_level;
  one.module = module.name;
  one.steps = std::move(used);
  one.ranges = std::move(ranges);
  one.bytes = std::move(kept);
  one.params.reserve(one.ranges.size());
  for (GradientRange& range : one.ranges) range.param = one.params.emplace_back(range.param);
  return {};
}

Result<std::uint64_t> GradientLogs::Append(const Handing& handing, std::uint64_t iteration,
                                           std::span<const std::byte> place,
                                           std::span<const LogStep> steps) {
  const std::string where = StrCat("gradients of iteration ", iteration);
  if (steps.size() != handing.tensors || place.size() != handing.place_bytes) {
    return BadInput(where, ": ", handing.tensors, " steps and ", handing.place_bytes,
                    " bytes expected, found ", steps.size(), " and ", place.size());
  }
  Writer& writer = Find(handing.writer);
  std::uint64_t bytes = 0;
  const auto append = [&]() -> Status {
    SW_TRY(Open(handing.recovery, handing.zstd_level, &writer));
    SW_TRY(PutRootsOf(steps));
    writer.dirty = true;
    for (const Handing::Module& module : handing.modules) {
      SW_TRY(AppendModule(handing, module, iteration, place, steps, &writer));
      for (const Handing::Piece& piece : module.pieces) {
        if (!steps[piece.tensor].step.skipped) bytes += piece.count * ItemSize(piece.dtype);
      }
    }
    return {};
  };
  const std::lock_guard one(writer.mutex);
  const Status done = append();
  if (!done) {
    // Continue after the last intact record. Earlier records must still be synced.
    if (writer.log && writer.log->Persist()) writer.dirty = false;
    writer.log.reset();
  }
  SW_TRY(done);
  const std::lock_guard lock(mutex_);
  if (iteration > writer.newest + 1) writer.since = iteration - 1;
  writer.newest = iteration;
  status_.records += handing.modules.size();
  status_.gradient_bytes += bytes;
  status_.newest = std::max(status_.newest.value_or(0), iteration);
  appended_.notify_all();
  return bytes;
}

/// \pre the caller has locked mutex_
bool GradientLogs::AllAtLocked(std::uint64_t iteration) const {
  return std::ranges::all_of(writers_, [&](const auto& one) {
    return one.second->entered == 0 || one.second->newest >= iteration;
  });
}

/// Appends buffered gradients up to an iteration, except those of `saved` modules.
/// \pre the caller has locked writer->mutex
Status GradientLogs::AppendBuffered(Writer* writer, std::uint64_t last, const ModuleNames& saved) {
  const auto needed = [&](const Used& one) {
    return one.iteration <= last && !saved.contains(one.module);
  };
  for (auto one = writer->held.begin(); one != writer->held.end();) {
    if (!needed(*one)) {
      ++one;
      continue;
    }
    SW_TRY(Open(one->recovery, one->zstd_level, writer));
    writer->dirty = true;
    if (Status done = writer->log->Append(one->iteration, one->module, one->steps, one->ranges);
        !done) {
      if (writer->log->Persist()) writer->dirty = false;
      writer->log.reset();
      return done;
    }
    {
      const std::lock_guard lock(mutex_);
      status_.held_bytes -= one->bytes.size();
      --held_records_;
    }
    one = writer->held.erase(one);
  }
  return {};
}

Status GradientLogs::AppendBuffered() {
  Status failed;
  for (Writer* const writer : All()) {
    const std::lock_guard one(writer->mutex);
    Status done = AppendBuffered(writer, std::numeric_limits<std::uint64_t>::max(), {});
    if (!done) failed = std::move(done);
  }
  return failed;
}

/// \returns the number of erased bytes
std::uint64_t GradientLogs::EraseBuffered(const std::function<bool(const Used&)>& which) {
  std::uint64_t all = 0;
  for (Writer* const writer : All()) {
    const std::lock_guard one(writer->mutex);
    std::uint64_t bytes = 0;
    const std::size_t records = std::erase_if(writer->held, [&](const Used& used) {
      if (!which(used)) return false;
      bytes += used.bytes.size();
      return true;
    });
    const std::lock_guard lock(mutex_);
    status_.held_bytes -= bytes;
    held_records_ -= records;
    all += bytes;
  }
  return all;
}

void GradientLogs::Drop(std::uint64_t iteration, const ModuleNames& saved) {
  const std::uint64_t dropped = EraseBuffered(
      [&](const Used& used) { return used.iteration <= iteration && saved.contains(used.module); });
  const std::lock_guard lock(mutex_);
  status_.dropped_bytes += dropped;
}

void GradientLogs::GiveUp(std::span<const RecoveryRecord> restores) {
  EraseBuffered([&](const Used& used) {
    return std::ranges::any_of(restores, [&](const RecoveryRecord& restore) {
      return GivesUp(restore, used.recovery, used.iteration);
    });
  });
}

Result<std::string> GradientLogs::Persist(std::uint64_t iteration, const ModuleNames& saved) {
  std::vector<Writer*> all;
  std::string lacks;
  Status failed;
  {
    std::unique_lock lock(mutex_);
    appended_.wait_for(lock, kUnderWay, [&] { return AllAtLocked(iteration); });
    // Late gradients are not buffered, because no persist would append them for this checkpoint.
    held_.erase(held_.begin(), held_.lower_bound(iteration));
    for (const auto& [number, writer] : writers_) {
      all.push_back(writer.get());
      // A writer that has left submits nothing more.
      if (lacks.empty() && writer->counts && writer->newest < iteration) {
        lacks = StrCat("writer ", number, (writer->entered > 0 ? " is" : " ended"),
                       " at iteration ", writer->newest, "; the checkpoint of iteration ",
                       iteration, " is saved without its later gradients");
      }
    }
  }
  for (Writer* const writer : all) {
    const std::lock_guard one(writer->mutex);
    if (Status appended = AppendBuffered(writer, iteration, saved); !appended) {
      failed = std::move(appended);
    }
    if (!writer->dirty) continue;
    writer->dirty = false;
    Status synced = writer->log ? writer->log->Persist()
                                : Fail(Errc::kIo, "writer ", writer->number,
                                       ": its log was closed before all records were synced");
    if (synced) continue;
    writer->log.reset();
    lacks = std::move(synced).error().message;
  }
  SW_TRY(std::move(failed));
  const std::lock_guard lock(mutex_);
  if (status_.records > 0 && lacks.empty()) status_.persisted = iteration;
  return lacks;
}

bool GradientLogs::AllAt(std::uint64_t iteration) const {
  const std::lock_guard lock(mutex_);
  return AllAtLocked(iteration);
}

void GradientLogs::Keep(LoggedRecord logged) {
  const LogRecord& record = logged.record;
  std::uint64_t bytes = sizeof(KeptRecord) + record.module.size() + logged.path.size() +
                        record.steps.size() * sizeof(LogStep) +
                        logged.payload.sums.size() * sizeof(exec::Digest);
  for (const LogPiece& piece : record.pieces) bytes += sizeof piece + piece.param.size();
  Counted counted(pool_);
  const auto reserve = [&]() -> Status {
    SW_TRY(pool_->CheckSpare(bytes));
    return counted.Grow(bytes);
  };
  Status room = reserve();
  const std::lock_guard lock(mutex_);
  if (!room && !kept_.empty() && kept_.front()->logged.record.iteration <= forgotten_) {
    ForgetLocked(forgotten_);  // only users of Retain have needed these
    room = reserve();
  }
  if (!room) {
    kept_.clear();
    gap_ = std::max(gap_, record.iteration);
    status_.forgotten = StrCat("records of gradients up to iteration ", gap_,
                               " did not fit into memory: ", room.error().message);
    return;
  }
  kept_.push_back(
      std::make_shared<const KeptRecord>(KeptRecord{std::move(logged), std::move(counted)}));
}

GradientLog GradientLogs::Kept() const { return GradientLog::Of(KeptRecords()); }

std::vector<std::shared_ptr<const LoggedRecord>> GradientLogs::KeptRecords() const {
  std::vector<std::shared_ptr<const LoggedRecord>> records;
  const std::lock_guard lock(mutex_);
  records.reserve(kept_.size());
  for (const auto& one : kept_) records.emplace_back(one, &one->logged);
  return records;
}

/// \pre the caller has locked mutex_
void GradientLogs::ForgetLocked(std::uint64_t last) {
  std::erase_if(kept_, [&](const auto& one) { return one->logged.record.iteration <= last; });
}

void GradientLogs::Retain(const void* user, std::optional<std::uint64_t> iteration) {
  const std::lock_guard lock(mutex_);
  retained_.erase(user);
  if (iteration) retained_.emplace(user, *iteration);
}

void GradientLogs::Forget(std::uint64_t iteration) {
  const std::lock_guard lock(mutex_);
  std::uint64_t last = iteration;
  for (const auto& [user, after] : retained_) last = std::min(last, after);
  ForgetLocked(last);
  forgotten_ = iteration;
  if (iteration >= gap_) status_.forgotten.clear();
}

GradientLogStatus GradientLogs::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace shardwright::partial
