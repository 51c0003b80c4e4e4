// SPDX-License-Identifier: Apache-2.0
#include "partial/save/save.h"

#include <algorithm>
#include <utility>

#include "engine/exec/gather.h"
#include "partial/save/save_internal.h"
#include "support/base/bytes.h"
#include "support/os/dir.h"

namespace shardwright::partial {
namespace save {
namespace {

/// Checks that kept components exist, and that other components remain to select.
Status CheckKeep(const Job& job, const Model& model) {
  if (!job.options.keep || model.experts.empty()) return {};
  bool selects = false;
  for (const Component component : kAllComponents) {
    bool any = false;
    for (std::size_t i = model.nonexpert_count; i < model.modules.size(); ++i) {
      any = any || model.modules[i].part(component).bytes > 0;
    }
    const bool kept = (*job.options.keep)[static_cast<std::size_t>(component)];
    if (kept && !any) {
      return Fail(Errc::kUsage, "--keep ", Name(component), ": the experts of ",
                  job.input.checkpoint.tag, " have no ", Name(component));
    }
    selects = selects || (any && !kept);
  }
  if (selects) return {};
  return Fail(Errc::kUsage, "--keep ", KeepText(*job.options.keep),
              ": nothing is left to select; use --policy full");
}

/// Checks that K is not above the experts of every layer, because a typing error would save
/// everything each time. Smaller layers are saved whole. Dynamic K and agents have other rules.
Status CheckK(const Job& job, const Model& model) {
  const SaveRequest& options = job.options;
  if (model.experts.empty() || options.policy == Policy::kFull) return {};
  if (options.dynamic_k || options.snapshotted != nullptr) return {};
  const auto most = std::ranges::max_element(model.experts);
  if (options.k_snapshot <= *most) return {};
  const std::uint32_t layer =
      model.layer_id[static_cast<std::size_t>(most - model.experts.begin())];
  const std::string n = std::to_string(*most);
  return Fail(Errc::kUsage, "--k ", options.k_snapshot, ": layer ", layer, " has ", n,
              " experts, and no layer has more; use at most ", n,
              ", or --policy full for all experts");
}

/// Local.
Result<Subject> Describe(const Job& job) {
  Subject subject;
  SW_TRY_ASSIGN(subject.model, DescribeModel(job.input.checkpoint));
  if (job.options.iteration) {
    subject.iteration = *job.options.iteration;
  } else {
    const Result<std::uint64_t>& told = job.input.checkpoint.iteration;
    if (!told) {
      return Fail(told.error().code, job.input.set.tag, ": ", told.error().message,
                  "; pass --iteration N");
    }
    subject.iteration = *told;
  }
  SW_TRY(CheckKeep(job, subject.model));
  return subject;
}

/// Collective.
Result<Subject> Understand(const Job& job) {
  if (!job.input.mapped.empty()) {
    return Fail(Errc::kUnsupported, job.input.checkpoint.tag,
                ": this catalogue was made with --map, but a store keeps checkpoints as "
                "training saved them; pass the checkpoint itself");
  }
  if (!job.input.set.weights_of.empty()) {
    return Fail(Errc::kUnsupported, job.input.checkpoint.tag,
                ": this catalogue was made with --weights-of ", job.input.set.weights_of,
                ", but a store keeps checkpoints as training saved them; pass the checkpoint "
                "itself");
  }
  const SaveRequest& options = job.options;
  SW_TRY(job.comm.Agree(exec::CheckBuffers(options.threads, options.memory_bytes)));
  if (!job.input.file_owner.empty()) {
    return Fail(Errc::kUnsupported, job.input.checkpoint.tag,
                ": a save does not support --node-local, because every rank must see every file");
  }
  job.sink.Pass("select");
  return job.comm.Agree(Describe(job));
}

/// Makes the part of the report that is known before writing.
SaveReport ReportOf(const Subject& subject, const Base& base, const Chosen& chosen,
                    const Blobs& blobs) {
  SaveReport report;
  report.iteration = subject.iteration;
  report.sequence = base.sequence;
  report.first = base.parent() == nullptr;
  if (base.newest && base.newest->head.iteration == subject.iteration) {
    report.replaces = base.newest->head.sequence;
  }
  report.modules = subject.model.modules.size();
  report.nonexpert_modules = subject.model.nonexpert_count;
  report.experts = subject.model.experts;
  report.layer_id = subject.model.layer_id;
  report.selection = chosen.selection;
  report.full_bytes = blobs.full_bytes;
  report.bytes = blobs.bytes;
  report.blobs = blobs.wanted.size() + (blobs.passed_file ? 1 : 0);
  report.rank_bytes = blobs.writers.rank_bytes;
  report.bottleneck_bytes = blobs.writers.bottleneck;
  report.bound_bytes = blobs.writers.bound;
  report.cut_ep = blobs.writers.ep;
  report.at_risk = chosen.at_risk;
  report.dynamic_k = chosen.dynamic_k;
  return report;
}

}  // namespace
}  // namespace save

Status ExpectStore(const SaveRequest& request) {
  if (!request.existing_store) return {};
  const std::string& path = request.store;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(path));
  if (!there) {
    SW_TRY_ASSIGN(const bool begun, os::Exists(path + "/" + Store::kBegunName));
    if (begun) return {};
    return Fail(
        Errc::kNotFound, path,
        (request.store_id.empty() ? ": there is no store, and --existing-store does not create one"
                                  : ": the store of this run is missing"),
        "; check that its file system is mounted");
  }
  if (request.store_id.empty()) return {};
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  if (store.head().id == request.store_id) return {};
  return Fail(Errc::kMismatch, path, ": expected store ", request.store_id, ", found store ",
              store.head().id, "; check that the right file system is mounted");
}

