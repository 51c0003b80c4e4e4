// SPDX-License-Identifier: Apache-2.0
#include "partial/store/write_blobs.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include <tbb/task_arena.h>

#include "engine/exec/file_pool.h"
#include "engine/exec/for_each.h"
#include "engine/exec/manifest.h"
#include "engine/exec/units.h"
#include "engine/exec/verify.h"
#include "engine/exec/zpack.h"
#include "support/os/dir.h"
#include "support/os/directory.h"
#include "support/os/fault.h"

namespace shardwright::partial {
namespace {

/// Above this number of files, syncs the whole file system, as exec::Run does.
constexpr std::size_t kFilesSyncedOneByOne = 64;

/// Receives units of blobs and writes them, or only keeps their checksums if the blob
/// begins like the known one. The thread that puts the last unit of a blob finishes it.
class Writer final : private exec::UnitSink {
 public:
  Writer(const Store& store, const plan::Plan& plan, exec::ByteSource& source,
         std::span<const BlobJob> jobs, const BlobOptions& options, exec::SourceSums* sums,
         Sink& sink)
      : store_(store),
        plan_(plan),
        source_(source),
        jobs_(jobs),
        options_(options),
        sums_(sums),
        sink_(sink),
        arena_(exec::ArenaThreads(options.threads)),
        out_([this](std::uint32_t job) { return OpenIncoming(job); }),
        states_(jobs.size()),
        job_of_file_(plan.target().files.size()),
        results_(jobs.size()) {
    for (std::size_t job = 0; job < jobs.size(); ++job) {
      job_of_file_[jobs[job].file] = static_cast<std::uint32_t>(job);
      states_[job].sums.resize(plan.unit_count(jobs[job].file));
      states_[job].missing = states_[job].sums.size();
    }
  }

  Result<std::vector<BlobResult>> Run() {
    if (jobs_.size() > kFilesSyncedOneByOne) {
      SW_TRY_ASSIGN(os::Directory system, os::Directory::Open(options_.incoming));
      if (system.CanSyncFileSystem()) file_system_.emplace(std::move(system));
    }
    SW_TRY(WriteAll());
    SW_TRY(out_.CloseAll());
    if (file_system_) SW_TRY(file_system_->SyncFileSystem());
    SW_TRY(os::FaultPoint("store.names"));
    SW_TRY(NameAll());
    return std::move(results_);
  }

 private:
  /// State of a blob in progress.
  struct State {
    std::vector<exec::UnitSum> sums;         // by unit
    std::atomic<std::uint64_t> missing = 0;  // units that were not put yet
    bool only_sums = false;                  // begins like the known one, or a repair: not written
    bool again = false;                      // differs later, or is missing: read and write it
    bool created = false;                    // its file exists; guarded by the lock of the pool
  };

  Status WriteAll() {
    exec::UnitLoopOptions loop_options;
    loop_options.stopped = "stopped on request; nothing was saved";
    for (const BlobJob& job : jobs_) {
      loop_options.bytes_total += plan_.target().files[job.file].bytes;
    }
    exec::UnitLoopOptions noting = loop_options;
    if (options_.note_sums) noting.sums = sums_;
    exec::UnitLoop loop(plan_, source_, arena_, sink_, std::move(noting));
    // The first unit of a blob decides if the rest is read, and if it is written.
    std::vector<std::uint64_t> heads;
    for (const BlobJob& job : jobs_) heads.push_back(plan_.first_unit(job.file, 0));
    SW_TRY(loop.ForUnits(heads, *this));
    std::vector<std::uint64_t> rest;
    for (std::uint32_t job = 0; job < jobs_.size(); ++job) {
      if (IsRepair(job) && !BeginsLike(job, jobs_[job].repairs)) continue;
      const std::uint64_t first = plan_.first_unit(jobs_[job].file, 0);
      for (std::uint64_t i = 1; i < states_[job].sums.size(); ++i) rest.push_back(first + i);
    }
    SW_TRY(loop.ForUnits(rest, *this));
    std::vector<std::uint64_t> again;
    for (std::uint32_t job = 0; job < jobs_.size(); ++job) {
      State& state = states_[job];
      if (state.again && IsRepair(job)) ClaimRepair(job);
      if (!state.again) continue;
      state.only_sums = false;
      state.missing = state.sums.size();
      const std::uint64_t first = plan_.first_unit(jobs_[job].file, 0);
      for (std::uint64_t i = 0; i < state.sums.size(); ++i) again.push_back(first + i);
    }
    // The checksums of its source were recorded before.
    exec::UnitLoop once_more(plan_, source_, arena_, sink_, std::move(loop_options));
    return once_more.ForUnits(again, *this);
  }

