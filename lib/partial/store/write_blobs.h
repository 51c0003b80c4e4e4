// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/exec/integrity.h"
#include "engine/exec/unfinished_writes.h"
#include "engine/plan/plan.h"
#include "partial/store/store.h"
#include "support/base/result.h"
#include "support/base/sink.h"

namespace shardwright::partial {

/// A blob to store, which is one file of the plan's target.
struct BlobJob {
  std::uint32_t file = 0;
  /// Blob of the same component in the newest manifest. Unchanged content
  /// is only hashed, and written again only if the store has lost the blob.
  std::optional<BlobRef> known;
  /// For a repair: missing or damaged blobs, all plain or all compressed. The
  /// file is written only if its content has the digest of one of them. It
  /// replaces the file of that name, in the form that the reference states.
  std::vector<BlobRef> repairs = {};
};

/// Result of one BlobJob.
struct BlobResult {
  BlobRef ref;
  bool unchanged = false;           ///< it equals the known blob
  bool restored = false;            ///< written again: unchanged but lost, or a repair
  std::uint64_t written_bytes = 0;  ///< 0 if the store had the content already
};

struct BlobOptions {
  std::string incoming;  ///< this rank's existing folder for unfinished blobs
  bool zstd = false;
  bool note_sums = true;  ///< record checksums of source bytes
  unsigned threads = 1;
  exec::UnfinishedWrites* writes = nullptr;  ///< counts the bytes written; may be null
};

/// Reads, hashes and stores blobs. On return each has its name in the store and is
/// durable. If the first unit of a blob is unchanged, the blob is hashed to its end before
/// any byte is written. A repair stops reading if none of its blobs has this first unit.
/// \pre no blob is empty
/// \param sums  receives checksums of the pieces of source members that were read
/// \error kStopped, kIo, errors of the source; kBadInput  a passed member fails its checksum
/// Local; on several ranks each writes its own jobs. Source: docs/formats/store.md, "Blobs".
Result<std::vector<BlobResult>> WriteBlobs(const Store& store, const plan::Plan& plan,
                                           exec::ByteSource& source, std::span<const BlobJob> jobs,
                                           const BlobOptions& options, exec::SourceSums* sums,
                                           Sink& sink);

/// Combines the checksums of a blob's units, in order, into its digest, CRC and head.
BlobRef Summarize(std::span<const exec::UnitSum> units);

}  // namespace shardwright::partial
