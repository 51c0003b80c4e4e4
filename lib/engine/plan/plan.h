// SPDX-License-Identifier: Apache-2.0
// lib/engine/plan: from a source map and a target map to a copy program.
// A Target (target.h) describes the files to write, to the byte, before anything is read. Plan
// intersects its map with that of the source. The payloads of the output are cut into units of 1
// MiB; Fill works out for one unit which bytes to read and where they go, converted or averaged, so
// that a plan of any size is small. All of it is pure.

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

/// Size of a unit of work: one stretch of one payload, gathered, checksummed and written at once. A
/// constant, since the checksums in a manifest are over units (docs/formats/manifest.md).
inline constexpr std::uint64_t kUnitBytes = std::uint64_t{1} << 20;

/// One stretch of an output payload. Units of a payload are kUnitBytes long but for the last.
struct Unit {
  std::uint32_t file = 0;
  std::uint32_t payload = 0;  ///< in the file
  std::uint64_t first = 0;    ///< byte of the payload
  std::uint64_t bytes = 0;
};

/// A stretch of a source member to be read at once.
struct Read {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;  ///< byte of the member
  std::uint64_t bytes = 0;
  std::uint32_t first_copy = 0;
  std::uint32_t copy_count = 0;
  bool primary = false;  ///< the one read of these bytes that counts towards the member's checksum
};

/// Elements of a read that go to one place of the unit.
struct Copy {
  std::uint64_t skip = 0;  ///< byte of the read
  std::uint64_t at = 0;    ///< byte of the unit
  std::uint64_t elems = 0;
  DType from = DType::kU8;
  bool accumulate = false;  ///< one of the values of a mean
};

/// Elements of a unit that are the mean of `count` accumulated values.
struct Mean {
  std::uint64_t at = 0;
  std::uint64_t elems = 0;
  std::uint64_t count = 0;
};

/// What to do for one unit. Bytes that no copy reaches are zero.
struct Program {
  DType to = DType::kU8;
  std::vector<Read> reads;  ///< by member and offset
  std::vector<Copy> copies;
  std::vector<Mean> means;
  std::uint64_t covered_bytes =
      0;  ///< of the unit; less than its size means that there is padding to zero
};

/// Where a target tensor's elements come from.
struct Feed {
  std::uint32_t source = 0;  ///< index into the source map's tensors
  bool primary = false;      ///< the first target tensor that reads it
};

struct Totals {
  std::uint64_t units = 0;
  std::uint64_t output_files = 0;   ///< links as well
  std::uint64_t output_bytes = 0;   ///< whole files, but for those that are links
  std::uint64_t linked_files = 0;   ///< CloneMode::kLink
  std::uint64_t payload_bytes = 0;  ///< what units write
  std::uint64_t read_bytes = 0;     ///< what units read
  std::uint64_t verify_bytes =
      0;  ///< further bytes of members that are used in part, read to verify them
  std::uint64_t members_read = 0;
  std::uint64_t members_unread = 0;
};

/// What is known of a plan's source, and need not be found out again.
struct KnownSource {
  bool proved = false;  ///< layout::Validate was passed
  /// By target tensor: index of the source tensor with the same state, type and shape; empty: Make
  /// looks sources up by name. A caller that passes indexes has made the target from these source
  /// tensors, so Make proves neither the target nor the pairs.
  /// \pre the indexes exist
  std::span<const std::uint32_t> tensors;
};

/// The copy program of a conversion: source map → target map. Programs are worked out unit by unit,
/// so that a plan of any size is small.
/// Pure: same input, same plan. Source: docs/architecture.md, "Plan and run".
class Plan {
 public:
  /// Proves both maps (layout::Validate) and finds a source for every target tensor: the same
  /// (name, state), else "weight" from "fp32" or "fp32" from "weight", with a conversion of dtype
  /// where they differ.
  /// \pre both outlive the plan
  /// \error kBadInput  what Validate says; a target tensor without a source, or shapes that differ,
  ///        both named; kUnsupported  a conversion of dtype that does not exist
  static Result<Plan> Make(const layout::ShardMap& source, const Target& target,
                           const KnownSource& known = {});

  const layout::ShardMap& source() const { return *source_; }
  const Target& target() const { return *target_; }
  const Totals& totals() const { return totals_; }

  std::uint64_t unit_count() const { return totals_.units; }
  /// \pre index < unit_count()
  Unit unit(std::uint64_t index) const;
  /// The unit that holds byte `byte` of all payloads laid end to end; unit_count() past the last.
  /// For cutting the work into parts of equal bytes.
  std::uint64_t unit_of_byte(std::uint64_t byte) const;
  /// Index of the first unit of a payload.
  std::uint64_t first_unit(std::uint32_t file, std::uint32_t payload) const;
  /// Units of all payloads of a file; they follow the first one of its first payload.
  std::uint64_t unit_count(std::uint32_t file) const;

  /// Works out a unit's program, reusing `program`'s memory. Thread-safe.
  void Fill(const Unit& unit, Program* program) const;

  /// Stretches of a source member that no primary read touches, ascending: padding, replicas.
  struct Gap {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  std::vector<Gap> Gaps(std::uint32_t member) const;

  /// Source files of which bytes without a checksum are copied as they are: nothing but the file
  /// itself can tell that it has stayed what it was.
  const std::vector<std::uint32_t>& files_without_sums() const { return files_without_sums_; }

  /// Bytes of a source member that primary reads touch.
  std::uint64_t primary_bytes(std::uint32_t member) const { return primary_bytes_[member]; }

 private:
  struct Piece;
  struct Holder {
    std::uint32_t member;
    std::uint32_t array;
    std::uint32_t holder;
  };
  void AddRun(std::uint32_t target_tensor, bool owner, std::uint64_t logical, std::uint64_t elems,
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
  // By member without a checksum that is copied: the members within it that have one, by offset.
  std::map<std::uint32_t, std::vector<std::uint32_t>> inside_;
  std::vector<std::uint32_t> files_without_sums_;
  std::vector<Holder> holders_;  // every region of the source, by member
  Totals totals_;
};

}  // namespace shardwright::plan
