// SPDX-License-Identifier: Apache-2.0
#include "engine/plan/plan.h"

#include <algorithm>
#include <memory>

#include "engine/layout/states.h"
#include "engine/tensor/convert.h"
#include "support/base/checked.h"

namespace shardwright::plan {
namespace {

using layout::Fragment;
using layout::LogicalTensor;
using layout::Role;
using layout::ShardMap;

std::string Label(const LogicalTensor& tensor) {
  return "tensor \"" + tensor.name + "\" " + tensor.state;
}

}  // namespace

/// Source elements for a unit, before reads are merged.
struct Plan::Piece {
  std::uint32_t member;
  bool primary;
  bool accumulate;
  DType from;
  std::uint64_t offset;  // byte of the member
  std::uint64_t at;      // byte of the unit
  std::uint64_t elems;
};

Result<Plan> Plan::Make(const ShardMap& source, const Target& target, const KnownSource& known) {
  Plan plan;
  plan.source_ = &source;
  plan.target_ = &target;
  if (!known.proved) SW_TRY(layout::Validate(source));
  if (known.tensors.empty()) SW_TRY(layout::Validate(target.map));
  SW_TRY(plan.FindFeeds(known.tensors));
  plan.target_index_ = std::make_shared<layout::ArrayIndex>(target.map);
  plan.source_index_ = std::make_shared<layout::ArrayIndex>(source);
  for (std::size_t a = 0; a < source.arrays.size(); ++a) {
    for (std::size_t h = 0; h < source.arrays[a].regions.size(); ++h) {
      plan.holders_.push_back({source.arrays[a].regions[h].member, static_cast<std::uint32_t>(a),
                               static_cast<std::uint32_t>(h)});
    }
  }
  std::sort(plan.holders_.begin(), plan.holders_.end(), [](const Holder& a, const Holder& b) {
    return a.member != b.member ? a.member < b.member : a.array < b.array;
  });
  for (const OutputFile& file : target.files) {
    plan.payload_begin_.push_back(plan.unit_begin_.size());
    ++plan.totals_.output_files;
    if (file.clone == CloneMode::kLink) {
      ++plan.totals_.linked_files;
    } else {
      plan.totals_.output_bytes += file.bytes;
    }
    for (const Payload& payload : file.payloads) {
      plan.unit_begin_.push_back(plan.totals_.units);
      plan.byte_begin_.push_back(plan.totals_.payload_bytes);
      plan.totals_.units += CeilDiv(payload.bytes, kUnitBytes);
      plan.totals_.payload_bytes += payload.bytes;
    }
  }
  plan.payload_begin_.push_back(plan.unit_begin_.size());
  plan.unit_begin_.push_back(plan.totals_.units);
  plan.FindInside();
  SW_TRY(plan.CountReads());
  return plan;
}

void Plan::FindInside() {
  const std::vector<layout::Member>& members = source_->members;
  std::map<std::uint32_t, std::vector<std::uint32_t>> by_file;  // members copied without a checksum
  for (const OutputFile& file : target_->files) {
    for (const Payload& payload : file.payloads) {
      if (payload.kind != Payload::Kind::kMember || payload.member >= members.size()) continue;
      const layout::Member& whole = members[payload.member];
      if (!whole.crc32 && inside_.try_emplace(payload.member).second) {
        by_file[whole.file].push_back(payload.member);
      }
    }
  }
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    return members[a].offset < members[b].offset;
  };
  for (auto& [file, wholes] : by_file) {
    files_without_sums_.push_back(file);
    std::sort(wholes.begin(), wholes.end(), before);
  }
  for (std::uint32_t m = 0; m < members.size(); ++m) {
    const layout::Member& member = members[m];
    const auto found = by_file.find(member.file);
    if (found == by_file.end() || !member.crc32 || member.bytes == 0) continue;
    const auto after = std::upper_bound(found->second.begin(), found->second.end(), m, before);
    if (after == found->second.begin()) continue;
    const layout::Member& whole = members[*(after - 1)];
    const std::uint64_t at = member.offset - whole.offset;
    if (at <= whole.bytes && member.bytes <= whole.bytes - at) inside_[*(after - 1)].push_back(m);
  }
  for (auto& [whole, list] : inside_) {
    std::sort(list.begin(), list.end(), before);
    // Members of an edited catalogue may overlap; only the first of them is verified then.
    std::uint64_t end = 0;
    std::erase_if(list, [&](std::uint32_t m) {
      if (members[m].offset < end) return true;
      end = members[m].offset + members[m].bytes;
      return false;
    });
  }
}

