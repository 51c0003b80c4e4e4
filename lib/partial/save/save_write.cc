// SPDX-License-Identifier: Apache-2.0
// The second half of a save: lists the blobs, assigns them to ranks, and commits.

#include <cstring>
#include <deque>
#include <utility>

#include "checkpoints/open_source.h"
#include "engine/exec/replicas.h"
#include "engine/exec/verify.h"
#include "partial/save/save_internal.h"
#include "partial/store/module_reads.h"
#include "partial/store/read_blobs.h"
#include "support/os/commit.h"
#include "support/os/dir.h"

namespace shardwright::partial::save {
namespace {

/// A result that is sent to the root.
struct Line {
  std::uint32_t file = 0;
  BlobResult result;
};

/// Returns the jobs for the blobs that this rank writes.
Result<std::vector<BlobJob>> MyJobs(const Job& job, const Subject& subject, const Blobs& blobs,
                                    Base* base) {
  std::vector<BlobJob> jobs;
  std::uint32_t module = ~std::uint32_t{0};
  StoredModule held;
  for (const Wanted& one : blobs.wanted) {
    if (one.rank != job.comm.rank()) continue;
    if (one.module != module) {
      SW_TRY_ASSIGN(held, NewestOf(base, subject.model, one.module));
    }
    module = one.module;
    BlobJob blob{one.file, std::nullopt};
    const auto& known = held[static_cast<std::size_t>(one.component)];
    if (known) blob.known = known->blob;
    jobs.push_back(blob);
  }
  if (blobs.passed_file && job.comm.rank() == 0) {
    jobs.push_back({*blobs.passed_file, base->newest ? base->newest->head.passed : std::nullopt});
  }
  return jobs;
}

/// Text of a manifest; records if an earlier save of its iteration had other content.
struct ManifestText {
  std::string text;
  bool differs = false;
};

/// Makes the new manifest: copies lines of the newest one, except for saved modules.
/// \param results  by file of the target
Result<ManifestText> TextOf(const Manifest& manifest, const Model& model, const Blobs& blobs,
                            const std::vector<BlobResult>& results, Base* base) {
  ManifestText out;
  std::vector<std::string_view> lines;
  std::vector<std::string> made;
  if (base->newest) {
    lines = base->newest->lines;
  } else {
    made.reserve(model.modules.size());
    for (const Module& module : model.modules) made.push_back(ModuleLine(module.name, {}));
    lines.assign(made.begin(), made.end());
  }
  std::deque<std::string> saved;
  for (std::size_t i = 0; i < blobs.wanted.size();) {
    const std::uint32_t module = blobs.wanted[i].module;
    SW_TRY_ASSIGN(StoredModule held, NewestOf(base, model, module));
    for (; i < blobs.wanted.size() && blobs.wanted[i].module == module; ++i) {
      auto& before = held[static_cast<std::size_t>(blobs.wanted[i].component)];
      const BlobRef& now = results[blobs.wanted[i].file].ref;
      out.differs = out.differs || (before && before->version == manifest.iteration &&
                                    before->blob.digest != now.digest);
      before = StoredComponent{manifest.iteration, now};
    }
    saved.push_back(ModuleLine(model.modules[module].name, held));
    lines[module] = saved.back();
  }
  out.text = ToText(manifest, lines);
  return out;
}

/// Returns the state of both levels after the save.
Result<SelectionState> StateAfter(const Job& job, const Subject& subject, const Chosen& chosen) {
  SelectionState state = chosen.state;
  if (subject.model.experts.empty()) return state;
  if (job.options.snapshotted == nullptr) {
    SW_TRY(CompleteSave(&state.snapshot,
                        BeginSave(state.snapshot, chosen.selection.snapshot, subject.iteration)));
  }
  SW_TRY(CompleteSave(&state.persist,
                      BeginSave(state.persist, chosen.selection.persist, subject.iteration)));
  return state;
}

/// Writes catalogue, tokens and manifest. Root.
/// \param results  by file of the target
Result<Written> Commit(const Job& job, const Subject& subject, const Chosen& chosen,
                       const Blobs& blobs, const std::vector<BlobResult>& results, Base* base) {
  Written written;
  for (const BlobResult& result : results) {
    written.bytes += result.written_bytes;
    written.blobs += result.written_bytes > 0 ? 1 : 0;
    written.blobs_unchanged += result.unchanged ? 1 : 0;
    written.blobs_restored += result.restored ? 1 : 0;
  }
  Manifest manifest;
  manifest.sequence = base->sequence;
  manifest.parent = base->parent() == nullptr ? 0 : base->parent()->sequence;
  manifest.iteration = subject.iteration;
  manifest.tag = job.input.checkpoint.tag;
  manifest.policy = std::string(Name(job.options.policy));
  manifest.k_snapshot = chosen.k_snapshot;
  manifest.k_persist = chosen.k_persist;
  if (blobs.passed_file) manifest.passed = results[*blobs.passed_file].ref;
  SW_TRY_ASSIGN(manifest.state, StateAfter(job, subject, chosen));
  const std::string catalogue = checkpoints::Serialize(job.input.set);
  manifest.catalogue = exec::DigestOf(std::as_bytes(std::span(catalogue)));
  SW_TRY_ASSIGN(const ManifestText made, TextOf(manifest, subject.model, blobs, results, base));
  written.text_bytes = catalogue.size() + made.text.size();
  // Checked again for file systems that lock only per node, because a save takes minutes.
  SW_TRY(base->lock.Check());
  SW_TRY(CheckPast(job, subject, *base->store));
  SW_TRY(base->store->Commit({manifest.sequence, manifest.iteration, false}, made.text, catalogue,
                             chosen.tokens));
  job.sink.AddWritten(written.bytes + written.text_bytes, written.blobs + 2);
  if (written.blobs_restored > 0) {
    job.sink.Warn(StrCat(job.options.store, ": ", written.blobs_restored,
                         " blobs that earlier checkpoints name were missing or had another size, "
                         "and were written again; check whether another program, such as a purge "
                         "of old files, deletes files here; pec-save check lists other missing "
                         "blobs"));
  }
  if (made.differs) {
    job.sink.Warn(StrCat(job.options.store, ": iteration ", subject.iteration,
                         " was saved before with other content, which this checkpoint replaces; if "
                         "training went back without pec-restore, pass --resumed-from with the "
                         "iteration that it resumed from"));
  }
  return written;
}

/// Gathers the results of all ranks by file of the target, on the root only. Collective.
Result<std::vector<BlobResult>> GatherResults(comm::Comm& comm, const Blobs& blobs,
                                              const std::vector<BlobResult>& mine) {
  std::vector<Line> lines;
  std::size_t next = 0;
  for (const Wanted& one : blobs.wanted) {
    if (one.rank == comm.rank()) lines.push_back({one.file, mine[next++]});
  }
  if (blobs.passed_file && comm.rank() == 0) lines.push_back({*blobs.passed_file, mine[next++]});
  SW_CHECK(next == mine.size());
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts, comm.Gather(std::as_bytes(std::span(lines))));
  std::vector<BlobResult> results(blobs.target.files.size());
  for (const comm::Bytes& part : parts) {
    for (std::size_t at = 0; at + sizeof(Line) <= part.size(); at += sizeof(Line)) {
      Line line;
      std::memcpy(&line, part.data() + at, sizeof line);
      results[line.file] = line.result;
    }
  }
  return results;
}

/// \param incoming  folder for blobs in progress
Result<Written> WriteInto(const std::string& incoming, const Job& job, const Subject& subject,
                          const Chosen& chosen, const Blobs& blobs, Base* base) {
  const SaveRequest& options = job.options;
  const layout::ShardMap& source = job.input.checkpoint.map;
  exec::ByteSource& bytes = *job.input.bytes;
  const exec::CountReads reads(bytes, job.sink);
  exec::UnfinishedWrites writes(job.sink);
  SW_TRY_ASSIGN(const plan::Plan plan,
                job.comm.Agree(plan::Plan::Make(source, blobs.target,
                                                {job.input.checkpoint.proved, blobs.tensors})));
  if (options.verify == exec::Verify::kReplicas) {
    job.sink.Pass("replicas");
    // Every rank reads all files itself, so nothing is sent and no memory is needed for it.
    exec::Exchange exchange(job.comm, source, bytes, {});
    SW_TRY(exec::CompareReplicas(job.comm, exchange, options.threads, 0, job.sink));
    job.sink.Pass("write");
  }
  SW_TRY_ASSIGN(const std::vector<BlobJob> jobs, job.comm.Agree(MyJobs(job, subject, blobs, base)));
  BlobOptions how;
  how.incoming = incoming + "/" + std::to_string(job.comm.rank());
  how.zstd = options.zstd;
  how.note_sums = options.verify != exec::Verify::kNone;
  how.threads = options.threads;
  how.writes = &writes;
  exec::SourceSums sums(source.members.size());
  SW_TRY_ASSIGN(const std::vector<BlobResult> mine,
                job.comm.Agree(WriteBlobs(*base->store, plan, bytes, jobs, how, &sums, job.sink)));
  exec::MembersVerified members;
  if (how.note_sums) {
    SW_TRY(exec::CombineSums(job.comm, &sums));
    job.sink.Pass("verify");
    SW_TRY_ASSIGN(members, VerifyModules(job.comm, plan, sums, bytes, options.threads));
  }
  if (options.verify == exec::Verify::kReadback) {
    job.sink.Pass("readback");
    SW_TRY(job.comm.Agree(ReadBack(*base->store, blobs.target, jobs, mine)));
  }
  job.sink.Pass("commit");
  SW_TRY_ASSIGN(const std::vector<BlobResult> results, GatherResults(job.comm, blobs, mine));
  Written written;
  SW_TRY(job.comm.OnRoot([&]() -> Status {
    SW_TRY_ASSIGN(written, Commit(job, subject, chosen, blobs, results, base));
    CleanUp(incoming, *base->store, &base->lock, job.sink);
    return {};
  }));
  writes.Complete();
  written.members_verified = members.verified;
  written.members_in_part = members.in_part;
  return written;
}

}  // namespace

