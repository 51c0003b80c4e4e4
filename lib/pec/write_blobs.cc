#include "pec/write_blobs.h"

#include <algorithm>
#include <atomic>
#include <set>

#include <tbb/enumerable_thread_specific.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include "base/checked.h"
#include "exec/first_error.h"
#include "exec/gather.h"
#include "exec/manifest.h"
#include "format/zip/crc32.h"
#include "os/dir.h"
#include "os/fault.h"
#include "os/file_system.h"
#include "ucp/zpack.h"

namespace shardwright::pec {
namespace {

/// Above this number of files the file system is synced as a whole, as exec::Run does.
constexpr std::size_t kFilesSyncedOneByOne = 64;

class Writer {
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
        arena_(static_cast<int>(options.threads)),
        results_(jobs.size()) {}

  Result<std::vector<BlobResult>> Go() {
    for (const BlobJob& job : jobs_) bytes_total_ += plan_.target().files[job.file].bytes;
    if (jobs_.size() > kFilesSyncedOneByOne && os::FileSystem::TellsErrors()) {
      SW_TRY_ASSIGN(os::FileSystem system, os::FileSystem::Of(options_.incoming));
      file_system_.emplace(std::move(system));
    }
    SW_TRY(WriteAll());
    if (file_system_) SW_TRY(file_system_->Sync());
    SW_TRY(os::FaultPoint("store.names"));
    SW_TRY(NameAll());
    return std::move(results_);
  }

 private:
  Status WriteAll() {
    exec::FirstError error;
    arena_.execute([&] {
      tbb::parallel_for(std::size_t{0}, jobs_.size(), [&](std::size_t job) {
        if (error.failed()) return;
        if (sink_.stop_requested()) {
          return error.Set(~std::uint64_t{0},
                           {Errc::kStopped, "stopped on request; nothing was saved", 0, -1});
        }
        if (Status status = WriteOne(job); !status) error.Set(job, std::move(status).error());
      });
    });
    return error.Take();
  }

  std::string Incoming(std::size_t job) const {
    return options_.incoming + "/" + std::to_string(job);
  }

  /// Gathers a unit into the thread's workspace and sums it up.
  Result<UnitSum> Gather(std::uint64_t index, exec::Workspace* workspace, bool note) {
    const plan::Unit unit = plan_.unit(index);
    std::vector<exec::Share> shares;
    SW_TRY(exec::GatherUnit(plan_, unit, source_, workspace, note ? &shares : nullptr));
    sums_->Add(shares);
    const std::span<const std::byte> bytes(workspace->unit);
    sink_.Progress(bytes_done_.fetch_add(unit.bytes, std::memory_order_relaxed) + unit.bytes,
                   bytes_total_);
    return UnitSum{workspace->crc32 ? *workspace->crc32 : zip::Crc32(bytes), exec::DigestOf(bytes),
                   unit.bytes};
  }

  /// Gathers units [first, last) of a blob, and with `file` writes them.
  Status GatherRange(std::uint64_t base, std::size_t first, std::size_t last, bool note,
                     const os::File* file, std::vector<UnitSum>* sums) {
    const auto one = [&](std::size_t i) -> Status {
      exec::Workspace& workspace = workspaces_.local();
      SW_TRY_ASSIGN((*sums)[i], Gather(base + i, &workspace, note));
      if (file == nullptr) return {};
      const plan::Unit unit = plan_.unit(base + i);
      const plan::Payload& payload = plan_.target().files[unit.file].payloads[unit.payload];
      return file->WriteAt(payload.offset + unit.first, workspace.unit);
    };
    if (last - first == 1) return one(first);
    exec::FirstError error;
    // Isolated: a thread that waits here must not begin another blob in the same workspace.
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(first, last, [&](std::size_t i) {
        if (error.failed()) return;
        if (Status status = one(i); !status) error.Set(i, std::move(status).error());
      });
    });
    return error.Take();
  }

  /// Passed members have no shares: their checksum is that of the whole payload.
  Status CheckMembers(std::uint32_t file, std::span<const UnitSum> sums) const {
    std::size_t unit = 0;
    for (const plan::Payload& payload : plan_.target().files[file].payloads) {
      const auto count = static_cast<std::size_t>(CeilDiv(payload.bytes, plan::kUnitBytes));
      const std::uint32_t crc = Summarize(sums.subspan(unit, count)).crc32;
      unit += count;
      if (!options_.note_sums || payload.kind != plan::Payload::Kind::kMember) continue;
      const auto& expected = plan_.source().members[payload.member].crc32;
      if (expected && *expected != crc) {
        return tl::unexpected<Error>(exec::WrongChecksum(plan_, payload.member, crc));
      }
    }
    return {};
  }