Status Plan::FindFeeds(std::span<const std::uint32_t> known) {
  primary_tensors_.assign(source_->tensors.size(), false);
  feeds_.reserve(target_->map.tensors.size());
  if (!known.empty()) {
    SW_CHECK(known.size() == target_->map.tensors.size());
    for (const std::uint32_t tensor : known) {
      feeds_.push_back({tensor, !primary_tensors_[tensor]});
      primary_tensors_[tensor] = true;
    }
    return {};
  }
  const layout::TensorIndex index(*source_);
  for (const LogicalTensor& tensor : target_->map.tensors) {
    std::optional<std::uint32_t> found = index.Find(tensor.name, tensor.state);
    const bool weight = tensor.state == layout::kWeight;
    if (weight && found && source_->tensors[*found].dtype != tensor.dtype) {
      // Prefer rounding the master once to rounding an already rounded weight again.
      if (const auto master = index.Find(tensor.name, layout::kMaster)) found = master;
    }
    if (!found && weight) found = index.Find(tensor.name, layout::kMaster);
    if (!found && tensor.state == layout::kMaster) found = index.Find(tensor.name, layout::kWeight);
    if (!found)
      return Fail(Errc::kBadInput, Label(tensor),
                  ": the target needs it, but the source does not have it");
    const LogicalTensor& from = source_->tensors[*found];
    if (from.shape != tensor.shape && Elems(from.shape) != Elems(tensor.shape)) {
      return Fail(Errc::kBadInput, Label(tensor), ": target shape ", ToString(tensor.shape),
                  " and source shape ", ToString(from.shape), " differ in size");
    }
    if (!CanConvert(from.dtype, tensor.dtype)) {
      return Fail(Errc::kUnsupported, Label(tensor), ": no conversion from ", Name(from.dtype),
                  " to ", Name(tensor.dtype));
    }
    const bool mean = !from.fragments.empty() && from.fragments[0].role == Role::kPartial;
    if (mean && (!CanAverage(from.dtype) || !CanAverage(tensor.dtype))) {
      return Fail(Errc::kUnsupported, Label(tensor), ": cannot average its ranks' values from ",
                  Name(from.dtype), " to ", Name(tensor.dtype));
    }
    feeds_.push_back({*found, !primary_tensors_[*found]});
    primary_tensors_[*found] = true;
  }
  return {};
}

