// SPDX-License-Identifier: Apache-2.0
// Adds a checkpoint to a store. A kill between two steps leaves the state before it:
//
//   1 blobs       written and synced in incoming-<run>/ (partial/store/write_blobs.cc)
//   2 names       renamed to their digests; their folders synced
//   3 texts       catalogue and token record written and synced
//   4 manifest    written and synced under a temporary name, renamed; its folder synced
//   5 cleaning    incoming-<run>/ removed
//
// Files of step 2 and 3 without a manifest are garbage that the next collection removes.
// A save that fails after step 3 without being killed removes its texts itself.

#include "partial/store/store.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <utility>

#include "checkpoints/open_source.h"
#include "engine/exec/zpack.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/base/text.h"
#include "support/os/commit.h"
#include "support/os/directory.h"
#include "support/os/fault.h"

namespace shardwright::partial {
namespace {

constexpr const char* kHeadName = "store.json";
constexpr const char* kFolders[] = {"manifests", "catalogues", "tokens", "recoveries", "blobs"};
/// Folders that may have no file although the store has checkpoints. Copies with git, to object
/// storage and with some options of rsync omit them, so a missing one counts as empty.
constexpr const char* kMayBeEmpty[] = {"tokens", "recoveries"};
constexpr std::string_view kIncoming = "incoming-";
constexpr std::uint64_t kCatalogueBytes = std::uint64_t{4} << 30;
constexpr std::uint64_t kManifestBytes = std::uint64_t{1} << 30;

std::string Padded(std::uint64_t number) {
  char text[32];
  std::snprintf(text, sizeof text, "%010llu", static_cast<unsigned long long>(number));
  return text;
}

/// Returns the number in "<number><suffix>"; nullopt for temporary and unknown names.
std::optional<std::uint64_t> NumberBefore(std::string_view name, std::string_view suffix) {
  if (!name.ends_with(suffix)) return std::nullopt;
  return NumberIn<std::uint64_t>(name.substr(0, name.size() - suffix.size()));
}

std::optional<StoredCheckpoint> CheckpointOf(std::string_view name) {
  constexpr std::string_view kSuffix = ".json";
  const std::size_t dash = name.find('-');
  if (dash == std::string_view::npos || !name.ends_with(kSuffix)) return std::nullopt;
  const auto sequence = NumberIn<std::uint64_t>(name.substr(0, dash));
  const auto iteration = NumberBefore(name.substr(dash + 1), kSuffix);
  if (!sequence || !iteration) return std::nullopt;
  return StoredCheckpoint{*sequence, *iteration, false};
}

/// Lists one of kMayBeEmpty.
Result<std::vector<os::Entry>> ListIfThere(const std::string& path) {
  auto entries = os::ListDir(path);
  if (!entries && entries.error().sys == ENOENT) return std::vector<os::Entry>();
  return entries;
}

Result<RecoveryRecord> ReadRecovery(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  return ParseRecovery(text, path);
}

Result<RecoveryRecord> ReadRecoveryHead(const std::string& path) {
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, limits::kJsonBytes));
  return ParseRecoveryHead(text, path);
}

}  // namespace

bool Store::IsOwnName(std::string_view name) {
  return std::find(std::begin(kFolders), std::end(kFolders), name) != std::end(kFolders) ||
         name == "lock" || name.starts_with(kHeadName) || name == kBegunName;
}

Status Store::ExpectOwnNames(const std::string& path) {
  SW_TRY_ASSIGN(const bool folder, os::IsDir(path));
  if (!folder) return Fail(Errc::kBusy, path, ": exists and is not a directory");
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path));
  for (const os::Entry& entry : entries) {
    if (IsOwnName(entry.name)) continue;
    return Fail(Errc::kBusy, path, ": not a store: it contains \"", entry.name, "\"");
  }
  return {};
}

Result<bool> Store::IsStore(const std::string& path) { return os::Exists(path + "/" + kHeadName); }

Result<Store> Store::Open(const std::string& path) {
  SW_TRY_ASSIGN(const bool there, IsStore(path));
  if (!there) {
    SW_TRY(os::ExpectDir(path));
    return Fail(Errc::kNotFound, path, ": no store of partial checkpoints");
  }
  const std::string name = path + "/" + kHeadName;
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(name, limits::kJsonBytes));
  SW_TRY_ASSIGN(StoreHead head, ParseHead(text, name));
  return Store(path, std::move(head));
}

