// SPDX-License-Identifier: Apache-2.0
// lib/partial/store: stores of partial checkpoints.
// modules.h groups the tensors of a checkpoint into modules, and each component of a module is one
// blob, named by its digest. A manifest (manifest.h) lists the blobs of one checkpoint; unchanged
// blobs are shared by many. write_blobs.h and read_blobs.h move the bytes, check_store.h proves a
// store, collect.h removes what no checkpoint needs. Source: docs/formats/store.md.

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

/// A checkpoint of a store, by its file name.
struct StoredCheckpoint {
  std::uint64_t sequence = 0;
  std::uint64_t iteration = 0;
  bool abandoned = false;  ///< training went on from an older one, or its iteration is saved again
  friend bool operator==(const StoredCheckpoint&, const StoredCheckpoint&) = default;
};

/// A recovery of a store, by its file.
struct RecoveryFile {
  std::uint64_t sequence = 0;
  std::int64_t written_ns = 0;  ///< by the file system's clock
};

/// A file of the store that somebody refers to, or its remains.
struct BlobFile {
  exec::Digest digest{};
  bool zstd = false;
  auto operator<=>(const BlobFile&) const = default;
};

/// The folder of a store (docs/formats/store.md):
///
///   begun.json                     that a run has begun, before its first checkpoint
///   store.json                     what it is for
///   lock                           while a process writes
///   manifests/<sequence>-<iteration>.json
///   catalogues/<sequence>.swc      the source's metadata_table (docs/formats/catalogue.md)
///   tokens/<sequence>.json         tokens since the checkpoint before
///   recoveries/<sequence>.json     restarts: where training resumed
///   recoveries/pending.json        a restore that no save has confirmed as a restart
///   blobs/<2 digits>/<digest>[.zst]
///   incoming-<run>/                blobs of a save under way
///
/// All calls are local. Reading needs no lock; what a reader has listed may be gone when it comes
/// to read if garbage is collected meanwhile: IsGone tells.
class Store {
 public:
  /// True if the folder holds a store. \error kNotFound if it cannot be asked
  static Result<bool> IsStore(const std::string& path);

  /// \error kNotFound  no store there; kBadInput, kUnsupported  its texts
  static Result<Store> Open(const std::string& path);

  /// Opens a store, or makes one for `head`. A folder that exists must be empty or a store.
  /// \error kBusy  another folder is there; kIo; as Open
  static Result<Store> OpenOrCreate(const std::string& path, const StoreHead& head);

  /// Makes the folder of a store that a run will save into, with a mark that the run has begun: if
  /// the folder is missing later, it is lost and not new. There is no store in it until the first
  /// save. Removes what killed calls have left beside it.
  /// \error kBusy  something has the name; kNotFound  its parent folder; kIo
  static Status Begin(const std::string& path);

  /// Makes sure that saves into the path can begin: opens the store that is there and looks whether
  /// it can be written to, or makes the folder of one where nothing has the name (Begin).
  /// \error kBusy  the name is taken by something else; kNotFound  its parent folder; kIo; as Open
  static Status Prepare(const std::string& path);

  /// Proves that there is no checkpoint yet: a store or a begun folder can be read, and nothing in
  /// it tells of a checkpoint.
  /// \returns false  there are manifests
  /// \error kNotFound  it is absent, cannot be read, or tells nothing: an empty folder may be a
  ///        file system that is not mounted; kBadInput  a store that has lost its manifests;
  ///        kUnsupported  as Open
  static Result<bool> HasNoCheckpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const StoreHead& head() const { return head_; }

  /// Keeps other writers out until the lock goes. Removes what killed saves have left, as far as it
  /// can be removed.
  /// \param take_over  as os::Lock::Take
  /// \error kBusy  names who holds it
  Result<os::Lock> LockForWriting(const std::string& note, bool take_over = false) const;

  /// All checkpoints, ascending sequence. Of those of one iteration the last has taken the place of
  /// the others: they count as abandoned, so that nobody puts parts of both together.
  /// \error kBadInput  a recovery that cannot be read
  Result<std::vector<StoredCheckpoint>> List() const;

  /// Whether a checkpoint that was listed has been collected since. Its manifest goes before
  /// anything that only it refers to: what is missing of one that is not gone is damage.
  bool IsGone(const StoredCheckpoint& checkpoint) const;

  /// Sequence for the next checkpoint: above all that were ever used and still show.
  Result<std::uint64_t> NextSequence() const;