  Status WriteOne(std::size_t job) {
    const plan::OutputFile& file = plan_.target().files[jobs_[job].file];
    BlobResult& result = results_[job];
    const auto& known = jobs_[job].known;
    const std::uint64_t base = plan_.first_unit(jobs_[job].file, 0);
    std::uint64_t count = 0;
    for (const plan::Payload& payload : file.payloads) {
      count += CeilDiv(payload.bytes, plan::kUnitBytes);
    }
    std::vector<UnitSum> sums(count);
    exec::Workspace& workspace = workspaces_.local();
    SW_TRY_ASSIGN(sums[0], Gather(base, &workspace, options_.note_sums));
    if (known && known->bytes == file.bytes && known->head == sums[0].digest) {
      if (count > 1) SW_TRY(GatherRange(base, 1, count, options_.note_sums, nullptr, &sums));
      SW_TRY(CheckMembers(jobs_[job].file, sums));
      result.ref = Summarize(sums);
      result.unchanged = result.ref.digest == known->digest;
      if (result.unchanged && !options_.look_for_known) {
        // A manifest that is not collected names it, and the lock keeps collections out: it is
        // there.
        result.ref.zstd = known->zstd;
        return {};
      }
      if (const auto found = store_.Find(result.ref.digest, file.bytes)) {
        result.ref.zstd = found->zstd;
        return {};
      }
      result.unchanged = false;
      // Changed behind the first unit, or gone: read again, this time to be written.
      SW_TRY_ASSIGN(const os::File out, os::File::Create(Incoming(job)));
      SW_TRY(GatherRange(base, 0, count, false, &out, &sums));
      return Finish(job, out, sums);
    }
    SW_TRY_ASSIGN(const os::File out, os::File::Create(Incoming(job)));
    SW_TRY(out.WriteAt(0, workspace.unit));
    if (count > 1) SW_TRY(GatherRange(base, 1, count, options_.note_sums, &out, &sums));
    SW_TRY(CheckMembers(jobs_[job].file, sums));
    return Finish(job, out, sums);
  }

  /// Compresses if asked, and makes the bytes durable.
  Status Finish(std::size_t job, const os::File& out, std::span<const UnitSum> sums) {
    BlobResult& result = results_[job];
    result.ref = Summarize(sums);
    result.written_bytes = result.ref.bytes;
    if (const auto found = store_.Find(result.ref.digest, result.ref.bytes)) {
      result.ref.zstd = found->zstd;
      result.written_bytes = 0;
      return os::RemoveFile(Incoming(job));
    }
    if (!options_.zstd) return file_system_ ? Status() : out.Sync();
    SW_TRY_ASSIGN(
        const ucp::ZpackResult packed,
        ucp::WriteZpack(
            Incoming(job) + ".zst", result.ref.bytes,
            [&](std::uint64_t at, std::span<std::byte> block) { return out.ReadAt(at, block); },
            1));
    result.ref.zstd = true;
    result.written_bytes = packed.bytes;
    return os::RemoveFile(Incoming(job));
  }

  Status NameAll() {
    std::set<std::string> folders;
    for (std::size_t job = 0; job < jobs_.size(); ++job) {
      const BlobRef& ref = results_[job].ref;
      if (results_[job].written_bytes == 0) continue;
      const std::string name = store_.BlobPath(ref);
      const std::string folder = name.substr(0, name.rfind('/'));
      if (folders.insert(folder).second) SW_TRY(os::MakeDirs(folder));
      SW_TRY(os::Rename(Incoming(job) + (ref.zstd ? ".zst" : ""), name));
    }
    // One call for names in many folders: each folder by itself waits for the device.
    if (file_system_) return file_system_->Sync();
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
  tbb::enumerable_thread_specific<exec::Workspace> workspaces_;
  std::optional<os::FileSystem> file_system_;
  std::vector<BlobResult> results_;
  std::atomic<std::uint64_t> bytes_done_ = 0;
  std::uint64_t bytes_total_ = 0;
};

}  // namespace

BlobRef Summarize(std::span<const UnitSum> units) {
  BlobRef ref;
  std::vector<exec::Digest> digests;
  digests.reserve(units.size());
  for (const UnitSum& unit : units) {
    ref.bytes += unit.bytes;
    digests.push_back(unit.digest);
  }
  std::uint64_t after = ref.bytes;
  for (const UnitSum& unit : units) {
    after -= unit.bytes;
    ref.crc32 ^= zip::Crc32Share(unit.crc32, after);
  }
  ref.digest = exec::FileDigest(digests, exec::FrameDigest({}));
  if (!units.empty()) ref.head = units[0].digest;
  return ref;
}

Result<std::vector<BlobResult>> WriteBlobs(const Store& store, const plan::Plan& plan,
                                           exec::ByteSource& source, std::span<const BlobJob> jobs,
                                           const BlobOptions& options, exec::SourceSums* sums,
                                           Sink& sink) {
  return Writer(store, plan, source, jobs, options, sums, sink).Go();
}

}  // namespace shardwright::pec
