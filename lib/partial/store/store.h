// SPDX-License-Identifier: Apache-2.0
// lib/partial/store: stores of partial checkpoints. modules.h groups the tensors of a
// checkpoint into modules. Each component of a module is one blob, named by its
// digest. A manifest (manifest.h) lists the blobs of one checkpoint, and manifests
// share unchanged blobs. write_blobs.h and read_blobs.h move the bytes, check_store.h
// verifies a store, collect.h removes unneeded blobs. Source: docs/formats/store.md.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/source.h"
#include "partial/store/manifest.h"
#include "support/base/result.h"
#include "support/base/stop.h"
#include "support/os/lock.h"

namespace shardwright::partial {

/// A checkpoint of a store, as described by its file name.
struct StoredCheckpoint {
  std::uint64_t sequence = 0;
  std::uint64_t iteration = 0;
  bool abandoned = false;  ///< a restart or a repeated iteration has replaced it
  friend bool operator==(const StoredCheckpoint&, const StoredCheckpoint&) = default;
};

/// A recovery of a store, as described by its file.
struct RecoveryFile {
  std::uint64_t sequence = 0;
  std::int64_t written_ns = 0;  ///< modification time in the file system's clock
};

/// A blob file of the store, referenced or not.
struct BlobFile {
  exec::Digest digest{};
  bool zstd = false;
  auto operator<=>(const BlobFile&) const = default;
};

/// The folder of a store (docs/formats/store.md):
///
///   begun.json                     marks that a run has begun, before its first checkpoint
///   store.json                     the model and options of the store
///   lock                           exists while a process writes
///   manifests/<sequence>-<iteration>.json
///   catalogues/<sequence>.swc      the source's metadata (docs/formats/catalogue.md)
///   tokens/<sequence>.json         tokens since the previous checkpoint
///   recoveries/<sequence>.json     restarts: where training resumed
///   recoveries/pending.json        a restore that no save has confirmed as a restart
///   blobs/<2 digits>/<digest>[.zst]
///   incoming-<run>/                blobs of a save in progress
///
/// All methods are local. Reading needs no lock. A collection may remove
/// a listed checkpoint before a reader reads it; IsGone detects that.
class Store {
 public:
  /// Returns true if the folder is a store. \error kNotFound  the folder cannot be read
  static Result<bool> IsStore(const std::string& path);

  /// \error kNotFound  not a store; kBadInput, kUnsupported  its texts
  static Result<Store> Open(const std::string& path);

  /// Opens a store, or creates one for `head`. An existing folder must be empty or a store.
  /// \error kBusy  the folder has other content; kIo; as Open
  static Result<Store> OpenOrCreate(const std::string& path, const StoreHead& head);

  /// Creates the folder of a store that a run will save into, with a mark that the run
  /// has begun: if the folder is missing later, it was lost and is not new. The first
  /// save creates the store. Removes leftovers of killed calls next to the folder.
  /// \error kBusy  the name is in use; kNotFound  no parent folder; kIo
  static Status Begin(const std::string& path);

  /// Checks that saves into the path can begin: opens the existing store and tests that
  /// it can be written, or creates its folder with Begin if the name does not exist.
  /// \error kBusy  the path is not a store's folder; kNotFound  no parent folder; kIo; as Open
  static Status Prepare(const std::string& path);

  /// Proves that no checkpoint exists yet: the folder of a store or of a
  /// run that has begun can be read, and contains no trace of a checkpoint.
  /// \returns false if there are manifests
  /// \error kNotFound  missing, unreadable or empty, which may be
  ///        a file system that is not mounted; kBadInput  a store
  ///        that has lost its manifests; kUnsupported  as Open
  static Result<bool> HasNoCheckpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const StoreHead& head() const { return head_; }

  /// Excludes other writers until the lock is destroyed.
  /// Removes leftovers of killed saves, as far as possible, and makes empty
  /// folders that a copy of the store lacks.
  /// \param take_over  as os::Lock::Take
  /// \error kBusy  names the owner of the lock
  Result<os::Lock> LockForWriting(const std::string& note, bool take_over = false) const;

  /// Returns all checkpoints, ascending sequence. A later checkpoint of the same iteration
  /// replaces an earlier one, which counts as abandoned so that readers never mix parts of both.
  /// \error kBadInput  a recovery that cannot be read
  Result<std::vector<StoredCheckpoint>> List() const;

  /// Returns true if a listed checkpoint has been collected since. Its manifest is
  /// removed before its other files. So if it is not gone, missing files are damage.
  bool IsGone(const StoredCheckpoint& checkpoint) const;

  /// Returns the next sequence: above those of all files and abandoned checkpoints.
  Result<std::uint64_t> NextSequence() const;