Result<Store> Store::OpenOrCreate(const std::string& path, const StoreHead& head) {
  SW_TRY_ASSIGN(const bool there, os::Exists(path));
  if (there) {
    SW_TRY_ASSIGN(const bool store, IsStore(path));
    if (store) return Open(path);
    SW_TRY(ExpectOwnNames(path));  // a killed creation leaves folders but no head
  }
  SW_TRY_ASSIGN(const os::ParentName split, os::SplitOutput(path));
  for (const char* folder : kFolders) {
    SW_TRY(os::MakeDirs(path + "/" + folder));
  }
  // The head implies that all folders exist, also after a power failure.
  SW_TRY(os::SyncDir(path));
  StoreHead named = head;
  SW_TRY_ASSIGN(named.id, os::MakeRunId());
  // If several processes create the store at the same time, the first one names it.
  const std::string made = path + "/" + kHeadName + "." + named.id;
  SW_TRY(os::ReplaceFile(made, ToText(named)));
  if (const Status renamed = os::RenameNew(made, path + "/" + kHeadName); !renamed) {
    (void)os::RemoveFile(made);
    SW_TRY_ASSIGN(const bool another, IsStore(path));
    if (!another) return tl::unexpected<Error>(renamed.error());
  }
  SW_TRY(os::SyncDir(path));
  SW_TRY(os::SyncDir(split.parent));
  return Open(path);
}

Result<os::Lock> Store::LockForWriting(const std::string& note, bool take_over) const {
  SW_TRY_ASSIGN(os::Lock lock, os::Lock::Take(path_ + "/lock", note, take_over));
  SW_TRY_ASSIGN(const os::Directory folder, os::Directory::Open(path_));
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, folder.List());
  for (const os::Entry& entry : entries) {
    const bool begun = entry.type == os::EntryType::kDir && entry.name.starts_with(kIncoming);
    const bool head = entry.name.starts_with(kHeadName) && entry.name != kHeadName;
    if (!begun && !head) continue;
    // A leftover does no harm: its owner, or the next writer, removes it.
    static_cast<void>(folder.RemoveTree(entry.name).has_value());
  }
  bool made = false;
  for (const char* name : kMayBeEmpty) {
    SW_TRY_ASSIGN(const bool there, os::IsDir(path_ + "/" + name));
    if (there) continue;
    SW_TRY(os::MakeDir(path_ + "/" + name));
    made = true;
  }
  if (made) SW_TRY(os::SyncDir(path_));
  return lock;
}

std::string Store::ManifestPath(const StoredCheckpoint& checkpoint) const {
  return path_ + "/manifests/" + Padded(checkpoint.sequence) + "-" + Padded(checkpoint.iteration) +
         ".json";
}

std::string Store::CataloguePath(std::uint64_t sequence) const {
  return path_ + "/catalogues/" + Padded(sequence) + ".swc";
}

std::string Store::TokensPath(std::uint64_t sequence) const {
  return path_ + "/tokens/" + Padded(sequence) + ".json";
}

std::string Store::BlobPath(const BlobFile& blob) const {
  const std::string hex = exec::Hex(blob.digest);
  return path_ + "/blobs/" + hex.substr(0, 2) + "/" + hex + (blob.zstd ? ".zst" : "");
}

std::string Store::RecoveryPath(std::uint64_t sequence) const {
  return path_ + "/recoveries/" + Padded(sequence) + ".json";
}

Status Store::ForRecoveriesAfter(std::uint64_t sequence, ReadRecord read,
                                 const std::function<Status(RecoveryRecord)>& visit) const {
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, ListIfThere(path_ + "/recoveries"));
  std::set<std::uint64_t> found;
  for (const os::Entry& entry : entries) {
    const auto number = NumberBefore(entry.name, ".json");
    if (number && *number > sequence) found.insert(*number);
  }
  for (const std::uint64_t number : found) {
    SW_TRY_ASSIGN(RecoveryRecord recovery, read(RecoveryPath(number)));
    SW_TRY(visit(std::move(recovery)));
  }
  return {};
}

Result<std::vector<RecoveryRecord>> Store::RecoveriesAfter(std::uint64_t sequence) const {
  std::vector<RecoveryRecord> out;
  SW_TRY(ForRecoveriesAfter(sequence, ReadRecovery, [&](RecoveryRecord recovery) -> Status {
    out.push_back(std::move(recovery));
    return {};
  }));
  return out;
}

