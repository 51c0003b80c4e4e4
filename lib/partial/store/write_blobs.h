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

/// One blob to be stored: a file of the plan's target.
struct BlobJob {
  std::uint32_t file = 0;
  /// Blob of the same component in the newest manifest. Content that has not changed is only
  /// hashed, and written again where the store has lost the blob.
  std::optional<BlobRef> known;
  /// A repair: missing or damaged blobs, all plain or all compressed. The file is written only if
  /// its content has the digest of one of them. It then replaces the file of that name, in the form
  /// that the reference states.
  std::vector<BlobRef> repairs = {};
};

/// Where a blob ended up.
struct BlobResult {
  BlobRef ref;
  bool unchanged = false;           ///< it is the one that was known
  bool restored = false;            ///< unchanged, or a repair, and written again
  std::uint64_t written_bytes = 0;  ///< 0 if the store had the content already
};

struct BlobOptions {
  std::string incoming;  ///< folder for blobs under way; it exists and is this rank's
  bool zstd = false;
  bool note_sums = true;  ///< note checksums of what is read
  unsigned threads = 1;
  exec::UnfinishedWrites* writes = nullptr;  ///< counts the bytes written; may be null
};

/// Gathers, hashes and stores blobs: on return each has its name in the store and is durable. A
/// blob whose first unit is as before is hashed to its end before anything is written. A repair is
/// not read further if none of its blobs has this first unit.
/// \pre no blob is empty
/// \param sums  gets the pieces of source members that were read
/// \error kStopped, kIo, what the source returns; kBadInput  a passed member has not its checksum
/// Local; on several ranks each writes its own jobs. Source: docs/formats/store.md, "Blobs".
Result<std::vector<BlobResult>> WriteBlobs(const Store& store, const plan::Plan& plan,
                                           exec::ByteSource& source, std::span<const BlobJob> jobs,
                                           const BlobOptions& options, exec::SourceSums* sums,
                                           Sink& sink);

/// Digest, checksum and head of a blob's plain bytes, from those of its units in order.
BlobRef Summarize(std::span<const exec::UnitSum> units);

}  // namespace shardwright::partial