Status Plan::CountReads() {
  primary_bytes_.assign(source_->members.size(), 0);
  for (std::size_t t = 0; t < target_->map.tensors.size(); ++t) {
    const LogicalTensor& from = source_->tensors[feeds_[t].source];
    const std::uint64_t times = from.fragments.empty() || from.fragments[0].role != Role::kPartial
                                    ? 1
                                    : static_cast<std::uint64_t>(from.fragments.size());
    for (const Fragment& fragment : target_->map.tensors[t].fragments) {
      totals_.read_bytes += fragment.cut->covered_elems() * ItemSize(from.dtype) * times;
    }
  }
  for (std::size_t s = 0; s < source_->tensors.size(); ++s) {
    if (!primary_tensors_[s]) continue;
    const LogicalTensor& tensor = source_->tensors[s];
    for (const Fragment& fragment : tensor.fragments) {
      if (fragment.role == Role::kReplica) continue;
      const auto count = [&](std::uint64_t first, std::uint64_t last) {
        layout::ForHolders(*source_, fragment.at, first, last,
                           [&](const layout::Region& region, std::uint64_t, std::uint64_t elems) {
                             primary_bytes_[region.member] += elems * ItemSize(tensor.dtype);
                           });
      };
      if (fragment.cut->covered_elems() == fragment.cut->shard_elems()) {
        count(0, fragment.cut->shard_elems());
      } else {
        fragment.cut->ForShardRange(0, fragment.cut->shard_elems(), [&](const layout::Run& run) {
          count(run.shard, run.shard + run.elems);
        });
      }
    }
  }
  std::vector<bool> copied(source_->members.size());
  for (const OutputFile& file : target_->files) {
    for (const Payload& payload : file.payloads) {
      if (payload.kind != Payload::Kind::kMember) continue;
      if (payload.member >= source_->members.size() ||
          source_->members[payload.member].bytes != payload.bytes) {
        return Fail(Errc::kInternal, file.path, ": copies a source member of another size");
      }
      totals_.read_bytes += payload.bytes;
      copied[payload.member] = true;
    }
  }
  for (const auto& [whole, list] : inside_) {
    for (const std::uint32_t m : list) primary_bytes_[m] += source_->members[m].bytes;
  }
  for (std::size_t m = 0; m < primary_bytes_.size(); ++m) {
    const std::uint64_t bytes = source_->members[m].bytes;
    if (primary_bytes_[m] > bytes) {
      return Fail(Errc::kUnsupported, source_->files[source_->members[m].file], ": ",
                  source_->members[m].name, ": several tensors are views of the same elements (",
                  primary_bytes_[m], " bytes of tensors in a storage of ", bytes,
                  " bytes); clone them before the checkpoint is saved");
    }
    if (primary_bytes_[m] == 0) {
      (copied[m] ? totals_.members_read : totals_.members_unread) += bytes > 0 ? 1 : 0;
      continue;
    }
    ++totals_.members_read;
    if (source_->members[m].crc32) totals_.verify_bytes += bytes - primary_bytes_[m];
  }
  return {};
}

Unit Plan::unit(std::uint64_t index) const {
  const auto payload_at = std::upper_bound(unit_begin_.begin(), unit_begin_.end() - 1, index) - 1;
  const auto payload = static_cast<std::size_t>(payload_at - unit_begin_.begin());
  const auto file_at = std::upper_bound(payload_begin_.begin(), payload_begin_.end(), payload) - 1;
  Unit unit;
  unit.file = static_cast<std::uint32_t>(file_at - payload_begin_.begin());
  unit.payload = static_cast<std::uint32_t>(payload - *file_at);
  unit.first = (index - *payload_at) * kUnitBytes;
  unit.bytes =
      std::min(kUnitBytes, target_->files[unit.file].payloads[unit.payload].bytes - unit.first);
  return unit;
}

std::uint64_t Plan::unit_of_byte(std::uint64_t byte) const {
  if (byte >= totals_.payload_bytes) return totals_.units;
  const auto after = std::upper_bound(byte_begin_.begin(), byte_begin_.end(), byte);
  const auto payload = static_cast<std::size_t>(after - byte_begin_.begin()) - 1;
  return unit_begin_[payload] + (byte - byte_begin_[payload]) / kUnitBytes;
}

std::uint64_t Plan::byte_of_unit(std::uint64_t index) const {
  if (index >= totals_.units) return totals_.payload_bytes;
  const auto after = std::upper_bound(unit_begin_.begin(), unit_begin_.end() - 1, index);
  const auto payload = static_cast<std::size_t>(after - unit_begin_.begin()) - 1;
  return byte_begin_[payload] + (index - unit_begin_[payload]) * kUnitBytes;
}

