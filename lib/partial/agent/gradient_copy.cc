// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/gradient_copy.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "checkpoints/open_source.h"
#include "checkpoints/registry.h"
#include "convert/input.h"
#include "partial/agent/agent_protocol.h"
#include "partial/store/store.h"
#include "support/base/text.h"

namespace shardwright::partial {
namespace {

/// Returns the common version of the blobs of a module; nullopt: different versions, or no blobs.
std::optional<std::uint64_t> OneVersion(const StoredModule& module) {
  for (const auto& part : module) {
    if (part) return IsAllOf(module, part->version) ? std::optional(part->version) : std::nullopt;
  }
  return std::nullopt;
}

/// Returns the bytes of the different blobs of a module. In float32, master and weights are one.
std::uint64_t StateBytes(const StoredModule& module) {
  std::set<exec::Digest> counted;
  std::uint64_t bytes = 0;
  for (const auto& part : module) {
    if (part && counted.insert(part->blob.digest).second) bytes += part->blob.bytes;
  }
  return bytes;
}

template <class Records>
std::uint64_t GradientBytes(const Records& records) {
  std::uint64_t bytes = 0;
  for (const auto& one : records) bytes += one->payload.bytes;
  return bytes;
}

/// Returns true if two versions of a module have blobs of the same sizes, those of its tensors.
bool SameParts(const Module& module, const StoredModule& older, const StoredModule& newer) {
  return std::ranges::all_of(kAllComponents, [&](Component component) {
    const auto& from = older[static_cast<std::size_t>(component)];
    const auto& to = newer[static_cast<std::size_t>(component)];
    const std::uint64_t bytes = module.part(component).bytes;
    if (!from || !to) return !from && !to && bytes == 0;
    return from->blob.bytes == bytes && to->blob.bytes == bytes;
  });
}

}  // namespace

AnnouncedGradients PeerGradients::For(const MemoryCheckpoint& snapshot) {
  const Manifest& manifest = snapshot.manifest;
  if (versions_.empty()) {  // before the copy, so that the next one finds all records since
    std::uint64_t oldest = manifest.iteration;
    for (const StoredModule& one : manifest.modules) {
      oldest = std::min(oldest, OneVersion(one).value_or(oldest));
    }
    logs_.Retain(this, oldest);
    return {};
  }
  std::map<std::string_view, std::vector<std::shared_ptr<const LoggedRecord>>> records;
  for (auto& one : logs_.KeptRecords()) {
    const auto known = versions_.find(one->record.module);
    const std::uint64_t iteration = one->record.iteration;
    if (known == versions_.end() || iteration <= known->second || iteration > manifest.iteration) {
      continue;
    }
    records[known->first].push_back(std::move(one));
  }
  AnnouncedGradients announced;
  for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
    const auto found = records.find(manifest.names[i]);
    if (found == records.end() || !IsAllOf(manifest.modules[i], manifest.iteration) ||
        GradientBytes(found->second) >= StateBytes(manifest.modules[i])) {
      continue;
    }
    for (const auto& one : found->second) announced.text += ToText(one->record) + "\n";
    announced.records.emplace(static_cast<std::uint32_t>(i), std::move(found->second));
  }
  if (announced.text.size() > kAgentTextBytes) return {};
  return announced;
}

void PeerGradients::Sent(const MemoryCheckpoint& snapshot, bool replays) {
  if (!replays) return Failed();
  versions_.clear();
  std::uint64_t oldest = snapshot.manifest.iteration;
  for (std::size_t i = 0; i < snapshot.manifest.modules.size(); ++i) {
    const auto version = OneVersion(snapshot.manifest.modules[i]);
    if (!version) continue;
    versions_[snapshot.manifest.names[i]] = *version;
    oldest = std::min(oldest, *version);
  }
  logs_.Retain(this, oldest);
}

void PeerGradients::Failed() {
  versions_.clear();
  logs_.Retain(this, std::nullopt);
}

Result<std::unique_ptr<CopyReplay>> CopyReplay::Find(const std::string& store,
                                                     const std::vector<std::string>& pattern_files,
                                                     std::shared_ptr<const MemoryCheckpoint> base,
                                                     const MemoryCheckpoint& copy,
                                                     std::string_view announced,
                                                     const std::string& where) {
  std::unique_ptr<CopyReplay> out(new CopyReplay);
  SW_TRY(out->ReadAnnounced(announced, where));
  if (!base) return out;
  SW_TRY_ASSIGN(const bool there, Store::IsStore(store));
  if (!there) return out;
  out->base_ = std::move(base);
  SW_TRY(out->FindModules(store, pattern_files, copy));
  return out;
}

