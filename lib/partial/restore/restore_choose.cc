// SPDX-License-Identifier: Apache-2.0
// The first half of a restore: chooses the checkpoint, and the version of every module.

#include <algorithm>
#include <utility>

#include "checkpoints/registry.h"
#include "partial/restore/restore_internal.h"

namespace shardwright::partial::restore {
namespace {

/// Returns true if two checkpoints have different content for the same version of a module.
bool Contradict(const Manifest& a, const Manifest& b) {
  if (a.names != b.names) return false;  // of another model, which fails later
  for (std::size_t i = 0; i < a.modules.size(); ++i) {
    for (std::size_t c = 0; c < kComponents; ++c) {
      const std::optional<StoredComponent>& one = a.modules[i][c];
      const std::optional<StoredComponent>& other = b.modules[i][c];
      if (one && other && one->version == other->version &&
          one->blob.digest != other->blob.digest) {
        return true;
      }
    }
  }
  return false;
}

/// Returns the newest usable manifest up to `at`; with allow_older all that can be read.
Result<std::vector<Manifest>> ReadManifests(const Job& job, const Base& base, Checked* checked) {
  const RestoreOptions& options = job.options;
  std::vector<StoredCheckpoint> usable;
  std::uint64_t first = ~std::uint64_t{0};
  for (const StoredCheckpoint& one : base.all) {
    if (one.abandoned) continue;
    first = std::min(first, one.iteration);
    if (!options.at || one.iteration <= *options.at) usable.push_back(one);
  }
  if (usable.empty()) {
    return Fail(Errc::kNotFound, options.store, ": ",
                (first == ~std::uint64_t{0} ? "the store has no checkpoint to restore"
                                            : StrCat("no checkpoint up to iteration ", *options.at,
                                                     "; the first one has iteration ", first)));
  }
  if (options.at && usable.back().iteration != *options.at) {
    job.sink.Warn(StrCat(options.store, ": --at ", *options.at,
                         ": the store has no such iteration; the newest one below it is ",
                         usable.back().iteration));
  }
  if (!options.allow_older) usable.erase(usable.begin(), usable.end() - 1);
  std::vector<Manifest> manifests;
  for (const StoredCheckpoint& one : usable) {
    Result<Manifest> manifest = base.store.ReadManifest(one);
    if (!manifest && options.allow_older) {
      checked->Note(manifest.error());
      continue;
    }
    SW_TRY(manifest);
    manifests.push_back(*std::move(manifest));
  }
  if (manifests.empty()) {
    return Fail(Errc::kBadInput, options.store,
                ": no manifest can be read: ", checked->messages.front());
  }
  return manifests;
}

/// Drops copies of an iteration that was saved again with content different from an agent's,
/// because versions cannot distinguish the two, and a mixture would be inconsistent.
void DropStrangers(const Job& job, Candidates* candidates) {
  std::erase_if(candidates->copies, [&](const AgentCopy& copy) {
    const bool stranger =
        std::any_of(candidates->stored.begin(), candidates->stored.end(),
                    [&](const Manifest& stored) { return Contradict(copy.manifest, stored); });
    if (stranger) {
      job.sink.Warn(StrCat(os::ToText(copy.agent->address()), ": iteration ",
                           copy.manifest.iteration, " in memory has other content than in ",
                           job.options.store, "; the restore does not use it"));
    }
    return stranger;
  });
}

/// Reads the description of a checkpoint.
Result<Described> Describe(const Job& job, const Store& store, const std::vector<AgentCopy>& copies,
                           const Manifest& manifest) {
  Described out;
  SW_TRY_ASSIGN(out.input.set, manifest.sequence != 0 ? store.ReadCatalogue(manifest)
                                                      : AskCatalogue(copies, manifest.catalogue));
  SW_TRY_ASSIGN(out.input.patterns, convert::ReadPatterns(job.options.pattern_files));
  SW_TRY_ASSIGN(out.input.checkpoint,
                checkpoints::ReadCheckpoint(out.input.set, out.input.patterns));
  SW_TRY_ASSIGN(out.model, DescribeModel(out.input.checkpoint));
  const Model& model = out.model;
  if (model.fingerprint != store.head().fingerprint ||
      model.modules.size() != manifest.modules.size()) {
    return Fail(Errc::kBadInput, store.CataloguePath(manifest.sequence), ": expected fingerprint ",
                exec::Hex(store.head().fingerprint), ", found ", exec::Hex(model.fingerprint));
  }
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    if (model.modules[i].name == manifest.names[i]) continue;
    return Fail(Errc::kBadInput, store.CataloguePath(manifest.sequence), ": module ", i, " is ",
                model.modules[i].name, ", but the manifest has ", manifest.names[i]);
  }
  return out;
}

/// Returns true if a checkpoint has these components of a module intact and of one version.
bool IsUsable(const StoredModule& held, const Module& module, const Mask& mask,
              std::uint64_t version, const Checked& checked) {
  for (std::size_t c = 0; c < kComponents; ++c) {
    if (!mask[c]) continue;
    if (!held[c] || held[c]->version != version || checked.damaged.contains(held[c]->blob.digest) ||
        held[c]->blob.bytes != module.parts[c].bytes) {
      return false;
    }
  }
  return true;
}

/// Returns the versions of a checkpoint with all blobs present and intact.
std::vector<StoredCopy> VersionsIn(const Manifest& manifest, const Model& model, const Mask& keep,
                                   const Checked& checked) {
  std::vector<StoredCopy> versions;
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    const Module& module = model.modules[i];
    for (const auto& [part, mask] : PartsOf(module, keep)) {
      const auto first = std::find(mask.begin(), mask.end(), true) - mask.begin();
      if (first == static_cast<std::ptrdiff_t>(kComponents)) continue;
      const std::optional<StoredComponent>& held =
          manifest.modules[i][static_cast<std::size_t>(first)];
      if (!held || !IsUsable(manifest.modules[i], module, mask, held->version, checked)) continue;
      ModuleId id = module.id;
      id.part = part;
      versions.push_back({id, held->version});
    }
  }
  return versions;
}

