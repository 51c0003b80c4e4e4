// SPDX-License-Identifier: Apache-2.0
// Steps of a run:
//
//   1 begin     create the stage directory (root), send its path to all ranks
//   2 journal   read the records of a stopped run; fail, changing nothing, if it was another run
//   3 create    clones and links if the plan has any, then every other output file: at its full
//               size, or, if it is small, empty
//   4 recover   read the units of a stopped run again and keep those with the recorded digest
//   5 units     gather, checksum, write, record in journal; ranks get equal bytes, threads steal.
//               Small files of one unit last, whole, on the I/O threads
//   6 checksums send those of all units and source pieces to all ranks
//   7 verify    compare source members with the checksums in their files; check that files copied
//               without a checksum have not changed
//   8 frames    write the bytes that need payload checksums: headers, pickles, directories; sync;
//               then write files that list the digests of others
//   9 readback  if requested
//  10 commit    write the manifest last, then rename the stage (support/os/commit.cc)

#include "engine/exec/run/run.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/exec/run/run_internal.h"
#include "support/base/bytes.h"
#include "support/os/dir.h"

namespace shardwright::exec {
namespace {

constexpr std::size_t kOpenOutputs = 4096;  // most output files to keep open

/// Encodes a journal record: unit, CRC-32, digest, shares. Uses the host's
/// byte order, because a journal is read on the system that wrote it.
std::vector<std::byte> Encode(std::uint64_t unit, const UnitRecord& record) {
  std::vector<std::byte> bytes(sizeof unit + sizeof record.sum.crc32 + sizeof record.sum.digest +
                               record.shares.size() * sizeof(Share));
  std::byte* at = bytes.data();
  const auto put = [&](const void* from, std::size_t count) {
    if (count > 0) std::memcpy(at, from, count);
    at += count;
  };
  put(&unit, sizeof unit);
  put(&record.sum.crc32, sizeof record.sum.crc32);
  put(record.sum.digest.data(), record.sum.digest.size());
  put(record.shares.data(), record.shares.size() * sizeof(Share));
  return bytes;
}

bool Decode(std::span<const std::byte> bytes, std::uint64_t* unit, UnitRecord* record) {
  constexpr std::size_t kFixed =
      sizeof *unit + sizeof record->sum.crc32 + sizeof record->sum.digest;
  if (bytes.size() < kFixed || (bytes.size() - kFixed) % sizeof(Share) != 0) return false;
  std::memcpy(unit, bytes.data(), sizeof *unit);
  std::memcpy(&record->sum.crc32, bytes.data() + 8, sizeof record->sum.crc32);
  std::memcpy(record->sum.digest.data(), bytes.data() + 12, record->sum.digest.size());
  record->shares.resize((bytes.size() - kFixed) / sizeof(Share));
  if (!record->shares.empty())
    std::memcpy(record->shares.data(), bytes.data() + kFixed, bytes.size() - kFixed);
  return true;
}

}  // namespace

std::uint64_t BufferBytes(const RunOptions& options) {
  const std::uint64_t workspaces = options.threads * kWorkspaceBytes;
  return options.file_owner.empty() ? workspaces : std::max(workspaces, options.memory_bytes);
}

Status CheckBuffers(unsigned threads, std::uint64_t memory_bytes) {
  const std::uint64_t needed = threads * kWorkspaceBytes;
  if (memory_bytes >= needed) return {};
  return Fail(Errc::kLimit, "--memory ", FormatBytes(memory_bytes), ": ", threads, " threads need ",
              FormatBytes(needed), " of buffers");
}

Status CheckSpace(const std::string& output, const std::string& folder, std::uint64_t bytes,
                  std::uint64_t files) {
  SW_TRY_ASSIGN(const os::FreeSpace free, os::FreeSpaceAt(folder));
  return CheckFits(free, output, bytes, files);
}

Status CheckFits(const os::FreeSpace& free, const std::string& output, std::uint64_t bytes,
                 std::uint64_t files) {
  constexpr const char* kNext = "; free some space or choose another path";
  const auto within = [](const std::string& quota) { return quota.empty() ? "" : " in " + quota; };
  if (free.bytes && *free.bytes < bytes) {
    return Fail(Errc::kIo, output, ": ", FormatBytes(bytes), " of disk space needed, ",
                FormatBytes(*free.bytes), " free", within(free.bytes_quota), kNext);
  }
  if (free.files && *free.files < files) {
    return Fail(Errc::kIo, output, ": ", files, " inodes needed, ", *free.files, " free",
                within(free.files_quota), kNext);
  }
  return {};
}

Result<os::Directory> OpenShared(comm::Comm& comm, const std::string& stage,
                                 const std::string& output) {
  const auto open = [&]() -> Result<os::Directory> {
    SW_TRY_ASSIGN(const bool seen, os::IsDir(stage));
    if (seen) return os::OpenStage(stage);
    return Fail(Errc::kIo, output, ": ", stage,
                ": rank 0 has created it, but this rank does not see it; OUTPUT must be on a file "
                "system that all ranks share");
  };
  return comm.Agree(open());
}

Result<os::Stage> BeginStage(const RunOptions& options, const std::vector<std::string>& sources,
                             Sink& sink) {
  if (options.force) SW_TRY(CheckReplaceable(options.output, sources));
  SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
  SW_TRY_ASSIGN(os::Stage stage, os::Stage::Begin(options.output, {options.force, options.resume,
                                                                   run_id, options.take_over}));
  stage.Print(sink);
  const auto check = [&]() -> Status {
    SW_TRY_ASSIGN(const os::Directory journals, stage.directory().OpenDir(os::kJournalDir));
    if (stage.resumed()) {
      SW_TRY(OfStoppedRun(options.output, options.identity.CheckSame(journals)));
      sink.Note("continuing the stopped run in " + stage.path(), 0);
    }
    return options.identity.Write(journals);
  };
  if (Status same = check(); !same) {
    (void)stage.Abandon(true);
    return tl::unexpected<Error>(std::move(same).error());
  }
  return stage;
}

Status StageInHand::Note(Status written) {
  if (!written && written.error().code == Errc::kIo) failed_write.store(true);
  return written;
}

Status StageInHand::AgreeWritten(comm::Comm& comm, Status mine) {
  return comm.Agree(Note(std::move(mine)));
}

Status LeaveStage(comm::Comm& comm, Errc code, StageInHand& in_hand) {
  const bool mine = in_hand.failed_write.load() || code == Errc::kIo;
  // Clear the journal before the removal, in case that the stage cannot be removed.
  Status left;
  if (mine && in_hand.journal) left = in_hand.journal->Clear();
  SW_TRY_ASSIGN(const std::uint64_t lost, comm.AllReduceOr(mine ? 1 : 0));
  if (lost != 0 && !mine && in_hand.journal) left = in_hand.journal->Clear();
  in_hand.journal.reset();
  if (comm.size() > 1) SW_TRY(comm.Barrier());
  if (!in_hand.stage || in_hand.stage->committed()) return left;
  // If the input is wrong, the same command cannot continue.
  const bool keep =
      lost == 0 && (code == Errc::kStopped || code == Errc::kNotFound || code == Errc::kBusy);
  SW_TRY(in_hand.stage->Abandon(keep));
  return left;
}

Status RemoveUnplanned(const os::Directory& stage, const plan::Target& target) {
  std::set<std::string> planned;
  for (const plan::OutputFile& file : target.files) planned.insert(file.path);
  SW_TRY_ASSIGN(const os::Tree tree, stage.Walk());
  const std::string journals = std::string(os::kJournalDir) + "/";
  for (const std::string& file : tree.files) {
    if (!file.starts_with(journals) && !planned.contains(file)) SW_TRY(stage.RemoveFile(file));
  }
  return {};
}

Status OfStoppedRun(const std::string& output, Status status) {
  if (status || status.error().code == Errc::kIo || status.error().code == Errc::kNotFound) {
    return status;
  }
  return Fail(Errc::kBusy, output, ": a stopped run cannot be continued: ", status.error().message,
              "; repeat the command of that run, or pass --no-resume to start again");
}

Runner::Runner(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
               const RunOptions& options, Sink& sink)
    : comm_(comm),
      plan_(plan),
      source_(comm, plan.source(), source, options.file_owner),
      options_(options),
      sink_(sink),
      arena_(ArenaThreads(options.threads)),
      output_(
          [this](std::uint32_t file) {
            return OfOutput(directory_.OpenWrite(PathOf(file), !IsShared(file)));
          },
          os::OpenFilesAllowed(kOpenOutputs)),
      source_sums_(plan.source().members.size()),
      writes_(sink) {}

Result<RunReport> Run(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
                      const RunOptions& options, Sink& sink) {
  Runner runner(comm, plan, source, options, sink);
  return runner.Run();
}

Result<RunReport> Runner::Run() {
  Status status = Passes();
  if (!status) {
    (void)output_.CloseAll();
    const Status left = LeaveStage(comm_, status.error().code, in_hand_);
    if (!left) sink_.Warn(left.error().message);
  }
  SW_TRY(std::move(status));
  writes_.Complete();
  return Report();
}

Status Runner::Passes() {
  SW_TRY(comm_.Agree(CheckBuffers(options_.threads, options_.memory_bytes)));
  SW_TRY(Begin());
  SW_TRY(comm_.Agree(OfStoppedRun(options_.output, ReadJournals())));
  SW_TRY(comm_.Agree(OpenJournal()));
  SW_TRY(comm_.Agree(CreateFiles()));
  SW_TRY(comm_.Agree(Recover()));
  SW_TRY(WriteUnits());
  SW_TRY(ShareSums());
  if (options_.verify != Verify::kNone) SW_TRY(VerifyRead());
  SW_TRY(WriteFrames());
  if (options_.verify == Verify::kReadback) SW_TRY(ReadBackAll());
  return Commit();
}

Status Runner::Begin() {
  sink_.Pass("prepare");
  const auto open_stage = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(os::Stage stage, BeginStage(options_, plan_.source().files, sink_));
    const std::string path = (stage.resumed() ? "r" : "n") + stage.path();
    in_hand_.stage.emplace(std::move(stage));
    return path;
  };
  const Result<std::string> opened = comm_.OnRootText(open_stage);
  SW_TRY(opened);
  resumed_ = opened->starts_with('r');
  SW_TRY_ASSIGN(directory_, OpenShared(comm_, opened->substr(1), options_.output));
  SW_TRY_ASSIGN(journals_, comm_.Agree(directory_.OpenDir(os::kJournalDir)));
  const auto rank = static_cast<std::size_t>(comm_.rank());
  const std::vector<std::uint64_t> first_of_rank =
      plan_.FirstUnits(static_cast<std::uint64_t>(comm_.size()));
  first_ = first_of_rank[rank];
  last_ = first_of_rank[rank + 1];
  AssignFiles(first_of_rank);
  sums_.resize(plan_.unit_count());
  done_.assign(last_ - first_, false);
  return {};
}