  std::string Incoming(std::size_t job) const {
    return options_.incoming + "/" + std::to_string(job);
  }

  Result<os::File> OpenIncoming(std::uint32_t job) {
    if (std::exchange(states_[job].created, true)) return os::File::OpenWrite(Incoming(job));
    return os::File::Create(Incoming(job));
  }

  bool IsRepair(std::uint32_t job) const { return !jobs_[job].repairs.empty(); }

  /// Returns true if a blob has the size and the first unit of one of `blobs`.
  bool BeginsLike(std::uint32_t job, std::span<const BlobRef> blobs) const {
    const std::uint64_t bytes = plan_.target().files[jobs_[job].file].bytes;
    const exec::Digest& head = states_[job].sums.front().digest;
    return std::ranges::any_of(
        blobs, [&](const BlobRef& blob) { return blob.bytes == bytes && blob.head == head; });
  }

  /// Returns the damaged blob with the same content; null: none.
  const BlobRef* RepairedBy(std::uint32_t job) const {
    const std::vector<BlobRef>& repairs = jobs_[job].repairs;
    const auto found = std::ranges::find(repairs, results_[job].ref.digest, &BlobRef::digest);
    return found == repairs.end() ? nullptr : &*found;
  }

  /// Claims a repair: of several with the same content, only the first one is written.
  void ClaimRepair(std::uint32_t job) {
    const BlobRef& blob = *RepairedBy(job);
    if (claimed_.insert({blob.digest, blob.zstd}).second) return;
    states_[job].again = false;
    results_[job].restored = false;
  }

  Status Put(const exec::UnitInHand& unit) override {
    const std::uint32_t job = job_of_file_[unit.unit.file];
    State& state = states_[job];
    const std::uint64_t i = unit.index - plan_.first_unit(unit.unit.file, 0);
    state.sums[i] = unit.record->sum;
    if (i == 0 && !state.again) {
      const auto& known = jobs_[job].known;
      state.only_sums = IsRepair(job) || (known && BeginsLike(job, {&*known, 1}));
    }
    if (!state.only_sums) {
      const plan::Payload& payload =
          plan_.target().files[unit.unit.file].payloads[unit.unit.payload];
      SW_TRY_ASSIGN(const auto out, out_.Get(job));
      SW_TRY(out->WriteAt(payload.offset + unit.unit.first, unit.bytes));
      if (options_.writes != nullptr) options_.writes->Add(unit.bytes.size());
    }
    if (state.missing.fetch_sub(1) > 1) return {};
    Status finished = Finish(job);
    out_.Close(job);
    return finished;
  }

  Status Finish(std::uint32_t job) {
    State& state = states_[job];
    if (!state.again) {
      // Passed members have no parts: their checksum covers the whole payload.
      SW_TRY(exec::SumPayloads(plan_, jobs_[job].file, state.sums, options_.note_sums));
    }
    BlobResult& result = results_[job];
    result.ref = Summarize(state.sums);
    if (state.only_sums) {
      FinishUnwritten(job);
      return {};
    }
    if (IsRepair(job)) return FinishRepair(job);
    result.written_bytes = result.ref.bytes;
    if (const auto found = store_.Find(result.ref.digest, result.ref.bytes)) {
      result.ref.zstd = found->zstd;
      result.written_bytes = 0;
      return os::RemoveFile(Incoming(job));
    }
    return MakeDurable(job, options_.zstd);
  }

  /// Makes a written blob durable, in its form.
  Status MakeDurable(std::uint32_t job, bool zstd) {
    if (zstd) return Compress(job);
    if (file_system_) return {};
    SW_TRY_ASSIGN(const auto out, out_.Get(job));
    return out->Sync();
  }

  /// Replaces the damaged file in the store, regardless of its size.
  Status FinishRepair(std::uint32_t job) {
    BlobResult& result = results_[job];
    const BlobRef* const blob = RepairedBy(job);
    if (blob == nullptr) {  // the source has changed since it was hashed
      result.restored = false;
      return os::RemoveFile(Incoming(job));
    }
    result.written_bytes = result.ref.bytes;
    return MakeDurable(job, blob->zstd);
  }