  Result<Manifest> ReadManifest(const StoredCheckpoint& checkpoint) const;
  /// The same with the modules left as text.
  Result<ManifestLines> ReadManifestLines(const StoredCheckpoint& checkpoint) const;
  /// The source that a checkpoint was saved from, without its payloads.
  /// \error kBadInput  damaged: not the digest that the manifest says
  Result<checkpoints::SourceSet> ReadCatalogue(const Manifest& manifest) const;
  /// Sequences that have a token record, ascending.
  Result<std::vector<std::uint64_t>> ListTokens() const;
  Result<TokenRecord> ReadTokens(std::uint64_t sequence) const;
  Result<bool> HasTokens(std::uint64_t sequence) const;
  /// The last recovery, if there is one.
  Result<std::optional<RecoveryRecord>> LastRecovery() const;
  /// The same without reading it.
  Result<std::optional<RecoveryFile>> LastRecoveryFile() const;
  /// Recoveries above a sequence, ascending.
  Result<std::vector<RecoveryRecord>> RecoveriesAfter(std::uint64_t sequence) const;
  /// Whether what was made at an iteration under a recovery (GivesUp) is of the past that training
  /// goes on from. Final as long as the store is locked.
  /// \param what  names it in messages
  /// \error kMismatch  a restore has given it up: names it; kNotFound  the store has no such
  ///        recovery: it is another one, or its newest state does not show here yet
  Status CheckPast(std::uint64_t recovery, std::uint64_t iteration, const std::string& what) const;

  /// Makes a checkpoint part of the store: catalogue and tokens first, then the manifest. The blobs
  /// must be in place. Where it fails before the manifest is there, it leaves no text.
  /// \param manifest  its text
  /// \error kIo
  Status Commit(const StoredCheckpoint& checkpoint, const std::string& manifest,
                const std::string& catalogue, const std::optional<TokenRecord>& tokens) const;
  /// Records a restart: checkpoints newer than its resume point are abandoned.
  /// \error kIo
  Status AddRecovery(const RecoveryRecord& recovery) const;

  /// Records a restart under the next number, in place of a restore that is not confirmed yet.
  /// \pre the store is locked
  /// \error kIo
  Status AddRestart(RecoveryRecord recovery) const;

  /// Notes a restore that may have been a look at the store or a restart. It takes the place of an
  /// earlier one and abandons nothing until a save confirms it.
  /// \error kIo
  Status PutPending(const RecoveryRecord& recovery) const;
  /// The restore that is not confirmed yet, if there is one. Its sequence is 0.
  Result<std::optional<RecoveryRecord>> Pending() const;
  /// Records the restore that is not confirmed yet as a restart.
  /// \pre there is one; the store is locked
  Status ConfirmPending() const;
  /// Forgets it, if there is one.
  /// \error kIo
  Status DropPending() const;

  std::string ManifestPath(const StoredCheckpoint& checkpoint) const;
  std::string CataloguePath(std::uint64_t sequence) const;
  std::string TokensPath(std::uint64_t sequence) const;
  std::string BlobPath(const BlobFile& blob) const;
  std::string BlobPath(const BlobRef& blob) const {
    return BlobPath(BlobFile{blob.digest, blob.zstd});
  }

  /// A name for blobs under way.
  std::string IncomingPath(const std::string& run_id) const {
    return path_ + "/incoming-" + run_id;
  }

  /// The form in which content lies here already, if it does and has a fitting size.
  std::optional<BlobFile> Find(const exec::Digest& digest, std::uint64_t bytes) const;

  /// Every blob file that is there.
  /// \param others  gets the paths of files that are not blobs; null: one of them is an error
  /// \error kBadInput  a file that is not a blob
  Result<std::vector<BlobFile>> ListBlobs(std::vector<std::string>* others = nullptr) const;

  /// Removes checkpoints (manifest first) and then blobs, catalogues, tokens and folders that
  /// nothing refers to.
  /// \error kIo; kStopped  some of the blobs are left
  Status Remove(const std::vector<StoredCheckpoint>& checkpoints,
                const std::vector<BlobFile>& blobs, const StopCheck& stop = {}) const;

  /// Name of the mark of Begin.
  static constexpr const char* kBegunName = "begun.json";

 private:
  Store(std::string path, StoreHead head) : path_(std::move(path)), head_(std::move(head)) {}
  /// Whether the folder of a store may hold this before its head is written.
  static bool IsOwnName(std::string_view name);
  /// Refuses a name that is not a folder, or a folder that holds anything else.
  /// \error kBusy
  static Status ExpectOwnNames(const std::string& path);
  Result<std::set<std::uint64_t>> Abandoned() const;
  /// Ascending, and one at a time: a long run has hundreds of them.
  Status ForRecoveriesAfter(std::uint64_t sequence,
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