/// Returns all modules with their parts as needs of one node, because it reads everything.
std::vector<Need> NeedsOf(const Model& model, const Mask& keep) {
  std::vector<Need> needs;
  for (const Module& module : model.modules) {
    for (const auto& [part, mask] : PartsOf(module, keep)) {
      Need need;
      need.module = module.id;
      need.module.part = part;
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (mask[c]) need.bytes += module.parts[c].bytes;
      }
      needs.push_back(need);
    }
  }
  return needs;
}

Result<RecoveryPlan> MakePlan(const Job& job, const Base& base,
                              const std::optional<Restart>& restart, const Candidates& candidates,
                              const Model& model) {
  const Mask& keep = base.store.head().keep;
  RecoveryInput input;
  for (const Manifest& manifest : candidates.stored) {
    const std::vector<StoredCopy> versions = VersionsIn(manifest, model, keep, candidates.checked);
    input.storage.insert(input.storage.end(), versions.begin(), versions.end());
  }
  for (const AgentCopy& copy : candidates.copies) {
    if (copy.manifest.names != candidates.stored.back().names) {
      return Fail(Errc::kMismatch, os::ToText(copy.agent->address()), ": iteration ",
                  copy.manifest.iteration, " in memory is from another model than the store ",
                  job.options.store);
    }
    for (const StoredCopy& one : VersionsIn(copy.manifest, model, keep, candidates.checked)) {
      input.memory.push_back({copy.node, one.module, one.version});
    }
    input.nodes = std::max(input.nodes, copy.node + 1);
  }
  std::sort(input.storage.begin(), input.storage.end());
  input.storage.erase(std::unique(input.storage.begin(), input.storage.end()), input.storage.end());
  input.needs = NeedsOf(model, keep);
  RecoveryOptions recovery;
  recovery.at = job.options.at;
  // Agents have persisted their checkpoints; only a dry run reads state that is only in memory.
  if (!candidates.copies.empty() && !job.options.write.dry_run) {
    recovery.at = candidates.stored.back().iteration;
  }
  recovery.kept_parts = std::any_of(input.needs.begin(), input.needs.end(), [](const Need& need) {
    return need.module.part != Part::kWhole;
  });
  if (restart) recovery.restart_missing = restart->iteration;
  return PlanRecovery(input, recovery);
}

/// Source of a module or a part of it: `held` of the store, or of an agent.
struct Origin {
  const StoredModule* held = nullptr;          ///< null: no source has it
  std::shared_ptr<AgentClient> agent;          ///< null: the store
  std::optional<std::uint64_t> replayed_from;  ///< as ChosenModule
};