/// Assigns each file to the rank that writes its first unit, so that most files
/// need one rank only. Files without units are dealt in turn.
void Runner::AssignFiles(const std::vector<std::uint64_t>& first_of_rank) {
  const std::size_t files = plan_.target().files.size();
  rank_of_file_.resize(files);
  file_sums_.resize(files);
  complete_.assign(files, std::byte{0});
  for (std::uint32_t file = 0; file < files; ++file) {
    if (plan_.unit_count(file) == 0) {
      rank_of_file_[file] = static_cast<int>(file % static_cast<std::uint32_t>(comm_.size()));
      continue;
    }
    const auto after =
        std::upper_bound(first_of_rank.begin(), first_of_rank.end() - 1, plan_.first_unit(file, 0));
    rank_of_file_[file] = static_cast<int>(after - first_of_rank.begin()) - 1;
  }
}

Status Runner::ReadJournals() {
  if (!resumed_) return {};
  SW_TRY_ASSIGN(const std::vector<std::vector<std::byte>> records,
                options_.identity.ReadJournals(journals_));
  for (const std::vector<std::byte>& bytes : records) {
    std::uint64_t unit = 0;
    UnitRecord record;
    bool ours = Decode(bytes, &unit, &record) && unit < plan_.unit_count();
    for (const Share& share : record.shares) {
      ours = ours && share.member < plan_.source().members.size();
    }
    if (!ours) return Fail(Errc::kBadInput, journals_.path(), ": contains a record of another run");
    // A run without verification records no shares; a verifying run writes its units again.
    if (options_.verify != Verify::kNone && record.shares.empty()) continue;
    record.sum.bytes = static_cast<std::uint32_t>(plan_.unit(unit).bytes);
    if (unit >= first_ && unit < last_) noted_.insert_or_assign(unit, std::move(record));
  }
  return {};
}