Status CopyReplay::ReadAnnounced(std::string_view announced, const std::string& where) {
  while (!announced.empty()) {
    const std::size_t end = std::min(announced.find('\n'), announced.size());
    auto one = std::make_shared<LoggedRecord>();
    SW_TRY_ASSIGN(one->record, ParseLogRecord(announced.substr(0, end), where));
    for (LogPiece& piece : one->record.pieces) {
      piece.offset = one->payload.bytes;
      one->payload.bytes += piece.bytes;  // at most kLogPieceBytes each
    }
    one->payload.in_memory = true;
    one->path = where;
    announced_[one->record.module].push_back(std::move(one));
    announced.remove_prefix(std::min(end + 1, announced.size()));
  }
  return {};
}

Status CopyReplay::FindModules(const std::string& store,
                               const std::vector<std::string>& pattern_files,
                               const MemoryCheckpoint& copy) {
  SW_TRY_ASSIGN(const Store opened, Store::Open(store));
  SW_TRY_ASSIGN(std::vector<RecoveryRecord> recoveries, opened.RecoveriesAfter(0));
  SW_TRY_ASSIGN(const checkpoints::SourceSet set, checkpoints::DeserializeSource(copy.catalogue));
  SW_TRY_ASSIGN(const checkpoints::Patterns patterns, convert::ReadPatterns(pattern_files));
  SW_TRY_ASSIGN(checkpoint_, checkpoints::ReadCheckpoint(set, patterns));
  SW_TRY_ASSIGN(model_, DescribeModel(checkpoint_));
  if (opened.head().fingerprint != model_.fingerprint) return {};  // Agent::Accept refuses it
  std::vector<std::shared_ptr<const LoggedRecord>> records;
  for (const auto& [module, some] : announced_) {
    records.insert(records.end(), some.begin(), some.end());
  }
  log_.emplace(ReplayLog{GradientLog::Of(records), store + "/logs", std::move(recoveries), {}});
  const Manifest& older = base_->manifest;
  const Manifest& newer = copy.manifest;
  const std::size_t count = model_.modules.size();
  if (older.modules.size() != count || newer.modules.size() != count) return {};
  for (std::uint32_t i = 0; i < count; ++i) {
    const Module& module = model_.modules[i];
    const auto announced = announced_.find(module.name);
    const auto version = OneVersion(older.modules[i]);
    if (announced == announced_.end() || older.names[i] != module.name ||
        newer.names[i] != module.name || !version || *version >= newer.iteration ||
        !IsAllOf(newer.modules[i], newer.iteration) ||
        !SameParts(module, older.modules[i], newer.modules[i]) ||
        GradientBytes(announced->second) >= StateBytes(newer.modules[i])) {
      continue;
    }
    // Without a chain of steps, the receiver requests the state.
    auto found =
        FindReplay(checkpoint_, module, i, older.modules[i], base_->blobs, newer.iteration, &*log_);
    if (!found) continue;
    modules_.insert(i);
    found_.emplace(i, *std::move(found));
  }
  return {};
}

Status CopyReplay::Take(os::Connection& connection, const std::shared_ptr<MemoryPool>& pool,
                        std::uint32_t module, const std::function<bool()>& stop,
                        MemoryCheckpoint* copy) {
  ModuleReplay& one = found_.at(module);
  Records& records = announced_.find(model_.modules[module].name)->second;
  Counted counted(pool);
  for (const auto& record : records) {
    std::vector<std::byte>& stored = record->payload.stored;
    while (stored.size() < record->payload.bytes) {
      const std::size_t at = stored.size();
      const std::size_t count = std::min<std::uint64_t>(kLogSumBytes, record->payload.bytes - at);
      SW_TRY(counted.Grow(count));
      stored.resize(at + count);
      SW_TRY(connection.Receive(std::span(stored).subspan(at)));
    }
  }
  SW_TRY(ReserveReplay(pool, &one));
  LogReads reads(log_->log);
  Status made =
      MakeReplay(model_.modules[module], checkpoint_.map, *log_, reads, pool, stop, &work_, &one);
  one.rooms.clear();
  for (const auto& record : records) record->payload.stored = std::vector<std::byte>();
  if (!made && made.error().code == Errc::kStopped) return made;
  if (!made) return {};  // the receiver requests the state
  const StoredModule& wanted = copy->manifest.modules[module];
  const auto same = [&](std::size_t c) {
    return !wanted[c] || (one.made[c] && one.made[c]->ref() == wanted[c]->blob);
  };
  bool all = true;
  for (std::size_t c = 0; c < kComponents; ++c) all = all && same(c);
  for (std::size_t c = 0; all && c < kComponents; ++c) {
    if (wanted[c]) copy->blobs[wanted[c]->blob.digest] = one.made[c];
  }
  one = ModuleReplay();
  return {};
}

}  // namespace shardwright::partial
