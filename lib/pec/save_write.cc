// The second half of a save: which blobs, who writes them, and the commit.

#include <cstring>
#include <deque>

#include "os/commit.h"
#include "os/dir.h"
#include "pec/module_reads.h"
#include "pec/read_blobs.h"
#include "pec/save_internal.h"
#include "pec/share.h"
#include "ucp/replicas.h"

namespace shardwright::pec::save {
namespace {

/// A result on its way to the root.
struct Line {
  std::uint32_t file = 0;
  BlobResult result;
};

}  // namespace

void Saving::AddBlob(std::uint32_t module, Component component) {
  const std::uint32_t file = AddModuleFile(input_.checkpoint.map, model_.modules[module], component,
                                           &target_, &target_tensors_);
  wanted_.push_back({module, component, file, 0});
}

void Saving::AddPassed() {
  const std::vector<std::uint32_t> members = PassedMembers(input_.checkpoint);
  if (!members.empty()) passed_file_ = AddPassedFile(input_.checkpoint.map, members, &target_);
}

void Saving::ListJobs() {
  std::vector<bool> selected(model_.modules.size(), false);
  for (std::size_t m = 0; m < report_.selection.persist.size(); ++m) {
    for (const std::uint32_t e : report_.selection.persist[m]) {
      selected[model_.expert_module(m, e)] = true;
    }
  }
  for (std::uint32_t i = 0; i < model_.modules.size(); ++i) {
    for (const Component component : kAllComponents) {
      const std::uint64_t bytes = model_.modules[i].part(component).bytes;
      report_.full_bytes += bytes;
      const bool wanted = !model_.modules[i].id.is_expert() || selected[i] || Keeps(component);
      if (wanted && bytes > 0) {
        report_.bytes += bytes;
        AddBlob(i, component);
      }
    }
  }
  AddPassed();
}

Status Saving::ShareJobs() {
  std::vector<ModuleBlobs> modules(model_.modules.size());
  for (std::size_t i = 0; i < modules.size(); ++i) modules[i].id = model_.modules[i].id;
  for (std::size_t m = 0; m < report_.selection.persist.size(); ++m) {
    for (const std::uint32_t e : report_.selection.persist[m]) {
      modules[model_.expert_module(m, e)].selected = true;
    }
  }
  for (const Wanted& one : wanted_) {
    modules[one.module].bytes[static_cast<std::size_t>(one.component)] =
        target_.files[one.file].bytes;
  }
  SW_TRY_ASSIGN(const BlobShares shares,
                ShareBlobs(map_, modules, static_cast<std::uint32_t>(comm_.size())));
  for (Wanted& one : wanted_) {
    one.rank = static_cast<int>(shares.rank[one.module][static_cast<std::size_t>(one.component)]);
  }
  report_.rank_bytes = shares.rank_bytes;
  report_.bottleneck_bytes = shares.bottleneck;
  report_.bound_bytes = shares.bound;
  report_.cut_ep = shares.ep;
  return {};
}

void Saving::FillReport() {
  report_.modules = model_.modules.size();
  report_.nonexpert_modules = model_.nonexpert_count;
  report_.experts = model_.experts;
  report_.layer_id = model_.layer_id;
  report_.blobs = wanted_.size() + (passed_file_ ? 1 : 0);
}

Status Saving::OpenIncoming() {
  const auto make = [&]() -> Result<std::string> {
    SW_TRY_ASSIGN(const std::string run_id, os::MakeRunId());
    const std::string path = store_->IncomingPath(run_id);
    SW_TRY(os::MakeDir(path));
    for (int rank = 0; rank < comm_.size(); ++rank) {
      SW_TRY(os::MakeDir(path + "/" + std::to_string(rank)));
    }
    return path;
  };
  SW_TRY_ASSIGN(incoming_, comm_.OnRootText(make));
  return {};
}

/// What the newest checkpoint holds of a module.
Result<HeldModule> Saving::BaseModule(std::uint32_t module) {
  if (!base_) return HeldModule();
  base_modules_.resize(model_.modules.size());
  std::optional<HeldModule>& held = base_modules_[module];
  if (!held) {
    SW_TRY_ASSIGN(
        held,
        ParseModule(base_->lines[module], model_.modules[module].name,
                    store_->ManifestPath({base_->head.sequence, base_->head.iteration, false})));
  }
  return *held;
}

/// The blobs that this rank writes.
Result<std::vector<BlobJob>> Saving::MyJobs() {
  std::vector<BlobJob> jobs;
  std::uint32_t module = ~std::uint32_t{0};
  HeldModule held;
  for (const Wanted& one : wanted_) {
    if (one.rank != comm_.rank()) continue;
    if (one.module != module) {
      SW_TRY_ASSIGN(held, BaseModule(one.module));
    }
    module = one.module;
    BlobJob job{one.file, std::nullopt};
    const auto& known = held[static_cast<std::size_t>(one.component)];
    if (known) job.known = known->blob;
    jobs.push_back(job);
  }
  if (passed_file_ && comm_.rank() == 0) {
    jobs.push_back({*passed_file_, base_ ? base_->head.passed : std::nullopt});
  }
  return jobs;
}

Status Saving::Write() {
  sink_.Pass("write");
  SW_TRY(OpenIncoming());
  Result<plan::Plan> made =
      plan::Plan::Make(input_.checkpoint.map, target_, {input_.checkpoint.proved, target_tensors_});
  SW_TRY(comm_.Agree(made ? Status() : Status(tl::unexpected<Error>(made.error()))));
  if (options_.verify == exec::Verify::kReplicas) {
    sink_.Pass("replicas");
    // Every rank sees every file, so nothing is sent and no memory is needed for it.
    exec::Exchange source(comm_, input_.checkpoint.map, *input_.bytes, {});
    SW_TRY(ucp::CompareReplicas(comm_, source, options_.threads, 0, sink_));
    sink_.Pass("write");
  }
  Result<std::vector<BlobJob>> listed = MyJobs();
  SW_TRY(comm_.Agree(listed ? Status() : Status(tl::unexpected<Error>(listed.error()))));
  const std::vector<BlobJob>& jobs = *listed;
  BlobOptions blobs;
  blobs.incoming = incoming_ + "/" + std::to_string(comm_.rank());
  blobs.zstd = options_.zstd;
  blobs.note_sums = options_.verify != exec::Verify::kNone;
  blobs.look_for_known = options_.verify == exec::Verify::kReadback;
  blobs.threads = options_.threads;
  exec::SourceSums sums(input_.checkpoint.map.members.size());
  Result<std::vector<BlobResult>> results =
      WriteBlobs(*store_, *made, *input_.bytes, jobs, blobs, &sums, sink_);
  SW_TRY(comm_.Agree(results ? Status() : Status(tl::unexpected<Error>(results.error()))));
  if (blobs.note_sums) {
    SW_TRY(ShareSums(&sums));
    sink_.Pass("verify");
    SW_TRY_ASSIGN(const VerifiedMembers members,
                  VerifyMembers(comm_, *made, sums, *input_.bytes, options_.threads));
    report_.members_verified = members.verified;
    report_.members_in_part = members.in_part;
  }
  if (options_.verify == exec::Verify::kReadback) {
    sink_.Pass("readback");
    SW_TRY(comm_.Agree(ReadBack(jobs, *results)));
  }
  sink_.AddRead(input_.bytes->bytes_read(), input_.bytes->files_read());
  sink_.Pass("commit");
  return CommitOnRoot(*results);
}

/// Reads every blob again that this rank has written.
Status Saving::ReadBack(const std::vector<BlobJob>& jobs,
                        const std::vector<BlobResult>& results) const {
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    if (results[i].written_bytes == 0) continue;
    Status same = VerifyBlob(store_->BlobPath(results[i].ref), results[i].ref,
                             PayloadsOf(target_.files[jobs[i].file]));
    if (same) continue;
    same.error().code = Errc::kIo;
    return same;
  }
  return {};
}

