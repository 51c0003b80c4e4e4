// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tbb/enumerable_thread_specific.h>

#include "engine/exec/byte_source.h"
#include "partial/gradient_log/module_chain.h"
#include "support/base/result.h"

// Source that computes bytes: applies logged gradients to old versions from blobs, up to X.

namespace shardwright::partial::restore {

/// A member of the map with the bytes of a replayed module.
struct ReplayedMember {
  std::shared_ptr<const ReplayedModule> module;
  Component component = Component::kMaster;
  BlobRef blob;                         ///< blob in the store
  std::vector<std::uint64_t> payloads;  ///< tensor sizes in the blob, as VerifyBlob
};

/// Reads members: those of replayed modules as of X, others unchanged.
/// Computes a range of a parameter and all its states at once, and caches it
/// while there is space, because callers usually read the other states next.
/// Verifies the digest of each source blob before its first use. Thread-safe.
class ReplayBytes final : public exec::ByteSource {
 public:
  /// \param blobs    reads members as stored
  /// \param map      source of member names for messages
  /// \param members  the members to compute, by number
  /// \param room     bytes for cached ranges
  /// \pre `map` outlives it
  ReplayBytes(std::unique_ptr<exec::ByteSource> blobs, const layout::ShardMap& map,
              std::shared_ptr<const ReplayLog> log, std::map<std::uint32_t, ReplayedMember> members,
              unsigned threads, std::uint64_t room);

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override;
  Result<bool> Recheck(std::uint32_t file) override { return blobs_->Recheck(file); }
  bool has_places() const override { return true; }
  std::optional<std::uint64_t> PlaceOf(std::uint32_t member, std::uint64_t offset) override;
  std::uint64_t bytes_read() const override { return blobs_->bytes_read() + reads_.bytes_read(); }
  std::uint64_t files_read() const override { return blobs_->files_read() + reads_.files_read(); }

 private:
  /// A parameter of one of the modules.
  struct Lane {
    std::size_t module = 0;  ///< index into proofs_
    std::uint64_t elems = 0;
    std::uint64_t place = 0;        ///< position of its first element
    std::uint64_t range_elems = 0;  ///< elements computed at once
    /// The parameter and its states: member and offset.
    std::vector<std::pair<std::uint32_t, std::uint64_t>> arrays;
    std::vector<ReplayStep> steps;
  };
  /// Result of verifying the digests of a module's blobs.
  struct Proof {
    std::vector<std::uint32_t> members;
    std::mutex mutex;
    bool done = false;
    Status status;
  };
  /// Position of a parameter or state in a member.
  struct LanePosition {
    std::uint64_t offset = 0;
    std::size_t lane = 0;
    std::size_t array = 0;
  };
  /// A computed range: one array after the other.
  struct Range {
    std::mutex mutex;
    bool done = false;
    Status status;
    std::unique_ptr<float[]> values;
    std::uint64_t count = 0;  ///< elements per array
    std::uint64_t bytes = 0;
  };
  using Key = std::pair<std::size_t, std::uint64_t>;  // lane, number of the range
  struct Kept {
    std::shared_ptr<Range> range;
    std::list<Key>::iterator recent;
  };

  void AddModule(const ReplayedModule& module, std::size_t number,
                 const std::map<Component, std::uint32_t>& members);
  const LanePosition* ByteRangeAt(std::uint32_t member, std::uint64_t offset) const;
  Status Prove(Proof& proof);
  std::shared_ptr<Range> Find(const Key& key);
  Result<std::shared_ptr<const Range>> Get(const Key& key);
  Status Make(const Key& key, Range* range);

  const std::unique_ptr<exec::ByteSource> blobs_;
  const layout::ShardMap& map_;
  const std::shared_ptr<const ReplayLog> log_;
  const std::map<std::uint32_t, ReplayedMember> members_;
  const unsigned threads_;
  const std::uint64_t room_;
  LogReads reads_;
  std::vector<Lane> lanes_;
  std::vector<std::unique_ptr<Proof>> proofs_;                    // by module
  std::map<std::uint32_t, std::size_t> module_of_;                // by member, into proofs_
  std::map<std::uint32_t, std::vector<LanePosition>> stretches_;  // by member, ascending offset
  tbb::enumerable_thread_specific<std::vector<std::byte>> gradients_;
  std::mutex mutex_;
  std::map<Key, Kept> kept_;
  std::list<Key> recent_;  // most recent first
  std::uint64_t kept_bytes_ = 0;
};

}  // namespace shardwright::partial::restore