Status Runner::OpenJournal() {
  SW_TRY_ASSIGN(os::Journal journal, os::Journal::Open(journals_, std::to_string(comm_.rank()),
                                                       options_.identity.Fingerprint()));
  in_hand_.journal.emplace(std::move(journal));
  // The journal must be durable before the first output file, because
  // it identifies the run that the files of a stage belong to.
  SW_TRY(in_hand_.journal->Sync());
  return journals_.Sync();
}

Status Runner::Recover() {
  std::vector<std::byte> bytes;
  std::optional<std::pair<std::uint32_t, Result<os::File>>> read;
  for (const auto& [index, record] : noted_) {
    const plan::Unit unit = plan_.unit(index);
    if (IsClone(unit.file)) continue;
    bytes.resize(unit.bytes);
    if (!read || read->first != unit.file) {
      read.emplace(unit.file, directory_.OpenRead(PathOf(unit.file)));
    }
    // A power failure may lose data that the journal records, and a device may fail to return it.
    // Skip such a unit and its shares: it is written again.
    const plan::Payload& payload = plan_.target().files[unit.file].payloads[unit.payload];
    const bool whole = read->second && read->second->ReadAt(payload.offset + unit.first, bytes);
    if (!whole || DigestOf(bytes) != record.sum.digest) continue;
    done_[index - first_] = true;
    sums_[index] = record.sum;
    source_sums_.Add(record.shares);
    ++report_.units_resumed;
  }
  noted_.clear();
  return {};
}

