// SPDX-License-Identifier: Apache-2.0
#include "partial/store/collect.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>

#include "partial/store/read_blobs.h"
#include "support/os/dir.h"
#include "support/os/file.h"
#include "support/os/lock.h"

namespace shardwright::partial {
namespace {

constexpr std::string_view kPacked = ".zst";

std::optional<exec::Digest> DigestIn(std::string_view text) {
  exec::Digest digest{};
  if (text.size() != 2 * digest.size()) return std::nullopt;
  for (std::size_t i = 0; i < digest.size(); ++i) {
    std::uint8_t byte = 0;
    const char* const first = text.data() + 2 * i;
    const auto [end, error] = std::from_chars(first, first + 2, byte, 16);
    if (error != std::errc() || end != first + 2) return std::nullopt;
    digest[i] = byte;
  }
  return digest;
}

template <class Visit>
void ForBlobs(const Manifest& manifest, Visit&& visit) {
  for (std::size_t i = 0; i < manifest.modules.size(); ++i) {
    for (const auto& held : manifest.modules[i]) {
      if (held) visit(held->blob, manifest.names[i]);
    }
  }
  if (manifest.passed) visit(*manifest.passed, "client state");
}

/// Splits the checkpoints into kept and removed ones.
/// \param restored  checkpoint of an unconfirmed restore, which is kept
/// \returns the newest one that is not abandoned, if any
std::optional<StoredCheckpoint> Sort(const std::vector<StoredCheckpoint>& checkpoints,
                                     const Retention& retention,
                                     std::optional<std::uint64_t> restored, Collected* out) {
  std::optional<StoredCheckpoint> newest;
  std::uint64_t kept = 0;
  for (auto one = checkpoints.rbegin(); one != checkpoints.rend(); ++one) {
    const bool stays =
        !one->abandoned && (!newest || kept < retention.keep_last || one->sequence == restored ||
                            (retention.keep_every && one->iteration % *retention.keep_every == 0));
    if (stays && !newest) newest = *one;
    kept += one->abandoned ? 0 : 1;
    (stays ? out->kept : out->removed).push_back(*one);
  }
  std::reverse(out->kept.begin(), out->kept.end());
  std::reverse(out->removed.begin(), out->removed.end());
  return newest;
}

/// Checks that the newest checkpoint is complete, because it may become the only one.
Status CheckWhole(const Store& store, const Manifest& manifest) {
  SW_TRY(store.ReadCatalogue(manifest));
  Status whole;
  ForBlobs(manifest, [&](const BlobRef& ref, const std::string& what) {
    if (!whole) return;
    if (auto found = FindBlob(store.BlobPath(ref), ref); !found) {
      whole = Within(what, std::move(found).error());
    }
  });
  if (whole) return {};
  return Fail(
      Errc::kMismatch, store.path(),
      ": nothing is removed, because the newest checkpoint is damaged: ", whole.error().message);
}

std::uint64_t OldestVersion(const Manifest& manifest) {
  std::uint64_t oldest = manifest.iteration;
  for (const StoredModule& module : manifest.modules) {
    for (const auto& held : module) {
      if (held) oldest = std::min(oldest, held->version);
    }
  }
  return oldest;
}

}  // namespace

Result<std::vector<BlobFile>> Store::ListBlobs(std::vector<std::string>* others) const {
  std::vector<BlobFile> out;
  SW_TRY_ASSIGN(const std::vector<os::Entry> folders, os::ListDir(path_ + "/blobs"));
  for (const os::Entry& folder : folders) {
    const std::string path = path_ + "/blobs/" + folder.name;
    SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path));
    for (const os::Entry& entry : entries) {
      std::string_view name = entry.name;
      const bool zstd = name.ends_with(kPacked);
      if (zstd) name.remove_suffix(kPacked.size());
      const auto digest = DigestIn(name);
      if (!digest || !name.starts_with(folder.name)) {
        // NFS and FUSE keep a removed file that a program has open under such a name.
        if (entry.name.starts_with('.')) continue;
        if (others == nullptr) {
          return Fail(Errc::kBadInput, path, "/", entry.name, ": not the name of a blob");
        }
        others->push_back(path + "/" + entry.name);
        continue;
      }
      out.push_back({*digest, zstd});
    }
  }
  return out;
}

Result<Collected> CollectGarbage(const std::string& path, const Retention& retention, bool dry_run,
                                 const StopCheck& stop, bool take_over) {
  SW_TRY_ASSIGN(const Store store, Store::Open(path));
  os::Lock lock;
  if (!dry_run) {
    SW_TRY_ASSIGN(lock, store.LockForWriting("pec-save gc", take_over));
  }
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> checkpoints, store.List());
  Collected out;
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> pending, store.Pending());
  const auto restored = pending ? std::optional(pending->manifest) : std::nullopt;
  const std::optional<StoredCheckpoint> newest = Sort(checkpoints, retention, restored, &out);
  if (!newest)
    return Fail(Errc::kNotFound, path, ": the store has no checkpoint; nothing is removed");
  std::set<BlobFile> used;
  out.oldest_version = newest->iteration;
  for (const StoredCheckpoint& one : out.kept) {
    SW_TRY(CheckStop(stop));
    SW_TRY_ASSIGN(const Manifest manifest, store.ReadManifest(one));
    out.oldest_version = std::min(out.oldest_version, OldestVersion(manifest));
    if (one == *newest) SW_TRY(CheckWhole(store, manifest));
    ForBlobs(manifest, [&](const BlobRef& ref, const std::string&) {
      used.insert({ref.digest, ref.zstd});
    });
  }
  SW_TRY_ASSIGN(const std::vector<BlobFile> there, store.ListBlobs());
  std::vector<BlobFile> garbage;
  for (const BlobFile& blob : there) {
    if (used.contains(blob)) continue;
    SW_TRY(CheckStop(stop));
    SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(store.BlobPath(blob)));
    SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
    out.bytes_removed += identity.bytes;
    garbage.push_back(blob);
  }
  out.blobs_removed = garbage.size();
  out.blobs_kept = there.size() - garbage.size();
  if (dry_run) return out;
  // A collection that was suspended must not remove blobs that another node's save has found.
  constexpr std::uint64_t kChecked = 32;
  std::uint64_t removed = 0;
  SW_TRY(store.Remove(out.removed, garbage, [&]() -> Status {
    SW_TRY(CheckStop(stop));
    return removed++ % kChecked == 0 ? lock.Check() : Status();
  }));
  SW_TRY(lock.Release());
  return out;
}

}  // namespace shardwright::partial