Status Store::CheckOwn(const Manifest& manifest, const std::string& what) const {
  if (manifest.store.empty() || head_.id.empty() || manifest.store == head_.id) return {};
  return Fail(Errc::kMismatch, path_, ": is store ", head_.id, ", but ", what, " is of store ",
              Quoted(manifest.store), ", so of another run");
}

Status Store::CheckPast(std::uint64_t recovery, std::uint64_t iteration,
                        const std::string& what) const {
  if (recovery > 0) {
    SW_TRY_ASSIGN(const bool known, os::Exists(RecoveryPath(recovery)));
    if (!known) {
      return Fail(Errc::kNotFound, path_, ": recovery ", recovery, " is missing, but ", what,
                  " was made after it");
    }
  }
  return ForRecoveriesAfter(recovery, ReadRecoveryHead, [&](const RecoveryRecord& one) -> Status {
    if (!GivesUp(one, recovery, iteration)) return {};
    return Fail(Errc::kMismatch, path_, ": ", what, " is of iteration ", iteration,
                ", which was abandoned: it was made before recovery ", one.sequence,
                ", which went back to iteration ", one.resume);
  });
}

Result<std::set<std::uint64_t>> Store::Abandoned() const {
  std::set<std::uint64_t> out;
  SW_TRY(ForRecoveriesAfter(0, ReadRecoveryHead, [&](const RecoveryRecord& recovery) -> Status {
    out.insert(recovery.abandoned.begin(), recovery.abandoned.end());
    return {};
  }));
  return out;
}

Result<std::vector<StoredCheckpoint>> Store::List() const {
  SW_TRY_ASSIGN(const std::set<std::uint64_t> abandoned, Abandoned());
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path_ + "/manifests"));
  std::vector<StoredCheckpoint> out;
  for (const os::Entry& entry : entries) {
    auto checkpoint = CheckpointOf(entry.name);
    if (!checkpoint) continue;
    checkpoint->abandoned = abandoned.contains(checkpoint->sequence);
    out.push_back(*checkpoint);
  }
  std::sort(out.begin(), out.end(), [](const StoredCheckpoint& a, const StoredCheckpoint& b) {
    return a.sequence < b.sequence;
  });
  std::set<std::uint64_t> later;  // iterations
  for (auto one = out.rbegin(); one != out.rend(); ++one) {
    if (!later.insert(one->iteration).second) one->abandoned = true;
  }
  return out;
}

bool Store::IsGone(const StoredCheckpoint& checkpoint) const {
  // Opens the file, because a network file system may cache a name that
  // is gone. It drops such an entry after the first failed access.
  for (int i = 0;; ++i) {
    const auto file = os::File::OpenRead(ManifestPath(checkpoint));
    const bool stale = !file && file.error().sys == ESTALE;
    if (!stale || i > 0) return stale || (!file && file.error().sys == ENOENT);
  }
}

Result<std::uint64_t> Store::NextSequence() const {
  SW_TRY_ASSIGN(const std::vector<os::Entry> manifests, os::ListDir(path_ + "/manifests"));
  std::uint64_t last = 0;
  for (const os::Entry& entry : manifests) {
    if (const auto checkpoint = CheckpointOf(entry.name))
      last = std::max(last, checkpoint->sequence);
  }
  SW_TRY_ASSIGN(const std::set<std::uint64_t> abandoned, Abandoned());
  // A number that a recovery lists as abandoned must never name a new checkpoint.
  if (!abandoned.empty()) last = std::max(last, *abandoned.rbegin());
  SW_TRY_ASSIGN(const std::vector<os::Entry> catalogues, os::ListDir(path_ + "/catalogues"));
  for (const os::Entry& entry : catalogues) {
    last = std::max(last, NumberBefore(entry.name, ".swc").value_or(0));
  }
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> tokens, ListTokens());
  if (!tokens.empty()) last = std::max(last, tokens.back());
  return last + 1;
}

Result<std::string> Store::ReadManifestText(const StoredCheckpoint& checkpoint) const {
  return os::ReadWholeText(ManifestPath(checkpoint), kManifestBytes);
}