Status Saving::ShareSums(exec::SourceSums* sums) {
  if (comm_.size() == 1) return {};
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> packed, comm_.AllGather(sums->Pack()));
  for (std::size_t rank = 0; rank < packed.size(); ++rank) {
    if (rank != static_cast<std::size_t>(comm_.rank())) sums->Combine(packed[rank]);
  }
  return {};
}

Status Saving::CommitOnRoot(const std::vector<BlobResult>& mine) {
  std::vector<Line> lines;
  std::size_t next = 0;
  for (const Wanted& one : wanted_) {
    if (one.rank == comm_.rank()) lines.push_back({one.file, mine[next++]});
  }
  if (passed_file_ && comm_.rank() == 0) lines.push_back({*passed_file_, mine[next++]});
  SW_CHECK(next == mine.size());
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> parts,
                comm_.Gather(std::as_bytes(std::span(lines))));
  return comm_.OnRoot([&]() -> Status {
    std::vector<BlobResult> results(target_.files.size());
    for (const comm::Bytes& part : parts) {
      for (std::size_t at = 0; at + sizeof(Line) <= part.size(); at += sizeof(Line)) {
        Line line;
        std::memcpy(&line, part.data() + at, sizeof line);
        results[line.file] = line.result;
      }
    }
    return Commit(results);
  });
}

