// SPDX-License-Identifier: Apache-2.0
// The middle of a restore: the checkpoint of X with a shard map that refers to blobs.

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/exec/gather.h"
#include "engine/exec/integrity.h"
#include "engine/layout/cut.h"
#include "engine/layout/states.h"
#include "partial/restore/restore_internal.h"

namespace shardwright::partial::restore {
namespace {

/// Cache for computed ranges of parameters per thread, minimum and maximum. Units
/// arrive in the order of parameters, so few ranges are needed again later.
constexpr std::uint64_t kLeastReplayBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kMostReplayBytes = std::uint64_t{32} << 20;

layout::LogicalTensor Whole(const layout::LogicalTensor& tensor, std::uint32_t array) {
  layout::LogicalTensor out{tensor.name, tensor.state, tensor.dtype, tensor.shape, {}};
  layout::Fragment whole;
  whole.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(tensor.shape));
  whole.at.array = array;
  out.fragments.push_back(std::move(whole));
  return out;
}

/// Returns the name of a module's component in messages and reports.
std::string NameOf(const Module& module, Component component) {
  return module.name + " " + std::string(Name(component));
}

/// Opens a blob from the memory of an agent, or from the store.
/// \param agent  null: the store
Result<BlobSource> OpenBlob(const Store& store, const std::shared_ptr<AgentClient>& agent,
                            const BlobRef& blob) {
  if (agent == nullptr) return FindBlob(store.BlobPath(blob), blob);
  BlobSource file;
  file.path = os::ToText(agent->address());
  file.remote = [agent, digest = blob.digest](std::uint64_t offset, std::span<std::byte> out) {
    return agent->Read(digest, offset, out);
  };
  return file;
}

/// Adds the files of blobs to a map, and a member for the blob.
/// \returns the number of the member
Result<std::uint32_t> AddBlob(const Store& store, const ChosenModule& chosen, const Module& module,
                              Component component, BlobMap* out) {
  const StoredComponent& held = *chosen.of(component);
  SW_TRY_ASSIGN(BlobSource file,
                OpenBlob(store, chosen.agent[static_cast<std::size_t>(component)], held.blob));
  const auto member = static_cast<std::uint32_t>(out->map.members.size());
  out->map.members.push_back({static_cast<std::uint32_t>(out->files.size()), 0, held.blob.bytes,
                              held.blob.crc32,
                              StrCat(NameOf(module, component), " of iteration ", held.version)});
  out->map.files.push_back(file.path);
  out->files.push_back(std::move(file));
  return member;
}

/// Marks a member as computed: its bytes are those of its blob after replay to X.
void Replay(const std::shared_ptr<const ReplayedModule>& replayed, const ChosenModule& chosen,
            const ModulePart& part, Component component, std::uint64_t resume, std::uint32_t member,
            BlobMap* out) {
  out->map.members[member].crc32.reset();
  out->map.members[member].name += StrCat(", replayed to iteration ", resume);
  ReplayedMember one{replayed, component, chosen.of(component)->blob, {}};
  for (const ModuleTensor& tensor : part.tensors) one.payloads.push_back(tensor.bytes);
  out->replayed.emplace(member, std::move(one));
}

/// Adds one member for each chosen blob, with one array for each tensor in it.
Status AddBlobs(const Store& store, const Chosen& chosen, const Replays& replays, BlobMap* out) {
  const Model& model = chosen.described.model;
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    const Module& module = model.modules[i];
    const ChosenModule& from = chosen.modules[i];
    if (from.restarted) continue;
    for (const Component component : kAllComponents) {
      const bool stored = from.of(component).has_value();
      std::uint32_t member = 0;
      if (stored) {
        SW_TRY_ASSIGN(member, AddBlob(store, from, module, component, out));
      }
      const auto& replayed = replays.of(i);
      if (stored && replayed != nullptr && replayed->makes(component)) {
        Replay(replayed, from, module.part(component), component, chosen.plan.resume, member, out);
      }
      const bool rounded =
          component == Component::kWeights && RoundsMaster(from, replayed, chosen.plan.resume);
      for (const ModuleTensor& one : module.part(component).tensors) {
        const layout::LogicalTensor& tensor =
            chosen.described.input.checkpoint.map.tensors[one.tensor];
        if (rounded && tensor.state == layout::kWeight) continue;
        const std::uint64_t elems = Elems(tensor.shape);
        if (!stored && elems > 0) {
          return Fail(Errc::kInternal, NameOf(module, component),
                      ": internal error: chosen without a blob");
        }
        const auto array = static_cast<std::uint32_t>(out->map.arrays.size());
        out->map.arrays.push_back({tensor.dtype, {{member, one.offset, elems}}});
        out->map.tensors.push_back(Whole(tensor, array));
      }
    }
  }
  return {};
}

/// Adds passed members under the numbers that the checkpoint's documents use.
Status AddPassed(const Store& store, const Chosen& chosen, BlobMap* out) {
  const Manifest& at = chosen.at;
  const checkpoints::Checkpoint& checkpoint = chosen.described.input.checkpoint;
  const std::vector<std::uint32_t> members = PassedMembers(checkpoint);
  std::uint64_t bytes = 0;
  for (const std::uint32_t member : members) bytes += checkpoint.map.members[member].bytes;
  const std::uint64_t stored = at.passed ? at.passed->bytes : 0;
  if (bytes != stored) {
    return Fail(Errc::kBadInput, store.ManifestPath({at.sequence, at.iteration, false}),
                ": expected ", bytes, " bytes of client state, found ", stored);
  }
  // Reserve every number: members without a blob are never read.
  out->map.members.assign(checkpoint.map.members.size(), layout::Member{});
  for (layout::Member& member : out->map.members) member.name = "not stored";
  BlobSource file{"none", {}, false, {}};
  // Checkpoints in memory are used only in dry runs.
  if (!members.empty() && at.sequence != 0) {
    SW_TRY_ASSIGN(file, FindBlob(store.BlobPath(*at.passed), *at.passed));
  }
  out->map.files.push_back(file.path);
  out->files.push_back(std::move(file));
  std::uint64_t offset = 0;
  for (const std::uint32_t member : members) {
    const layout::Member& from = checkpoint.map.members[member];
    out->map.members[member] = {0, offset, from.bytes, from.crc32, from.name};
    offset += from.bytes;
  }
  return {};
}