std::vector<std::uint64_t> Plan::FirstUnits(std::uint64_t ranks) const {
  const std::uint64_t total = totals_.payload_bytes;
  std::vector<std::uint64_t> first(ranks + 1, totals_.units);
  for (std::uint64_t r = 0; r < ranks; ++r) {
    first[r] = unit_of_byte(total / ranks * r + total % ranks * r / ranks);
  }
  return first;
}

std::uint64_t Plan::first_unit(std::uint32_t file, std::uint32_t payload) const {
  return unit_begin_[payload_begin_[file] + payload];
}

std::uint64_t Plan::unit_count(std::uint32_t file) const {
  return unit_begin_[payload_begin_[file + 1]] - unit_begin_[payload_begin_[file]];
}

void Plan::AddRun(std::uint32_t target_tensor, bool counts, std::uint64_t logical,
                  std::uint64_t elems, std::uint64_t at, std::vector<Piece>* pieces,
                  Program* program) const {
  const Feed& feed = feeds_[target_tensor];
  const LogicalTensor& from = source_->tensors[feed.source];
  const std::uint64_t to_bytes = ItemSize(program->to);
  const std::uint64_t from_bytes = ItemSize(from.dtype);
  std::uint64_t partial = 0;
  for (const Fragment& fragment : from.fragments) {
    if (fragment.role == Role::kReplica) continue;
    if (fragment.role == Role::kPartial) ++partial;
    const bool accumulate = fragment.role == Role::kPartial;
    fragment.cut->ForLogicalRange(logical, logical + elems, [&](const layout::Run& run) {
      std::uint64_t position = at + (run.logical - logical) * to_bytes;
      layout::ForHolders(
          *source_, fragment.at, run.shard, run.shard + run.elems,
          [&](const layout::Region& region, std::uint64_t element, std::uint64_t count) {
            pieces->push_back({region.member, feed.primary && counts, accumulate, from.dtype,
                               region.offset + element * from_bytes, position, count});
            position += count * to_bytes;
          });
    });
  }
  if (partial > 0) program->means.push_back({at, elems, partial});
  program->covered_bytes += elems * to_bytes;
}

void Plan::FillMember(const Unit& unit, std::uint32_t member, Program* program) const {
  program->to = DType::kU8;
  program->covered_bytes = unit.bytes;
  const auto add = [&](std::uint32_t from, std::uint64_t offset, std::uint64_t at,
                       std::uint64_t bytes, bool primary) {
    program->reads.push_back(
        {from, offset, bytes, static_cast<std::uint32_t>(program->copies.size()), 1, primary});
    program->copies.push_back({0, at, bytes, DType::kU8, false});
  };
  const auto inside = inside_.find(member);
  if (inside == inside_.end()) return add(member, unit.first, 0, unit.bytes, false);
  const std::vector<layout::Member>& members = source_->members;
  const std::uint64_t base = members[member].offset;
  const std::uint64_t last = base + unit.first + unit.bytes;  // from here on in bytes of the file
  std::uint64_t at = base + unit.first;
  const std::uint64_t first = at;
  auto next = std::partition_point(
      inside->second.begin(), inside->second.end(),
      [&](std::uint32_t m) { return members[m].offset + members[m].bytes <= at; });
  while (at < last) {
    const bool more = next != inside->second.end() && members[*next].offset < last;
    const std::uint64_t gap = (more ? std::max(members[*next].offset, at) : last) - at;
    if (gap > 0) add(member, at - base, at - first, gap, true);
    at += gap;
    if (!more) break;
    const layout::Member& inner = members[*next];
    const std::uint64_t count = std::min(inner.offset + inner.bytes, last) - at;
    add(*next++, at - inner.offset, at - first, count, true);
    at += count;
  }
}