/// The new manifest: lines of the newest one as they are, but for the modules that were saved.
Result<std::string> Saving::ManifestText(const Manifest& manifest,
                                         const std::vector<BlobResult>& results) {
  std::vector<std::string_view> lines;
  std::vector<std::string> made;
  if (base_) {
    lines = base_->lines;
  } else {
    made.reserve(model_.modules.size());
    for (const Module& module : model_.modules) made.push_back(ModuleLine(module.name, {}));
    lines.assign(made.begin(), made.end());
  }
  std::deque<std::string> saved;
  for (std::size_t i = 0; i < wanted_.size();) {
    const std::uint32_t module = wanted_[i].module;
    SW_TRY_ASSIGN(HeldModule held, BaseModule(module));
    for (; i < wanted_.size() && wanted_[i].module == module; ++i) {
      auto& before = held[static_cast<std::size_t>(wanted_[i].component)];
      const BlobRef& now = results[wanted_[i].file].ref;
      differs_ = differs_ || (before && before->version == manifest.iteration &&
                              before->blob.digest != now.digest);
      before = Held{manifest.iteration, now};
    }
    saved.push_back(ModuleLine(model_.modules[module].name, held));
    lines[module] = saved.back();
  }
  return ToText(manifest, lines);
}

Status Saving::Commit(const std::vector<BlobResult>& results) {
  Manifest manifest;
  manifest.sequence = report_.sequence;
  manifest.parent = parent_ == nullptr ? 0 : parent_->sequence;
  manifest.iteration = report_.iteration;
  manifest.tag = input_.checkpoint.tag;
  manifest.policy = std::string(Name(options_.policy));
  manifest.k_snapshot = k_snapshot();
  manifest.k_persist = k_persist();
  for (const BlobResult& result : results) {
    report_.written_bytes += result.written_bytes;
    report_.blobs_written += result.written_bytes > 0 ? 1 : 0;
    report_.blobs_unchanged += result.unchanged ? 1 : 0;
  }
  if (passed_file_) manifest.passed = results[*passed_file_].ref;
  if (!model_.experts.empty()) {
    if (options_.snapshotted == nullptr) {
      SW_TRY(CompleteSave(&state_.snapshot, BeginSave(state_.snapshot, report_.selection.snapshot,
                                                      report_.iteration)));
    }
    SW_TRY(CompleteSave(&state_.persist,
                        BeginSave(state_.persist, report_.selection.persist, report_.iteration)));
  }
  manifest.state = state_;
  const std::string catalogue = dialect::Serialize(input_.set);
  manifest.catalogue = exec::DigestOf(std::as_bytes(std::span(catalogue)));
  SW_TRY_ASSIGN(const std::string text, ManifestText(manifest, results));
  report_.text_bytes = catalogue.size() + text.size();
  // Again, for file systems whose locks are each node's own: a save writes for minutes.
  SW_TRY(CheckPast(*store_));
  SW_TRY(store_->Commit({manifest.sequence, manifest.iteration, false}, text, catalogue, tokens_));
  sink_.AddWritten(report_.written_bytes + report_.text_bytes, report_.blobs_written + 2);
  if (differs_) {
    sink_.Warn(
        options_.store + ": iteration " + std::to_string(report_.iteration) +
        " was saved before with other content, whose place this checkpoint takes; if training "
        "went back without pec-restore, say with --resumed-from where it went on");
  }
  // The checkpoint is part of the store: what fails now is no failure of the save.
  Status clean = os::RemoveTree(incoming_, store_->path());
  if (Status released = lock_.Release(); clean) clean = std::move(released);
  if (!clean) sink_.Warn(clean.error().message);
  return {};
}

}  // namespace shardwright::pec::save
