// SPDX-License-Identifier: Apache-2.0
// lib/engine/plan: computes a copy program from a source map and a target map.
// A Target (target.h) describes all output files to the byte before any payload is read.
// Plan intersects its map with the source map. Output payloads are divided into units of
// 1 MiB. For one unit, Fill computes the bytes to read and their positions, conversions
// and averages, so a plan of any size needs little memory. All functions are pure.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "support/base/result.h"

namespace shardwright::plan {

/// Size of a unit of work: a range of a payload, gathered, checksummed and written at once.
/// It is constant because manifests have checksums of units (docs/formats/manifest.md).
inline constexpr std::uint64_t kUnitBytes = std::uint64_t{1} << 20;

/// A range of an output payload. All units of a payload except the last have kUnitBytes bytes.
struct Unit {
  std::uint32_t file = 0;
  std::uint32_t payload = 0;  ///< in the file
  std::uint64_t first = 0;    ///< byte of the payload
  std::uint64_t bytes = 0;
};

/// A byte range of a source member that is read at once.
struct Read {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;  ///< byte of the member
  std::uint64_t bytes = 0;
  std::uint32_t first_copy = 0;
  std::uint32_t copy_count = 0;
  bool primary = false;  ///< the one read of these bytes that counts for the member's checksum
};

/// Elements of a read that are copied to one place in the unit.
struct Copy {
  std::uint64_t skip = 0;  ///< byte of the read
  std::uint64_t at = 0;    ///< byte of the unit
  std::uint64_t elems = 0;
  DType from = DType::kU8;
  bool accumulate = false;  ///< adds to a mean
};

/// Elements of a unit that are the mean of `count` accumulated values.
struct Mean {
  std::uint64_t at = 0;
  std::uint64_t elems = 0;
  std::uint64_t count = 0;
};

/// Instructions for one unit. Bytes that no copy writes are zero.
struct Program {
  DType to = DType::kU8;
  std::vector<Read> reads;  ///< by member and offset
  std::vector<Copy> copies;
  std::vector<Mean> means;
  std::uint64_t covered_bytes =
      0;  ///< of the unit; if less than its size, the rest is padding with zeros
};

/// Source of a target tensor's elements.
struct Feed {
  std::uint32_t source = 0;  ///< index into the source map's tensors
  bool primary = false;      ///< the first target tensor that reads it
};

struct Totals {
  std::uint64_t units = 0;
  std::uint64_t output_files = 0;   ///< including links
  std::uint64_t output_bytes = 0;   ///< whole files, without links
  std::uint64_t linked_files = 0;   ///< CloneMode::kLink
  std::uint64_t payload_bytes = 0;  ///< bytes written by units
  std::uint64_t read_bytes = 0;     ///< bytes read by units
  std::uint64_t verify_bytes =
      0;  ///< other bytes of partly used members, which are read to verify these
  std::uint64_t members_read = 0;
  std::uint64_t members_unread = 0;
};

/// Known properties of a plan's source, which Make need not compute again.
struct KnownSource {
  bool proved = false;  ///< layout::Validate has succeeded
  /// Index of the source tensor for each target tensor, with the same state, type and
  /// shape. If empty, Make finds sources by name. A caller that passes indexes has made the
  /// target from these source tensors, so Make checks neither the target nor the pairs.
  /// \pre the indexes exist
  std::span<const std::uint32_t> tensors;
};

/// The copy program of a conversion from source map to target map. Programs
/// are computed unit by unit, so that a plan of any size needs little memory.
/// Pure: same input, same plan. Source: docs/architecture.md, "Plan and run".
class Plan {
 public:
  /// Checks both maps (layout::Validate) and finds a source for every
  /// target tensor: the same (name, state), otherwise "weight" from "fp32"
  /// or "fp32" from "weight", with a dtype conversion if the types differ.
  /// \pre both outlive the plan
  /// \error kBadInput  errors of Validate; a target tensor has no source or another
  ///        shape, both named; kUnsupported  a dtype conversion that does not exist
  static Result<Plan> Make(const layout::ShardMap& source, const Target& target,
                           const KnownSource& known = {});

  const layout::ShardMap& source() const { return *source_; }
  const Target& target() const { return *target_; }
  const Totals& totals() const { return totals_; }

  std::uint64_t unit_count() const { return totals_.units; }
  /// \pre index < unit_count()
  Unit unit(std::uint64_t index) const;
  /// Returns the unit with byte `byte` of all payloads laid end to end; unit_count()
  /// past the last one.
  std::uint64_t unit_of_byte(std::uint64_t byte) const;
  /// Returns the bytes of all units before a unit; for unit_count(), of all units.
  std::uint64_t byte_of_unit(std::uint64_t index) const;
  /// Divides the units into one range per rank, of equal bytes up to the size of a unit.
  /// \returns the first unit of each rank, then unit_count()
  /// \pre ranks > 0
  std::vector<std::uint64_t> FirstUnits(std::uint64_t ranks) const;
  /// Returns the index of the first unit of a payload.
  std::uint64_t first_unit(std::uint32_t file, std::uint32_t payload) const;
  /// Returns the number of units of a file; they follow the first unit of its first payload.
  std::uint64_t unit_count(std::uint32_t file) const;

  /// Computes a unit's program, reusing the memory of `program`. Thread-safe.
  void Fill(const Unit& unit, Program* program) const;

  /// Byte ranges of a source member that no primary read covers, ascending: padding, replicas.
  struct Gap {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Gap> Gaps(std::uint32_t member) const;

  /// Returns the source files with bytes that are copied without a checksum.
  /// Only a check of the file itself can detect that it changed during the copy.
  const std::vector<std::uint32_t>& files_without_sums() const { return files_without_sums_; }

  /// Returns the bytes of a source member that primary reads cover.
  std::uint64_t primary_bytes(std::uint32_t member) const { return primary_bytes_[member]; }

 private:
  struct Piece;
  struct Holder {
    std::uint32_t member;
    std::uint32_t array;
    std::uint32_t holder;
  };
  void AddRun(std::uint32_t target_tensor, bool counts, std::uint64_t logical, std::uint64_t elems,
              std::uint64_t at, std::vector<Piece>* pieces, Program* program) const;
  void FindInside();
  void FillMember(const Unit& unit, std::uint32_t member, Program* program) const;
  Status FindFeeds(std::span<const std::uint32_t> known);
  Status CountReads();

  const layout::ShardMap* source_ = nullptr;
  const Target* target_ = nullptr;
  std::vector<Feed> feeds_;                   // by target tensor
  std::vector<bool> primary_tensors_;         // by source tensor: some target tensor reads it
  std::vector<std::uint64_t> unit_begin_;     // by payload, over all files, plus one past the last
  std::vector<std::uint64_t> byte_begin_;     // by payload: bytes of all payloads before it
  std::vector<std::size_t> payload_begin_;    // by file: index into unit_begin_
  std::vector<std::uint64_t> primary_bytes_;  // by source member
  std::shared_ptr<const layout::ArrayIndex> target_index_;
  std::shared_ptr<const layout::ArrayIndex> source_index_;
  // By copied member without a checksum: the members inside it that have one, by offset.
  std::map<std::uint32_t, std::vector<std::uint32_t>> inside_;
  std::vector<std::uint32_t> files_without_sums_;
  std::vector<Holder> holders_;  // every part of a source array, by member
  Totals totals_;
};

}  // namespace shardwright::plan