/// Adds experts without any version from another checkpoint of the same model.
/// \param path  of the other checkpoint, for messages
Status AddRestarted(const checkpoints::Checkpoint& other, const std::string& path,
                    const Chosen& chosen, layout::ShardMap* map) {
  const layout::ShardMap& from = other.map;
  const auto first_file = static_cast<std::uint32_t>(map->files.size());
  const auto first_member = static_cast<std::uint32_t>(map->members.size());
  const auto first_array = static_cast<std::uint32_t>(map->arrays.size());
  map->files.insert(map->files.end(), from.files.begin(), from.files.end());
  for (layout::Member member : from.members) {
    member.file += first_file;
    map->members.push_back(std::move(member));
  }
  for (layout::Array array : from.arrays) {
    for (layout::Region& region : array.regions) region.member += first_member;
    map->arrays.push_back(std::move(array));
  }
  const layout::TensorIndex index(from);
  const Model& model = chosen.described.model;
  for (std::size_t i = 0; i < model.modules.size(); ++i) {
    if (!chosen.modules[i].restarted) continue;
    for (const ModulePart& part : model.modules[i].parts) {
      for (const ModuleTensor& one : part.tensors) {
        const layout::LogicalTensor& wanted =
            chosen.described.input.checkpoint.map.tensors[one.tensor];
        const auto found = index.Find(wanted.name, wanted.state);
        if (!found) {
          return Fail(Errc::kMismatch, path, ": tensor \"", wanted.name, "\" ", wanted.state,
                      " is missing");
        }
        layout::LogicalTensor tensor = from.tensors[*found];
        for (layout::Fragment& fragment : tensor.fragments) fragment.at.array += first_array;
        map->tensors.push_back(std::move(tensor));
      }
    }
  }
  return {};
}

os::Fingerprint FingerprintOf(const Chosen& chosen, const std::optional<Restart>& restart,
                              const Replays& replays) {
  exec::DigestStream digest;
  for (const ChosenModule& module : chosen.modules) {
    for (const std::optional<StoredComponent>& held : module.held) {
      if (held) digest.Add(std::as_bytes(std::span(held->blob.digest)));
    }
  }
  digest.Add(std::as_bytes(std::span(chosen.at.catalogue)));
  if (restart) digest.Add(restart->input->fingerprint);
  for (const auto& module : replays.modules) {
    if (module == nullptr) continue;
    for (const LogLink& link : module->chain) {
      for (const LogLink::Piece& piece : link.pieces) {
        digest.Add(std::as_bytes(std::span(piece.piece->digest)));
      }
    }
  }
  const exec::Digest sum = digest.Finish();
  os::Fingerprint fingerprint{};
  std::memcpy(fingerprint.data(), sum.data(), sum.size());
  return fingerprint;
}

}  // namespace

Result<BlobMap> MapBlobs(const Job& job, const Base& base, const std::optional<Restart>& restart,
                         const Chosen& chosen, const Replays& replays) {
  BlobMap out;
  SW_TRY(AddPassed(base.store, chosen, &out));
  SW_TRY(AddBlobs(base.store, chosen, replays, &out));
  out.first_other = static_cast<std::uint32_t>(out.map.members.size());
  if (restart) {
    SW_TRY(AddRestarted(restart->input->checkpoint, job.options.restart_missing, chosen, &out.map));
  }
  out.fingerprint = FingerprintOf(chosen, restart, replays);
  return out;
}

std::unique_ptr<convert::Input> SourceOf(const Job& job, convert::Input described, BlobMap blobs,
                                         const std::optional<Restart>& restart,
                                         const Replays& replays) {
  auto source = std::make_unique<convert::Input>(std::move(described));
  source->fingerprint = blobs.fingerprint;
  // The checkpoint's files are gone or of another iteration: outputs must not link to them.
  for (checkpoints::SourceFile& file : source->set.files) file.path.clear();
  source->checkpoint.map = std::move(blobs.map);
  source->checkpoint.proved = false;
  source->bytes =
      std::make_unique<StoreBytes>(source->checkpoint.map, blobs.files, blobs.first_other,
                                   restart ? restart->input->bytes.get() : nullptr);
  if (blobs.replayed.empty()) return source;
  const convert::ConvertOptions& write = job.options.write;
  const std::uint64_t workspaces = write.threads * exec::kWorkspaceBytes;
  const std::uint64_t rest = write.memory_bytes - std::min(write.memory_bytes, workspaces);
  const std::uint64_t room =
      std::clamp(rest, write.threads * kLeastReplayBytes, write.threads * kMostReplayBytes);
  source->bytes =
      std::make_unique<ReplayBytes>(std::move(source->bytes), source->checkpoint.map, replays.log,
                                    std::move(blobs.replayed), write.threads, room);
  return source;
}

}  // namespace shardwright::partial::restore