  Result<Manifest> ReadManifest(const StoredCheckpoint& checkpoint) const;
  /// Reads a manifest without parsing the lines of its modules.
  Result<ManifestLines> ReadManifestLines(const StoredCheckpoint& checkpoint) const;
  /// Reads the metadata of the source that a checkpoint was saved from, without payloads.
  /// \error kBadInput  damaged: the digest differs from the manifest's
  Result<checkpoints::SourceSet> ReadCatalogue(const Manifest& manifest) const;
  /// Returns the sequences that have a token record, ascending.
  Result<std::vector<std::uint64_t>> ListTokens() const;
  Result<TokenRecord> ReadTokens(std::uint64_t sequence) const;
  Result<bool> HasTokens(std::uint64_t sequence) const;
  /// Returns the last recovery, if there is one.
  Result<std::optional<RecoveryRecord>> LastRecovery() const;
  /// Returns the same without reading the file.
  Result<std::optional<RecoveryFile>> LastRecoveryFile() const;
  /// Returns the recoveries above a sequence, ascending.
  Result<std::vector<RecoveryRecord>> RecoveriesAfter(std::uint64_t sequence) const;
  /// Checks that a checkpoint in an agent's memory is of this store, if it names one.
  /// \param what  name of the checkpoint, for messages
  /// \error kMismatch  names both stores
  Status CheckOwn(const Manifest& manifest, const std::string& what) const;
  /// Checks that work at an iteration under a recovery (GivesUp) belongs to the history
  /// that training continues. The result stays valid as long as the store is locked.
  /// \param what  name of that work, for messages
  /// \error kMismatch  a restore has rolled it back: names it; kNotFound  the store has no such
  ///        recovery, so it is another store or this node does not see its newest state yet
  Status CheckPast(std::uint64_t recovery, std::uint64_t iteration, const std::string& what) const;

  /// Adds a checkpoint to the store: catalogue and tokens first, then the manifest. The
  /// blobs must be in place. On failure before the manifest exists, removes the texts.
  /// \param manifest  text of the manifest
  /// \error kIo
  Status Commit(const StoredCheckpoint& checkpoint, const std::string& manifest,
                const std::string& catalogue, const std::optional<TokenRecord>& tokens) const;
  /// Records a restart, which abandons the checkpoints newer than its resume point.
  /// \error kIo
  Status AddRecovery(const RecoveryRecord& recovery) const;

  /// Records a restart under the next number and removes an unconfirmed restore.
  /// \pre the store is locked
  /// \error kIo
  Status AddRestart(RecoveryRecord recovery) const;

  /// Records a restore that may be an inspection of the store or a restart. It
  /// replaces an earlier one and abandons nothing until a save confirms it.
  /// \error kIo
  Status PutPending(const RecoveryRecord& recovery) const;
  /// Returns the unconfirmed restore, if there is one. Its sequence is 0.
  Result<std::optional<RecoveryRecord>> Pending() const;
  /// Records the unconfirmed restore as a restart.
  /// \pre there is one; the store is locked
  Status ConfirmPending() const;
  /// Discards the unconfirmed restore, if there is one.
  /// \error kIo
  Status DropPending() const;

  std::string ManifestPath(const StoredCheckpoint& checkpoint) const;
  std::string CataloguePath(std::uint64_t sequence) const;
  std::string TokensPath(std::uint64_t sequence) const;
  std::string BlobPath(const BlobFile& blob) const;
  std::string BlobPath(const BlobRef& blob) const {
    return BlobPath(BlobFile{blob.digest, blob.zstd});
  }

  /// Returns the folder name for blobs of a save in progress.
  std::string IncomingPath(const std::string& run_id) const {
    return path_ + "/incoming-" + run_id;
  }

  /// Finds the file, plain or compressed, with this content, if its size is plausible.
  std::optional<BlobFile> Find(const exec::Digest& digest, std::uint64_t bytes) const;

  /// Returns all blob files of the store.
  /// \param others  receives the paths of files that are not blobs; null: these are an error
  /// \error kBadInput  a file that is not a blob
  Result<std::vector<BlobFile>> ListBlobs(std::vector<std::string>* others = nullptr) const;

  /// Removes checkpoints (manifest first), then blobs, and
  /// catalogues, tokens and folders that are no longer referenced.
  /// \param check  called before the manifests and before each blob; its error ends the removal
  /// \error kIo; that of `check`: some blobs remain
  Status Remove(const std::vector<StoredCheckpoint>& checkpoints,
                const std::vector<BlobFile>& blobs,
                const std::function<Status()>& check = {}) const;

  /// Name of the mark that Begin writes.
  static constexpr const char* kBegunName = "begun.json";

 private:
  Store(std::string path, StoreHead head) : path_(std::move(path)), head_(std::move(head)) {}
  /// Returns true for names that a store's folder may contain before its head is written.
  static bool IsOwnName(std::string_view name);
  /// Fails if the path is not a folder, or a folder with other content.
  /// \error kBusy
  static Status ExpectOwnNames(const std::string& path);
  Result<std::set<std::uint64_t>> Abandoned() const;
  using ReadRecord = Result<RecoveryRecord> (*)(const std::string& path);
  /// Visits recoveries in ascending order, one at a time, because long runs have hundreds.
  Status ForRecoveriesAfter(std::uint64_t sequence, ReadRecord read,
                            const std::function<Status(RecoveryRecord)>& visit) const;
  std::string RecoveryPath(std::uint64_t sequence) const;
  std::string PendingPath() const { return path_ + "/recoveries/pending.json"; }
  Status PutTexts(const StoredCheckpoint& checkpoint, const std::string& manifest,
                  const std::string& catalogue, const std::optional<TokenRecord>& tokens) const;
  Result<std::string> ReadManifestText(const StoredCheckpoint& checkpoint) const;
  Status CheckManifest(const StoredCheckpoint& checkpoint, const Manifest& manifest,
                       std::size_t modules) const;

  std::string path_;
  StoreHead head_;
};

}  // namespace shardwright::partial