std::string KeepText(const KeptComponents& keep) {
  std::string text;
  for (const Component component : kAllComponents) {
    if (!keep[static_cast<std::size_t>(component)]) continue;
    text += (text.empty() ? "" : ",") + std::string(Name(component));
  }
  return text.empty() ? "nothing" : text;
}

Result<SaveReport> Save(comm::Comm& comm, convert::Input& input, const SaveRequest& options,
                        Sink& sink) {
  const save::Job job{comm, input, options, sink};
  SW_TRY_ASSIGN(const save::Subject subject, save::Understand(job));
  SW_TRY(comm.Agree(save::CheckK(job, subject.model)));
  SW_TRY_ASSIGN(save::Base base, save::FindBase(job, subject));
  SW_TRY_ASSIGN(const save::Chosen chosen, comm.Agree(save::Choose(job, subject, nullptr, &base)));
  SW_TRY_ASSIGN(const save::Blobs blobs, comm.Agree(save::ListBlobs(job, subject, base, chosen)));
  SaveReport report = save::ReportOf(subject, base, chosen, blobs);
  if (options.dry_run) return report;
  SW_TRY_ASSIGN(const save::Written written, save::Write(job, subject, chosen, blobs, &base));
  report.written_bytes = written.bytes;
  report.blobs_written = written.blobs;
  report.blobs_unchanged = written.blobs_unchanged;
  report.blobs_restored = written.blobs_restored;
  report.text_bytes = written.text_bytes;
  report.members_verified = written.members_verified;
  report.members_in_part = written.members_in_part;
  return report;
}

Result<SnapshotChoice> ChooseSnapshot(comm::Comm& comm, convert::Input& input,
                                      const SaveRequest& options, const SelectionState* level,
                                      Sink& sink) {
  SaveRequest look = options;
  look.dry_run = true;
  const save::Job job{comm, input, look, sink};
  SW_TRY_ASSIGN(save::Subject subject, save::Understand(job));
  SW_TRY_ASSIGN(save::Base base, save::FindBase(job, subject));
  SW_TRY_ASSIGN(save::Chosen chosen, comm.Agree(save::Choose(job, subject, level, &base)));
  SnapshotChoice choice;
  choice.iteration = subject.iteration;
  choice.keep = base.keep;
  choice.model = std::move(subject.model);
  choice.selection = std::move(chosen.selection.snapshot);
  choice.k_snapshot = chosen.k_snapshot;
  choice.k_persist = chosen.k_persist;
  choice.state = std::move(chosen.state);
  choice.map = std::move(chosen.map);
  return choice;
}

}  // namespace shardwright::partial