/// Finds the source of a version in the plan: an agent of that
/// node, or the store's newest checkpoint with an intact copy.
Origin FindVersion(const Candidates& candidates, const Module& module, std::size_t index,
                   const Mask& mask, const Restore& restore) {
  const auto usable = [&](const Manifest& manifest) {
    return IsUsable(manifest.modules[index], module, mask, restore.version, candidates.checked);
  };
  if (restore.source != Source::kStorage) {
    const std::uint32_t node = restore.source == Source::kLocalMemory ? 0 : restore.from;
    for (const AgentCopy& copy : candidates.copies) {
      if (copy.node == node && usable(copy.manifest)) {
        const auto replayed = copy.replayed.find(module.name);
        return {&copy.manifest.modules[index], copy.agent,
                replayed == copy.replayed.end() ? std::nullopt : std::optional(replayed->second)};
      }
    }
  }
  for (auto manifest = candidates.stored.rbegin(); manifest != candidates.stored.rend();
       ++manifest) {
    if (usable(*manifest)) return {&manifest->modules[index], nullptr, std::nullopt};
  }
  return {};
}

/// Takes every module from the source in the plan.
Result<std::vector<ChosenModule>> TakeModules(const RecoveryPlan& plan, const Mask& keep,
                                              const Candidates& candidates, const Model& model) {
  std::vector<ChosenModule> modules(model.modules.size());
  for (const Restore& restore : plan.restores) {
    const std::size_t index = model.index_of(restore.module);
    ChosenModule& chosen = modules[index];
    if (restore.source == Source::kRestart) {
      chosen.restarted = true;
      continue;
    }
    for (const auto& [part, mask] : PartsOf(model.modules[index], keep)) {
      if (part != restore.module.part) continue;
      const Origin from = FindVersion(candidates, model.modules[index], index, mask, restore);
      if (from.held == nullptr) {
        return Fail(Errc::kInternal, Name(restore.module), ": internal error: version ",
                    restore.version, " was planned and is missing");
      }
      chosen.source = std::max(chosen.source, restore.source);
      if (from.replayed_from) chosen.replayed_from = from.replayed_from;
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (!mask[c]) continue;
        chosen.held[c] = (*from.held)[c];
        chosen.agent[c] = from.agent;
      }
    }
  }
  // An expert restarts as a whole.
  for (ChosenModule& chosen : modules) {
    if (!chosen.restarted) continue;
    chosen = {};
    chosen.restarted = true;
    chosen.source = Source::kRestart;
  }
  return modules;
}

/// Checks sizes, and digests too with allow_older, because it can use an older version.
/// \param payloads  as VerifyBlob
Status CheckBlob(const Job& job, const Store& store, const BlobRef& ref,
                 const std::vector<std::uint64_t>& payloads) {
  const std::string path = store.BlobPath(ref);
  if (job.options.allow_older) return VerifyBlob(path, ref, payloads);
  SW_TRY(FindBlob(path, ref));
  return {};
}

/// Checks each chosen blob of the store once.
/// \returns true if all are usable; the others are recorded in Checked
/// \error kBadInput  damage, without allow_older
Result<bool> CheckModules(const Job& job, const Store& store, const Model& model,
                          const std::vector<ChosenModule>& modules, Checked* checked) {
  bool good = true;
  for (std::size_t i = 0; i < modules.size(); ++i) {
    for (const Component component : kAllComponents) {
      const std::optional<StoredComponent>& held = modules[i].of(component);
      if (!held || modules[i].agent[static_cast<std::size_t>(component)] != nullptr) continue;
      if (checked->good.contains(held->blob.digest)) continue;
      std::vector<std::uint64_t> payloads;
      for (const ModuleTensor& one : model.modules[i].part(component).tensors) {
        payloads.push_back(one.bytes);
      }
      Status status = CheckBlob(job, store, held->blob, payloads);
      if (status) {
        checked->good.insert(held->blob.digest);
        continue;
      }
      status = Within(model.modules[i].name + " " + std::string(Name(component)),
                      std::move(status).error());
      if (!job.options.allow_older) {
        status.error().message += "; --allow-older uses the previous version instead";
        return tl::unexpected<Error>(std::move(status).error());
      }
      checked->Note(status.error());
      checked->damaged.insert(held->blob.digest);
      good = false;
    }
  }
  return good;
}