/// Checks that a manifest matches its file name and this store's model.
Status Store::CheckManifest(const StoredCheckpoint& checkpoint, const Manifest& manifest,
                            std::size_t modules) const {
  if (manifest.sequence == checkpoint.sequence && manifest.iteration == checkpoint.iteration &&
      modules == head_.modules) {
    return {};
  }
  return Fail(Errc::kBadInput, ManifestPath(checkpoint), ": expected checkpoint ",
              checkpoint.sequence, " of iteration ", checkpoint.iteration, " with ", head_.modules,
              " modules, found checkpoint ", manifest.sequence, " of iteration ",
              manifest.iteration, " with ", modules, " modules");
}

Result<Manifest> Store::ReadManifest(const StoredCheckpoint& checkpoint) const {
  SW_TRY_ASSIGN(const std::string text, ReadManifestText(checkpoint));
  SW_TRY_ASSIGN(Manifest manifest, ParseManifest(text, ManifestPath(checkpoint)));
  SW_TRY(CheckManifest(checkpoint, manifest, manifest.modules.size()));
  return manifest;
}

Result<ManifestLines> Store::ReadManifestLines(const StoredCheckpoint& checkpoint) const {
  SW_TRY_ASSIGN(std::string text, ReadManifestText(checkpoint));
  SW_TRY_ASSIGN(ManifestLines manifest, SplitManifest(std::move(text), ManifestPath(checkpoint)));
  SW_TRY(CheckManifest(checkpoint, manifest.head, manifest.lines.size()));
  return manifest;
}

Result<checkpoints::SourceSet> Store::ReadCatalogue(const Manifest& manifest) const {
  const std::string path = CataloguePath(manifest.sequence);
  SW_TRY_ASSIGN(const std::string text, os::ReadWholeText(path, kCatalogueBytes));
  const exec::Digest found = exec::DigestOf(std::as_bytes(std::span(text)));
  if (found != manifest.catalogue) {
    return Fail(Errc::kBadInput, path, ": digest ", exec::Hex(manifest.catalogue),
                " expected, found ", exec::Hex(found));
  }
  Result<checkpoints::SourceSet> set = checkpoints::DeserializeSource(text);
  if (!set) return Within(path, std::move(set).error());
  return set;
}

Result<bool> Store::HasTokens(std::uint64_t sequence) const {
  return os::Exists(TokensPath(sequence));
}

Result<std::vector<std::uint64_t>> Store::ListTokens() const {
  std::vector<std::uint64_t> sequences;
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, ListIfThere(path_ + "/tokens"));
  for (const os::Entry& entry : entries) {
    if (const auto number = NumberBefore(entry.name, ".json")) sequences.push_back(*number);
  }
  std::sort(sequences.begin(), sequences.end());
  return sequences;
}

Result<TokenRecord> Store::ReadTokens(std::uint64_t sequence) const {
  SW_TRY_ASSIGN(const std::string text,
                os::ReadWholeText(TokensPath(sequence), limits::kJsonBytes));
  SW_TRY_ASSIGN(TokenRecord record, ParseTokens(text, TokensPath(sequence)));
  if (record.sequence.value_or(sequence) == sequence) return record;
  return Fail(Errc::kBadInput, TokensPath(sequence), ": expected the record of checkpoint ",
              sequence, ", found the record of checkpoint ", *record.sequence);
}

Result<std::optional<RecoveryFile>> Store::LastRecoveryFile() const {
  std::uint64_t last = 0;
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, ListIfThere(path_ + "/recoveries"));
  for (const os::Entry& entry : entries) {
    last = std::max(last, NumberBefore(entry.name, ".json").value_or(0));
  }
  if (last == 0) return std::optional<RecoveryFile>();
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(RecoveryPath(last)));
  SW_TRY_ASSIGN(const os::Identity identity, file.Stat());
  return std::optional(RecoveryFile{last, identity.mtime_ns});
}

Result<std::optional<RecoveryRecord>> Store::LastRecovery() const {
  SW_TRY_ASSIGN(const std::optional<RecoveryFile> last, LastRecoveryFile());
  if (!last) return std::optional<RecoveryRecord>();
  SW_TRY_ASSIGN(RecoveryRecord recovery, ReadRecovery(RecoveryPath(last->sequence)));
  return std::optional<RecoveryRecord>(std::move(recovery));
}

Status Store::PutTexts(const StoredCheckpoint& checkpoint, const std::string& manifest,
                       const std::string& catalogue,
                       const std::optional<TokenRecord>& tokens) const {
  SW_TRY(os::FaultPoint("store.texts"));
  SW_TRY(os::ReplaceFile(CataloguePath(checkpoint.sequence), catalogue));
  if (tokens) {
    TokenRecord record = *tokens;
    record.sequence = checkpoint.sequence;
    SW_TRY(os::ReplaceFile(TokensPath(checkpoint.sequence), ToText(record)));
  }
  SW_TRY(os::FaultPoint("store.manifest"));
  return os::ReplaceFile(ManifestPath(checkpoint), manifest);
}