Result<std::string> OpenIncoming(comm::Comm& comm, const Store& store) {
  const auto make = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
    const std::string path = store.IncomingPath(run_id);
    SW_TRY(os::MakeDir(path));
    for (int rank = 0; rank < comm.size(); ++rank) {
      SW_TRY(os::MakeDir(path + "/" + std::to_string(rank)));
    }
    return path;
  };
  return comm.OnRootText(make);
}

Status ReadBack(const Store& store, const plan::Target& target, const std::vector<BlobJob>& jobs,
                const std::vector<BlobResult>& results) {
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (results[i].written_bytes == 0) continue;
    Status same = VerifyBlob(store.BlobPath(results[i].ref), results[i].ref,
                             PayloadsOf(target.files[jobs[i].file]));
    if (same) continue;
    same.error().code = Errc::kIo;
    return same;
  }
  return {};
}

void CleanUp(const std::string& incoming, const Store& store, os::Lock* lock, Sink& sink) {
  Status clean = os::RemoveTree(incoming, store.path());
  if (Status released = lock->Release(); clean) clean = std::move(released);
  if (!clean) sink.Warn(clean.error().message);
}

Result<Blobs> ListBlobs(const Job& job, const Subject& subject, const Base& base,
                        const Chosen& chosen) {
  const Model& model = subject.model;
  const layout::ShardMap& source = job.input.checkpoint.map;
  std::vector<ModuleBlobs> modules(model.modules.size());
  for (std::size_t i = 0; i < modules.size(); ++i) modules[i].id = model.modules[i].id;
  for (std::size_t m = 0; m < chosen.selection.persist.size(); ++m) {
    for (const std::uint32_t e : chosen.selection.persist[m]) {
      modules[model.expert_module(m, e)].selected = true;
    }
  }
  Blobs blobs;
  plan::TargetBuilder target;
  for (std::uint32_t i = 0; i < modules.size(); ++i) {
    for (const Component component : kAllComponents) {
      const std::uint64_t bytes = model.modules[i].part(component).bytes;
      blobs.full_bytes += bytes;
      const bool wanted =
          !modules[i].id.is_expert() || modules[i].selected || base.keeps(component);
      if (!wanted || bytes == 0) continue;
      blobs.bytes += bytes;
      const std::uint32_t file =
          AddModuleFile(source, model.modules[i], component, &target, &blobs.tensors);
      blobs.wanted.push_back({i, component, file, 0});
      modules[i].bytes[static_cast<std::size_t>(component)] = target.bytes(file);
    }
  }
  const std::vector<std::uint32_t> members = PassedMembers(job.input.checkpoint);
  if (!members.empty()) blobs.passed_file = AddPassedFile(source, members, &target);
  blobs.target = std::move(target).Take();
  SW_TRY_ASSIGN(blobs.writers,
                AssignBlobs(chosen.map, modules, static_cast<std::uint32_t>(job.comm.size())));
  for (Wanted& one : blobs.wanted) {
    one.rank =
        static_cast<int>(blobs.writers.rank[one.module][static_cast<std::size_t>(one.component)]);
  }
  return blobs;
}

Result<Written> Write(const Job& job, const Subject& subject, const Chosen& chosen,
                      const Blobs& blobs, Base* base) {
  job.sink.Pass("write");
  SW_TRY_ASSIGN(const std::string incoming, OpenIncoming(job.comm, *base->store));
  Result<Written> written = WriteInto(incoming, job, subject, chosen, blobs, base);
  // Blobs without a name are useless to a later save.
  if (!written && job.comm.rank() == 0) (void)os::RemoveTree(incoming, job.options.store);
  return written;
}

}  // namespace shardwright::partial::save
