// The first half of a restore: which checkpoint, and which version of every module.

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "pec/restore/restore_internal.h"

namespace shardwright::pec::restore {
namespace {

/// Whether two checkpoints have other content under the same version of a module.
bool Contradict(const Manifest& a, const Manifest& b) {
  if (a.names != b.names) return false;  // of another model, which is refused later
  for (std::size_t i = 0; i < a.modules.size(); ++i) {
    for (std::size_t c = 0; c < kComponents; ++c) {
      const std::optional<Held>& one = a.modules[i][c];
      const std::optional<Held>& other = b.modules[i][c];
      if (one && other && one->version == other->version &&
          one->blob.digest != other->blob.digest) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace

Status Restoring::OpenStore() {
  SW_TRY_ASSIGN(Store store, Store::Open(options_.store));
  store_.emplace(std::move(store));
  SW_TRY_ASSIGN(all_, store_->List());
  return {};
}

/// The newest usable manifest up to `at`; with allow_older all of them.
Status Restoring::ReadManifests() {
  std::vector<StoredCheckpoint> usable;
  std::uint64_t first = ~std::uint64_t{0};
  for (const StoredCheckpoint& one : all_) {
    if (one.abandoned) continue;
    first = std::min(first, one.iteration);
    if (!options_.at || one.iteration <= *options_.at) usable.push_back(one);
  }
  if (usable.empty()) {
    return Fail(Errc::kNotFound,
                options_.store + ": " +
                    (first == ~std::uint64_t{0}
                         ? "no checkpoint to restore"
                         : "no checkpoint up to iteration " + std::to_string(*options_.at) +
                               ", the first is of iteration " + std::to_string(first)));
  }
  if (!options_.allow_older) usable.erase(usable.begin(), usable.end() - 1);
  for (const StoredCheckpoint& one : usable) {
    Result<Manifest> manifest = store_->ReadManifest(one);
    if (!manifest && options_.allow_older) {
      NoteDamage(manifest.error());
      continue;
    }
    SW_TRY(manifest);
    manifests_.push_back(*std::move(manifest));
  }
  if (manifests_.empty()) {
    return Fail(Errc::kBadInput,
                options_.store + ": no manifest can be read: " + report_.damaged.front());
  }
  return {};
}

/// An iteration that was saved again, with other content than an agent has: versions do not tell
/// the two apart, and nobody wants a mixture.
void Restoring::DropStrangers() {
  std::erase_if(copies_, [&](const AgentCopy& copy) {
    const bool stranger =
        std::any_of(manifests_.begin(), manifests_.end(),
                    [&](const Manifest& stored) { return Contradict(copy.manifest, stored); });
    if (stranger) {
      sink_.Warn(os::ToText(agents_[copy.agent]->address()) + ": iteration " +
                 std::to_string(copy.manifest.iteration) + " in memory has other content than in " +
                 options_.store + "; it is not used");
    }
    return stranger;
  });
}

void Restoring::NoteDamage(const Error& error) {
  if (std::find(report_.damaged.begin(), report_.damaged.end(), error.message) ==
      report_.damaged.end()) {
    report_.damaged.push_back(error.message);
  }
}

/// Reads what a checkpoint says of itself: logical tensors, groups, client state.
Status Restoring::Understand(const Manifest& manifest) {
  SW_TRY_ASSIGN(input_.set, CatalogueOf(manifest));
  SW_TRY_ASSIGN(input_.patterns, ucp::ReadPatterns(options_.pattern_files));
  SW_TRY_ASSIGN(input_.checkpoint, dialect::ReadCheckpoint(input_.set, input_.patterns));
  SW_TRY_ASSIGN(model_, DescribeModel(input_.checkpoint));
  if (model_.fingerprint != store_->head().fingerprint ||
      model_.modules.size() != manifest.modules.size()) {
    return Fail(Errc::kBadInput, store_->CataloguePath(manifest.sequence) + ": fingerprint " +
                                     exec::Hex(store_->head().fingerprint) + " expected, found " +
                                     exec::Hex(model_.fingerprint));
  }
  for (std::size_t i = 0; i < model_.modules.size(); ++i) {
    if (model_.modules[i].name == manifest.names[i]) continue;
    return Fail(Errc::kBadInput, store_->CataloguePath(manifest.sequence) + ": module " +
                                     std::to_string(i) + " is " + model_.modules[i].name +
                                     ", in the manifest " + manifest.names[i]);
  }
  return {};
}

std::vector<std::pair<Part, Mask>> Restoring::PartsOf(const Module& module) const {
  return pec::PartsOf(module, store_->head().keep);
}

/// Whether a manifest has these components of a module, all of one version and in good state.
bool Restoring::Holds(const Manifest& manifest, std::size_t index, const Mask& mask,
                      std::uint64_t version) const {
  for (std::size_t c = 0; c < kComponents; ++c) {
    const std::optional<Held>& held = manifest.modules[index][c];
    if (!mask[c]) continue;
    if (!held || held->version != version || IsDamaged(held->blob) ||
        held->blob.bytes != model_.modules[index].parts[c].bytes) {
      return false;
    }
  }
  return true;
}

/// The versions that a manifest offers: those whose blobs are all there and good.
/// \param node  whose memory; absent: the store
void Restoring::ListCopies(const Manifest& manifest, std::optional<std::uint32_t> node,
                           RecoveryInput* input) const {
  for (std::size_t i = 0; i < model_.modules.size(); ++i) {
    for (const auto& [part, mask] : PartsOf(model_.modules[i])) {
      const auto first = std::find(mask.begin(), mask.end(), true) - mask.begin();
      if (first == static_cast<std::ptrdiff_t>(kComponents)) continue;
      const auto& held = manifest.modules[i][static_cast<std::size_t>(first)];
      if (!held || !Holds(manifest, i, mask, held->version)) continue;
      ModuleId id = model_.modules[i].id;
      id.part = part;
      if (node) {
        input->memory.push_back({*node, id, held->version});
      } else {
        input->storage.push_back({id, held->version});
      }
    }
  }
}

Result<RecoveryPlan> Restoring::Plan() const {
  RecoveryInput input;
  for (const Manifest& manifest : manifests_) ListCopies(manifest, std::nullopt, &input);
  for (const AgentCopy& copy : copies_) {
    if (copy.manifest.names != manifests_.back().names) {
      return Fail(Errc::kMismatch, os::ToText(agents_[copy.agent]->address()) +
                                       ": holds iteration " +
                                       std::to_string(copy.manifest.iteration) +
                                       " of another model than " + options_.store);
    }
    ListCopies(copy.manifest, copy.node, &input);
    input.nodes = std::max(input.nodes, copy.node + 1);
  }
  std::sort(input.storage.begin(), input.storage.end());
  input.storage.erase(std::unique(input.storage.begin(), input.storage.end()), input.storage.end());
  RecoveryOptions recovery;
  recovery.at = options_.at;
  // Agents have made durable what they hold; only a dry run looks at what is in memory alone.
  if (!copies_.empty() && !options_.write.dry_run) recovery.at = manifests_.back().iteration;
  for (const Module& module : model_.modules) {
    for (const auto& [part, mask] : PartsOf(module)) {
      Need need;
      need.module = module.id;
      need.module.part = part;
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (mask[c]) need.bytes += module.parts[c].bytes;
      }
      recovery.kept_parts = recovery.kept_parts || part != Part::kWhole;
      input.needs.push_back(need);
    }
  }
  if (other_) recovery.restart_missing = other_iteration_;
  return PlanRecovery(input, recovery);
}

/// The blobs of a version, of the newest checkpoint of the store that has it in good state.
const HeldModule* Restoring::CopyOf(std::size_t index, const Mask& mask,
                                    std::uint64_t version) const {
  for (auto manifest = manifests_.rbegin(); manifest != manifests_.rend(); ++manifest) {
    if (Holds(*manifest, index, mask, version)) return &manifest->modules[index];
  }
  return nullptr;
}

const AgentCopy* Restoring::AgentCopyOf(std::size_t index, const Mask& mask,
                                        const Restore& restore) const {
  const std::uint32_t node = restore.source == Source::kLocalMemory ? 0 : restore.from;
  for (const AgentCopy& copy : copies_) {
    if (copy.node == node && Holds(copy.manifest, index, mask, restore.version)) return &copy;
  }
  return nullptr;
}

/// Takes a module, or a part of it, from where the plan says.
Status Restoring::TakeOne(const ModuleVersion& one, const Restore& restore) {
  const std::size_t index = model_.index_of(one.module);
  if (restore.source == Source::kRestart) {
    restarted_[index] = true;
    return {};
  }
  for (const auto& [part, mask] : PartsOf(model_.modules[index])) {
    if (part != one.module.part) continue;
    const AgentCopy* agent =
        restore.source == Source::kStorage ? nullptr : AgentCopyOf(index, mask, restore);
    const HeldModule* held =
        agent != nullptr ? &agent->manifest.modules[index] : CopyOf(index, mask, one.version);
    if (held == nullptr) {
      return Fail(Errc::kInternal, Name(one.module) + ": version " + std::to_string(one.version) +
                                       " was planned and is not there");
    }
    source_[index] = std::max(source_[index], restore.source);
    for (std::size_t c = 0; c < kComponents; ++c) {
      if (!mask[c]) continue;
      chosen_[index][c] = (*held)[c];
      if (agent != nullptr) from_agent_[index][c] = agent->agent;
    }
  }
  return {};
}

Status Restoring::TakeChosen(const RecoveryPlan& plan) {
  chosen_.assign(model_.modules.size(), {});
  from_agent_.assign(model_.modules.size(), {});
  source_.assign(model_.modules.size(), Source::kLocalMemory);
  restarted_.assign(model_.modules.size(), false);
  // One node needs everything, so that versions and restores are the same list.
  SW_CHECK(plan.versions.size() == plan.restores.size());
  for (std::size_t i = 0; i < plan.versions.size(); ++i) {
    SW_CHECK(plan.versions[i].module == plan.restores[i].module);
    SW_TRY(TakeOne(plan.versions[i], plan.restores[i]));
  }
  // An expert that starts again does so as a whole.
  for (std::size_t i = 0; i < chosen_.size(); ++i) {
    if (!restarted_[i]) continue;
    chosen_[i] = {};
    source_[i] = Source::kRestart;
  }
  return {};
}

/// Sizes always; with allow_older, where a damaged blob has a way out, also digests.
Status Restoring::CheckBlob(std::uint32_t module, Component component, const BlobRef& ref) {
  if (good_.contains(ref.digest)) return {};
  const std::string path = store_->BlobPath(ref);
  Status status;
  if (options_.allow_older) {
    std::vector<std::uint64_t> payloads;
    for (const ModuleTensor& one : model_.modules[module].part(component).tensors) {
      payloads.push_back(one.bytes);
    }
    status = VerifyBlob(path, ref, payloads);
  } else if (const auto found = FindBlob(path, ref); !found) {
    status = tl::unexpected<Error>(found.error());
  }
  if (!status) {
    return Within(model_.modules[module].name + " " + std::string(Name(component)),
                  std::move(status).error());
  }
  good_.insert(ref.digest);
  return {};
}

/// What belongs to no module: the blob of passed tensors.
Status Restoring::CheckRest(const Manifest& manifest) {
  if (!manifest.passed || manifest.sequence == 0) return {};
  const std::string path = store_->BlobPath(*manifest.passed);
  if (!options_.allow_older) {
    SW_TRY(FindBlob(path, *manifest.passed));
    return {};
  }
  std::vector<std::uint64_t> payloads;
  for (const std::uint32_t member : PassedMembers(input_.checkpoint)) {
    payloads.push_back(input_.checkpoint.map.members[member].bytes);
  }
  return VerifyBlob(path, *manifest.passed, payloads);
}

Status Restoring::CheckChosen(bool* again) {
  *again = false;
  for (std::uint32_t i = 0; i < chosen_.size(); ++i) {
    for (const Component component : kAllComponents) {
      const auto& held = chosen_[i][static_cast<std::size_t>(component)];
      if (!held || from_agent_[i][static_cast<std::size_t>(component)]) continue;
      Status status = CheckBlob(i, component, held->blob);
      if (status) continue;
      if (!options_.allow_older) {
        status.error().message += "; --allow-older goes back to the version before";
        return status;
      }
      NoteDamage(status.error());
      damaged_.insert(held->blob.digest);
      *again = true;
    }
  }
  return {};
}

Status Restoring::Choose() {
  SW_TRY(ReadManifests());
  DropStrangers();
  for (;;) {
    // The newest manifest tells what the model is; that of X is understood when X is known.
    if (manifests_.empty()) {
      return Fail(Errc::kBadInput,
                  options_.store + ": no checkpoint is whole: " + report_.damaged.front());
    }
    const auto give_up = [&](std::uint64_t sequence, Status status) -> Status {
      if (!options_.allow_older) return status;
      NoteDamage(status.error());
      std::erase_if(manifests_, [&](const Manifest& one) { return one.sequence == sequence; });
      return {};
    };
    if (Status status = Understand(manifests_.back()); !status) {
      SW_TRY(give_up(manifests_.back().sequence, std::move(status)));
      continue;
    }
    SW_TRY_ASSIGN(plan_, Plan());
    SW_TRY(TakeChosen(plan_));
    bool again = false;
    SW_TRY(CheckChosen(&again));
    if (again) continue;
    at_ = nullptr;
    for (const Manifest& manifest : manifests_) {
      if (manifest.iteration == plan_.resume) at_ = &manifest;
    }
    for (const AgentCopy& copy : copies_) {
      if (at_ == nullptr && copy.manifest.iteration == plan_.resume) at_ = &copy.manifest;
    }
    if (at_ == nullptr) {
      return Fail(Errc::kBadInput, options_.store + ": no manifest of iteration " +
                                       std::to_string(plan_.resume) + " although modules have it");
    }
    const std::uint64_t sequence = at_->sequence;
    Status status = sequence == manifests_.back().sequence ? Status() : Understand(*at_);
    if (status) status = CheckRest(*at_);
    if (status) break;
    SW_TRY(give_up(sequence, std::move(status)));
  }
  DescribeModules(plan_);
  return options_.require_complete ? RefuseStale() : Status();
}

void Restoring::DescribeModules(const RecoveryPlan& plan) {
  report_.iteration = plan.resume;
  report_.sequence = at_->sequence;
  report_.tag = at_->tag;
  report_.layer_id = model_.layer_id;
  dropped_.assign(model_.modules.size(), {});
  for (std::size_t i = 0; i < model_.modules.size(); ++i) {
    RestoredModule out;
    out.name = model_.modules[i].name;
    out.id = model_.modules[i].id;
    out.version = plan.resume;
    out.source = source_[i];
    if (restarted_[i]) out.version = other_iteration_;
    const auto& weights = chosen_[i][static_cast<std::size_t>(Component::kWeights)];
    const auto& master = chosen_[i][static_cast<std::size_t>(Component::kMaster)];
    // A kept master is newer than the weights: rounded it gives the weights of its own version.
    const bool round = weights && master && master->version > weights->version;
    dropped_[i][static_cast<std::size_t>(Component::kWeights)] = round;
    for (std::size_t c = 0; c < kComponents; ++c) {
      if (!chosen_[i][c]) continue;
      RestoredPart part{chosen_[i][c]->version, chosen_[i][c]->blob.bytes, false};
      if (c == static_cast<std::size_t>(Component::kWeights) && round) {
        part = {master->version, 0, true};
      }
      out.version = std::min(out.version, part.version);
      if (!from_agent_[i][c]) {
        report_.storage_bytes += part.bytes;
      } else if (agents_[*from_agent_[i][c]]->address().is_local()) {
        report_.memory_bytes += part.bytes;
      } else {
        report_.peer_bytes += part.bytes;
      }
      out.parts[c] = part;
    }
    report_.stale_modules += out.version < plan.resume ? 1 : 0;
    report_.restarted_modules += restarted_[i] ? 1 : 0;
    report_.modules.push_back(std::move(out));
  }
  for (const StoredCheckpoint& one : all_) {
    if (!one.abandoned && IsNewer(one)) report_.abandoned.push_back(one.iteration);
  }
}

Status Restoring::RefuseStale() const {
  std::vector<std::string> names;
  for (const RestoredModule& module : report_.modules) {
    if (module.version < report_.iteration) {
      names.push_back(module.name + " (" + std::to_string(module.version) + ")");
    }
  }
  if (names.empty()) return {};
  return Fail(Errc::kMismatch, options_.store + ": " + std::to_string(names.size()) +
                                   " modules are older than iteration " +
                                   std::to_string(report_.iteration) + ": " + FirstFew(names));
}

/// Whether a checkpoint came after the one that is restored.
bool Restoring::IsNewer(const StoredCheckpoint& checkpoint) const {
  return report_.sequence == 0 ? checkpoint.iteration > report_.iteration
                               : checkpoint.sequence > report_.sequence;
}

}  // namespace shardwright::pec::restore
