// The first half of a restore: which checkpoint, and which version of every module.

#include <algorithm>
#include <utility>

#include "pec/restore_internal.h"

namespace shardwright::pec::restore {
namespace {

constexpr std::size_t kNamed = 8;

std::string Join(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size() && i < kNamed; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kNamed) text += ", ... (" + std::to_string(names.size()) + " in all)";
  return text;
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

void Restoring::NoteDamage(const Error& error) {
  if (std::find(report_.damaged.begin(), report_.damaged.end(), error.message) ==
      report_.damaged.end()) {
    report_.damaged.push_back(error.message);
  }
}

/// Reads what a checkpoint says of itself: logical tensors, groups, client state.
Status Restoring::Understand(const Manifest& manifest) {
  SW_TRY_ASSIGN(input_.set, store_->ReadCatalogue(manifest));
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
  const KeptComponents& keep = store_->head().keep;
  const bool in_parts = std::find(keep.begin(), keep.end(), true) != keep.end();
  Mask all;
  for (std::size_t c = 0; c < kComponents; ++c) all[c] = module.parts[c].bytes > 0;
  if (!module.id.is_expert() || !in_parts) return {{Part::kWhole, all}};
  Mask kept{};
  Mask selected{};
  for (std::size_t c = 0; c < kComponents; ++c) (keep[c] ? kept : selected)[c] = all[c];
  std::vector<std::pair<Part, Mask>> parts;
  for (const auto& [part, mask] : {std::pair(Part::kKept, kept), {Part::kSelected, selected}}) {
    if (std::find(mask.begin(), mask.end(), true) != mask.end()) parts.emplace_back(part, mask);
  }
  return parts;
}

/// The versions that a manifest offers: those whose blobs are all there and good.
void Restoring::ListCopies(const Manifest& manifest, RecoveryInput* input) const {
  for (std::size_t i = 0; i < model_.modules.size(); ++i) {
    for (const auto& [part, mask] : PartsOf(model_.modules[i])) {
      std::optional<std::uint64_t> version;
      bool whole = true;
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (!mask[c]) continue;
        const std::optional<Held>& held = manifest.modules[i][c];
        whole = whole && held && !IsDamaged(held->blob) &&
                held->blob.bytes == model_.modules[i].parts[c].bytes &&
                (!version || *version == held->version);
        if (held) version = held->version;
      }
      if (!whole || !version) continue;
      ModuleId id = model_.modules[i].id;
      id.part = part;
      input->storage.push_back({id, *version});
    }
  }
}

Result<RecoveryPlan> Restoring::Plan() const {
  RecoveryInput input;
  for (const Manifest& manifest : manifests_) ListCopies(manifest, &input);
  std::sort(input.storage.begin(), input.storage.end());
  input.storage.erase(std::unique(input.storage.begin(), input.storage.end()), input.storage.end());
  RecoveryOptions recovery;
  recovery.at = options_.at;
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

/// The blobs of a version, of the newest checkpoint that has it in good state.
const HeldModule* Restoring::CopyOf(ModuleId id, std::uint64_t version) const {
  const std::size_t index = id.is_expert()
                                ? model_.expert_module(static_cast<std::size_t>(id.layer),
                                                       static_cast<std::size_t>(id.expert))
                                : static_cast<std::size_t>(id.layer);
  for (const auto& [part, mask] : PartsOf(model_.modules[index])) {
    if (part != id.part) continue;
    for (auto manifest = manifests_.rbegin(); manifest != manifests_.rend(); ++manifest) {
      bool fits = true;
      for (std::size_t c = 0; c < kComponents; ++c) {
        const std::optional<Held>& held = manifest->modules[index][c];
        fits = fits && (!mask[c] || (held && held->version == version && !IsDamaged(held->blob)));
      }
      if (fits) return &manifest->modules[index];
    }
  }
  return nullptr;
}

Status Restoring::TakeChosen(const RecoveryPlan& plan) {
  chosen_.assign(model_.modules.size(), {});
  restarted_.assign(model_.modules.size(), false);
  for (const ModuleVersion& one : plan.versions) {
    const std::size_t index =
        one.module.is_expert() ? model_.expert_module(static_cast<std::size_t>(one.module.layer),
                                                      static_cast<std::size_t>(one.module.expert))
                               : static_cast<std::size_t>(one.module.layer);
    if (std::binary_search(plan.restarted.begin(), plan.restarted.end(), one.module)) {
      restarted_[index] = true;
      continue;
    }
    const HeldModule* copy = CopyOf(one.module, one.version);
    if (copy == nullptr) {
      return Fail(Errc::kInternal, Name(one.module) + ": version " + std::to_string(one.version) +
                                       " was planned and is not there");
    }
    for (const auto& [part, mask] : PartsOf(model_.modules[index])) {
      if (part != one.module.part) continue;
      for (std::size_t c = 0; c < kComponents; ++c) {
        if (mask[c]) chosen_[index][c] = (*copy)[c];
      }
    }
  }
  // An expert that starts again does so as a whole.
  for (std::size_t i = 0; i < chosen_.size(); ++i) {
    if (restarted_[i]) chosen_[i] = {};
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
  if (!manifest.passed) return {};
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
      if (!held) continue;
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
    if (restarted_[i]) {
      out.source = Source::kRestart;
      out.version = other_iteration_;
    }
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
      report_.storage_bytes += part.bytes;
      out.parts[c] = part;
    }
    report_.stale_modules += out.version < plan.resume ? 1 : 0;
    report_.restarted_modules += restarted_[i] ? 1 : 0;
    report_.modules.push_back(std::move(out));
  }
  for (const StoredCheckpoint& one : Newer()) report_.abandoned.push_back(one.iteration);
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
                                   std::to_string(report_.iteration) + ": " + Join(names));
}

std::vector<StoredCheckpoint> Restoring::Newer() const {
  std::vector<StoredCheckpoint> newer;
  for (const StoredCheckpoint& one : all_) {
    if (!one.abandoned && one.sequence > report_.sequence) newer.push_back(one);
  }
  return newer;
}

}  // namespace shardwright::pec::restore