Status Store::Commit(const StoredCheckpoint& checkpoint, const std::string& manifest,
                     const std::string& catalogue, const std::optional<TokenRecord>& tokens) const {
  Status put = PutTexts(checkpoint, manifest, catalogue, tokens);
  if (put) return put;
  // A catalogue without a manifest would look like a lost manifest (CheckNoTraces). If
  // the manifest exists although its folder could not be synced, it needs its texts.
  const auto there = os::Exists(ManifestPath(checkpoint));
  if (there && !*there) {
    (void)os::RemoveFile(TokensPath(checkpoint.sequence));
    (void)os::RemoveFile(CataloguePath(checkpoint.sequence));
  }
  return put;
}

Status Store::AddRecovery(const RecoveryRecord& recovery) const {
  SW_TRY(os::FaultPoint("store.recovery"));
  return os::ReplaceFile(RecoveryPath(recovery.sequence), ToText(recovery));
}

Status Store::PutPending(const RecoveryRecord& recovery) const {
  SW_TRY(os::FaultPoint("store.pending"));
  return os::ReplaceFile(PendingPath(), ToText(recovery));
}

Result<std::optional<RecoveryRecord>> Store::Pending() const {
  SW_TRY_ASSIGN(const bool there, os::Exists(PendingPath()));
  if (!there) return std::optional<RecoveryRecord>();
  SW_TRY_ASSIGN(RecoveryRecord recovery, ReadRecovery(PendingPath()));
  return std::optional<RecoveryRecord>(std::move(recovery));
}

Status Store::AddRestart(RecoveryRecord recovery) const {
  SW_TRY_ASSIGN(const std::optional<RecoveryRecord> last, LastRecovery());
  recovery.sequence = last ? last->sequence + 1 : 1;
  SW_TRY(AddRecovery(recovery));
  return DropPending();
}

Status Store::ConfirmPending() const {
  SW_TRY_ASSIGN(std::optional<RecoveryRecord> pending, Pending());
  SW_CHECK(pending.has_value());
  return AddRestart(*std::move(pending));
}

Status Store::DropPending() const {
  SW_TRY_ASSIGN(const bool there, os::Exists(PendingPath()));
  return there ? os::RemoveFile(PendingPath()) : Status();
}

std::optional<BlobFile> Store::Find(const exec::Digest& digest, std::uint64_t bytes) const {
  const BlobFile plain{digest, false};
  if (const auto file = os::File::OpenRead(BlobPath(plain))) {
    const auto found = file->Stat();
    if (found && found->bytes == bytes) return plain;
  }
  const BlobFile packed{digest, true};
  if (exec::IsZpack(BlobPath(packed), bytes)) return packed;
  return std::nullopt;
}

Status Store::Remove(const std::vector<StoredCheckpoint>& checkpoints,
                     const std::vector<BlobFile>& blobs,
                     const std::function<Status()>& check) const {
  SW_TRY(os::FaultPoint("store.remove"));
  if (check) SW_TRY(check());
  for (const StoredCheckpoint& checkpoint : checkpoints) {
    SW_TRY(os::RemoveFile(ManifestPath(checkpoint)));
  }
  // The removed manifests must be durable before their blobs are removed.
  SW_TRY(os::SyncDir(path_ + "/manifests"));
  for (const BlobFile& blob : blobs) {
    if (check) SW_TRY(check());
    SW_TRY(os::RemoveFile(BlobPath(blob)));
  }
  SW_TRY_ASSIGN(const std::vector<StoredCheckpoint> left, List());
  std::set<std::uint64_t> kept;
  for (const StoredCheckpoint& checkpoint : left) kept.insert(checkpoint.sequence);
  SW_TRY_ASSIGN(const std::vector<os::Entry> entries, os::ListDir(path_ + "/catalogues"));
  for (const os::Entry& entry : entries) {
    const auto sequence = NumberBefore(entry.name, ".swc");
    if (sequence && kept.contains(*sequence)) continue;
    SW_TRY(os::RemoveFile(path_ + "/catalogues/" + entry.name));
  }
  return {};
}

}  // namespace shardwright::partial