  /// Finishes a blob that began like the known one, or a repair, after reading its end.
  void FinishUnwritten(std::uint32_t job) {
    BlobResult& result = results_[job];
    if (IsRepair(job)) {
      states_[job].again = result.restored = RepairedBy(job) != nullptr;
      return;
    }
    result.unchanged = result.ref.digest == jobs_[job].known->digest;
    // The manifest refers to it, but a purge of old files may have removed it since.
    if (const auto found = store_.Find(result.ref.digest, result.ref.bytes)) {
      result.ref.zstd = found->zstd;
      return;
    }
    result.restored = std::exchange(result.unchanged, false);
    states_[job].again = true;
  }

  Status Compress(std::uint32_t job) {
    BlobResult& result = results_[job];
    SW_TRY_ASSIGN(const auto plain, out_.Get(job));
    SW_TRY_ASSIGN(os::File packing, os::File::Create(Incoming(job) + ".zst"));
    exec::ZpackWriter writer(std::move(packing), contexts_, options_.writes);
    tbb::task_arena alone(1);  // other threads have other blobs
    std::vector<std::byte> block;
    for (std::uint64_t at = 0; at < result.ref.bytes; at += block.size()) {
      block.resize(std::min(exec::kZpackBlockBytes, result.ref.bytes - at));
      SW_TRY(plain->ReadAt(at, block));
      SW_TRY(writer.Append(block, alone));
    }
    SW_TRY_ASSIGN(const exec::ZpackResult packed, writer.Finish());
    result.ref.zstd = true;
    result.written_bytes = packed.bytes;
    return os::RemoveFile(Incoming(job));
  }

  Status NameAll() {
    std::set<std::string> folders;
    for (std::uint32_t job = 0; job < jobs_.size(); ++job) {
      const BlobRef& ref = results_[job].ref;
      const bool written = results_[job].written_bytes > 0;
      if (results_[job].unchanged || (IsRepair(job) && !written)) continue;
      const std::string name = store_.BlobPath(ref);
      const std::string folder = name.substr(0, name.rfind('/'));
      // Also syncs the folder of a blob that was found: a save that was killed may have named it.
      if (folders.insert(folder).second) SW_TRY(os::MakeDirs(folder));
      if (!written) continue;
      SW_TRY(os::Rename(Incoming(job) + (ref.zstd ? ".zst" : ""), name));
    }
    // One call for names in many folders: a sync per folder waits for the device each time.
    if (file_system_) return file_system_->SyncFileSystem();
    for (const std::string& folder : folders) SW_TRY(os::SyncDir(folder));
    return folders.empty() ? Status() : os::SyncDir(store_.path() + "/blobs");
  }

  const Store& store_;
  const plan::Plan& plan_;
  exec::ByteSource& source_;
  std::span<const BlobJob> jobs_;
  const BlobOptions& options_;
  exec::SourceSums* sums_;
  Sink& sink_;
  tbb::task_arena arena_;
  exec::FilePool out_;  // by job
  exec::ZstdContexts contexts_;
  std::optional<os::Directory> file_system_;
  std::vector<State> states_;               // by job
  std::vector<std::uint32_t> job_of_file_;  // by file of the target
  std::set<BlobFile> claimed_;              // by repairs
  std::vector<BlobResult> results_;
};

}  // namespace

BlobRef Summarize(std::span<const exec::UnitSum> units) {
  BlobRef ref;
  std::vector<exec::Digest> digests;
  digests.reserve(units.size());
  for (const exec::UnitSum& unit : units) {
    ref.bytes += unit.bytes;
    digests.push_back(unit.digest);
  }
  ref.crc32 = exec::CombinedCrc32(units);
  ref.digest = exec::FileDigest(digests, exec::DigestOf({}));
  if (!units.empty()) ref.head = units[0].digest;
  return ref;
}

Result<std::vector<BlobResult>> WriteBlobs(const Store& store, const plan::Plan& plan,
                                           exec::ByteSource& source, std::span<const BlobJob> jobs,
                                           const BlobOptions& options, exec::SourceSums* sums,
                                           Sink& sink) {
  return Writer(store, plan, source, jobs, options, sums, sink).Run();
}

}  // namespace shardwright::partial