/// Checks the blob of passed tensors, which belongs to no module.
Status CheckRest(const Job& job, const Store& store, const Manifest& manifest,
                 const checkpoints::Checkpoint& checkpoint) {
  if (!manifest.passed || manifest.sequence == 0) return {};
  std::vector<std::uint64_t> payloads;
  for (const std::uint32_t member : PassedMembers(checkpoint)) {
    payloads.push_back(checkpoint.map.members[member].bytes);
  }
  return CheckBlob(job, store, *manifest.passed, payloads);
}

/// Returns the manifest of X, from the store if it has one; null: there is none.
Manifest* ManifestOf(std::uint64_t iteration, Candidates* candidates) {
  for (auto one = candidates->stored.rbegin(); one != candidates->stored.rend(); ++one) {
    if (one->iteration == iteration) return &*one;
  }
  for (AgentCopy& copy : candidates->copies) {
    if (copy.manifest.iteration == iteration) return &copy.manifest;
  }
  return nullptr;
}

}  // namespace

void Checked::Note(const Error& error) {
  if (std::find(messages.begin(), messages.end(), error.message) == messages.end()) {
    messages.push_back(error.message);
  }
}

Result<Candidates> FindCandidates(const Job& job, const Base& base, std::vector<AgentCopy> copies) {
  Candidates candidates;
  SW_TRY_ASSIGN(candidates.copies, NotGivenUp(job, base.store, std::move(copies)));
  SW_TRY_ASSIGN(candidates.stored, ReadManifests(job, base, &candidates.checked));
  DropStrangers(job, &candidates);
  return candidates;
}

Result<Chosen> Choose(const Job& job, const Base& base, const std::optional<Restart>& restart,
                      Candidates candidates) {
  const Store& store = base.store;
  std::vector<AgentCopy>& copies = candidates.copies;
  std::vector<Manifest>& stored = candidates.stored;
  Checked& checked = candidates.checked;
  // Skips an unusable checkpoint, if that is allowed.
  const auto give_up = [&](const Manifest& unusable, Error error) -> Status {
    if (!job.options.allow_older) return tl::unexpected<Error>(std::move(error));
    checked.Note(error);
    const std::uint64_t sequence = unusable.sequence;  // copied: it is erased with its checkpoint
    const std::uint64_t iteration = unusable.iteration;
    if (std::erase_if(stored, [&](const Manifest& one) { return one.sequence == sequence; }) == 0) {
      std::erase_if(copies,
                    [&](const AgentCopy& one) { return one.manifest.iteration == iteration; });
    }
    return {};
  };
  while (!stored.empty()) {
    // The newest manifest describes the model; that of X is read when X is known.
    const std::uint64_t newest = stored.back().sequence;
    Result<Described> described = Describe(job, store, copies, stored.back());
    if (!described) {
      SW_TRY(give_up(stored.back(), std::move(described).error()));
      continue;
    }
    Chosen chosen;
    SW_TRY_ASSIGN(chosen.plan, MakePlan(job, base, restart, candidates, described->model));
    SW_TRY_ASSIGN(chosen.modules,
                  TakeModules(chosen.plan, store.head().keep, candidates, described->model));
    SW_TRY_ASSIGN(const bool good,
                  CheckModules(job, store, described->model, chosen.modules, &checked));
    if (!good) continue;
    Manifest* at = ManifestOf(chosen.plan.resume, &candidates);
    if (at == nullptr) {
      return Fail(Errc::kBadInput, job.options.store, ": the manifest of iteration ",
                  chosen.plan.resume, " is missing, but modules have this version");
    }
    if (at->sequence != newest) described = Describe(job, store, copies, *at);
    Status status = described ? CheckRest(job, store, *at, described->input.checkpoint)
                              : Status(tl::unexpected<Error>(described.error()));
    if (!status) {
      SW_TRY(give_up(*at, std::move(status).error()));
      continue;
    }
    chosen.at = std::move(*at);
    chosen.described = *std::move(described);
    chosen.damaged = std::move(checked.messages);
    return chosen;
  }
  return Fail(Errc::kBadInput, job.options.store,
              ": no intact checkpoint found: ", checked.messages.front());
}

bool IsNewer(const StoredCheckpoint& checkpoint, const Chosen& chosen) {
  return chosen.at.sequence == 0 ? checkpoint.iteration > chosen.plan.resume
                                 : checkpoint.sequence > chosen.at.sequence;
}

}  // namespace shardwright::partial::restore