void Plan::Fill(const Unit& unit, Program* program) const {
  program->reads.clear();
  program->copies.clear();
  program->means.clear();
  program->covered_bytes = 0;
  const Payload& payload = target_->files[unit.file].payloads[unit.payload];
  if (payload.kind == Payload::Kind::kInline) return;
  if (payload.kind == Payload::Kind::kMember) return FillMember(unit, payload.member, program);
  program->to = target_->map.arrays[payload.array].dtype;
  const std::uint64_t item = ItemSize(program->to);
  const std::uint64_t first = unit.first / item;
  std::vector<Piece> pieces;
  target_index_->ForRegionRange(
      payload.array, payload.holder, first, first + unit.bytes / item,
      [&](const layout::Span& span) {
        const Fragment& fragment = target_->map.tensors[span.tensor].fragments[span.fragment];
        // Each partial fragment of a target has all elements, so only the first one counts.
        const bool counts = fragment.role == Role::kOwner ||
                            (fragment.role == Role::kPartial && span.fragment == 0);
        const std::uint64_t base = (span.region_first - first) * item;
        fragment.cut->ForShardRange(
            span.shard_first, span.shard_first + span.elems, [&](const layout::Run& run) {
              AddRun(span.tensor, counts, run.logical, run.elems,
                     base + (run.shard - span.shard_first) * item, &pieces, program);
            });
      });
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    if (a.member != b.member) return a.member < b.member;
    if (a.offset != b.offset) return a.offset < b.offset;
    return a.at < b.at;
  });
  for (const Piece& piece : pieces) {
    const std::uint64_t bytes = piece.elems * ItemSize(piece.from);
    const std::uint64_t to_bytes = item;
    Read* read = program->reads.empty() ? nullptr : &program->reads.back();
    if (read == nullptr || read->member != piece.member ||
        read->offset + read->bytes != piece.offset || read->primary != piece.primary) {
      program->reads.push_back({piece.member, piece.offset, bytes,
                                static_cast<std::uint32_t>(program->copies.size()), 1,
                                piece.primary});
      program->copies.push_back({0, piece.at, piece.elems, piece.from, piece.accumulate});
      continue;
    }
    Copy& last = program->copies.back();
    if (last.from == piece.from && last.accumulate == piece.accumulate &&
        last.at + last.elems * to_bytes == piece.at) {
      last.elems += piece.elems;
    } else {
      program->copies.push_back({read->bytes, piece.at, piece.elems, piece.from, piece.accumulate});
      ++read->copy_count;
    }
    read->bytes += bytes;
  }
}

std::vector<Plan::Gap> Plan::Gaps(std::uint32_t member) const {
  std::vector<Gap> used;
  const auto [first, last] =
      std::equal_range(holders_.begin(), holders_.end(), Holder{member, 0, 0},
                       [](const Holder& a, const Holder& b) { return a.member < b.member; });
  for (auto holder = first; holder != last; ++holder) {
    const layout::Array& array = source_->arrays[holder->array];
    const layout::Region& region = array.regions[holder->holder];
    const std::uint64_t item = ItemSize(array.dtype);
    source_index_->ForRegionRange(
        holder->array, holder->holder, 0, region.elems, [&](const layout::Span& span) {
          const Fragment& fragment = source_->tensors[span.tensor].fragments[span.fragment];
          if (!primary_tensors_[span.tensor] || fragment.role == Role::kReplica) return;
          fragment.cut->ForShardRange(
              span.shard_first, span.shard_first + span.elems, [&](const layout::Run& run) {
                const std::uint64_t element = span.region_first + (run.shard - span.shard_first);
                used.push_back({region.offset + element * item, run.elems * item});
              });
        });
  }
  std::sort(used.begin(), used.end(),
            [](const Gap& a, const Gap& b) { return a.offset < b.offset; });
  std::vector<Gap> gaps;
  std::uint64_t end = 0;
  for (const Gap& stretch : used) {
    if (stretch.offset > end) gaps.push_back({end, stretch.offset - end});
    end = std::max(end, stretch.offset + stretch.bytes);
  }
  const std::uint64_t bytes = source_->members[member].bytes;
  if (end < bytes) gaps.push_back({end, bytes - end});
  return gaps;
}

}  // namespace shardwright::plan