Status Runner::Put(const UnitInHand& unit) { return in_hand_.Note(WriteUnit(unit)); }

Status Runner::WriteUnit(const UnitInHand& unit) {
  const plan::Unit& at = unit.unit;
  sums_[unit.index] = unit.record->sum;
  SW_TRY_ASSIGN(const auto file, output_.Get(at.file));
  if (IsWhole(at.file)) {
    SW_TRY(WriteWhole(unit, *file));
  } else {
    const std::uint64_t offset =
        plan_.target().files[at.file].payloads[at.payload].offset + at.first;
    SW_TRY(file->WriteAt(offset, unit.bytes));
    file->StartWriteback(offset, unit.bytes.size());
    writes_.Add(unit.bytes.size());
  }
  return in_hand_.journal->Append(Encode(unit.index, *unit.record));
}

Status Runner::WriteUnits() {
  sink_.Pass("write");
  UnitLoopOptions loop_options;
  loop_options.sums = options_.verify == Verify::kNone ? nullptr : &source_sums_;
  loop_options.stopped = "stopped on request; the same command continues";
  std::vector<std::uint64_t> todo;
  std::vector<std::uint64_t> small;  // of files that one write makes
  for (std::uint64_t index = first_; index < last_; ++index) {
    const plan::Unit unit = plan_.unit(index);
    if (done_[index - first_] || IsClone(unit.file)) continue;
    (IsWhole(unit.file) ? small : todo).push_back(index);
    loop_options.bytes_total += unit.bytes;
  }
  SortByPlace(plan_, source_, &todo);
  SortByPlace(plan_, source_, &small);
  const std::uint64_t most =
      source_.RoundUnits(options_.memory_bytes - options_.threads * kWorkspaceBytes);
  UnitLoop loop(plan_, source_, arena_, sink_, std::move(loop_options));
  SW_TRY(ForUnitsInRounds(comm_, loop, plan_, source_, todo, most, *this));
  return ForUnitsInRounds(comm_, loop, plan_, source_, small, most, *this, SmallUnitThreads());
}

Status Runner::ShareSums() {
  if (comm_.size() == 1) return {};
  const std::span<const UnitSum> mine = std::span(sums_).subspan(first_, last_ - first_);
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts, comm_.AllGather(std::as_bytes(mine)));
  std::byte* at = reinterpret_cast<std::byte*>(sums_.data());
  for (const comm::Bytes& part : parts) {
    if (!part.empty()) std::memcpy(at, part.data(), part.size());
    at += part.size();
  }
  return CombineSums(comm_, &source_sums_);
}

Status Runner::VerifyRead() {
  sink_.Pass("verify");
  MembersToVerify which{&source_};
  which.mine = [this](std::uint32_t member) {
    return source_.Mine(member) && !clone_sources_.contains(plan_.source().members[member].file);
  };
  SW_TRY_ASSIGN(const MembersVerified members,
                comm_.Agree(VerifyMembers(plan_, source_sums_, which, arena_)));
  report_.members_verified = members.verified;
  report_.members_without_checksum = members.without_sum;
  return comm_.Agree(Recheck());
}

Status Runner::Recheck() {
  for (const std::uint32_t file : plan_.files_without_sums()) {
    if (!source_.MineFile(file) || clone_sources_.contains(file)) continue;
    SW_TRY_ASSIGN(const bool grown, source_.Recheck(file));
    if (!grown) continue;
    sink_.Warn(plan_.source().files[file] +
               ": grew while it was copied; the output has the contents from the start of the run");
  }
  return {};
}

Result<RunReport> Runner::Report() {
  RunReport total;
  const auto sum = [&](std::uint64_t mine, std::uint64_t* out) -> Status {
    SW_TRY_ASSIGN(*out, comm_.AllReduceSum(mine));
    return {};
  };
  SW_TRY(sum(source_.bytes_read(), &total.bytes_read));
  SW_TRY(sum(source_.files_read(), &total.files_read));
  SW_TRY(sum(report_.units_resumed, &total.units_resumed));
  SW_TRY(sum(report_.members_verified, &total.members_verified));
  SW_TRY(sum(report_.members_without_checksum, &total.members_without_checksum));
  total.units = plan_.unit_count();
  for (std::uint32_t index = 0; index < plan_.target().files.size(); ++index) {
    const plan::OutputFile& file = plan_.target().files[index];
    if (IsClone(index)) {
      ++(file.clone == plan::CloneMode::kLink ? total.files_linked : total.files_cloned);
      continue;
    }
    total.bytes_written += file.bytes;
    ++total.files_written;
  }
  return total;
}

}  // namespace shardwright::exec
