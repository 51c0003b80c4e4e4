// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/gather.h"

#include <cstring>

#include "engine/tensor/convert.h"
#include "support/base/crc32.h"

namespace shardwright::exec {
namespace {

/// Adds a read to the checksum of its member. If the member has no checksum, records
/// only that it was read, because a resumed run keeps only units with recorded pieces.
/// \returns the CRC-32 of `bytes`, if it was computed
std::optional<std::uint32_t> NoteShare(const layout::ShardMap& map, const plan::Read& read,
                                       std::span<const std::byte> bytes,
                                       std::vector<Share>* shares) {
  if (shares == nullptr || !read.primary) return std::nullopt;
  const layout::Member& member = map.members[read.member];
  std::optional<std::uint32_t> crc;
  std::uint32_t share = 0;
  if (member.crc32) {
    crc = Crc32(bytes);
    share = Crc32Share(*crc, member.bytes - read.offset - read.bytes);
  }
  if (!shares->empty() && shares->back().member == read.member) {
    shares->back().crc_share ^= share;
    shares->back().bytes += read.bytes;
  } else {
    shares->push_back({read.member, share, read.bytes});
  }
  return crc;
}

void Place(const plan::Copy& copy, std::span<const std::byte> from, DType to,
           std::span<std::byte> unit_bytes, std::vector<double>* sums) {
  const std::span<const std::byte> elements =
      from.subspan(copy.skip, copy.elems * ItemSize(copy.from));
  if (copy.accumulate) {
    const std::uint64_t first = copy.at / ItemSize(to);
    Accumulate(copy.from, elements, std::span(*sums).subspan(first, copy.elems));
    return;
  }
  Convert(copy.from, elements, to, unit_bytes.subspan(copy.at, copy.elems * ItemSize(to)));
}

/// Prepares a unit before the first read is placed: sets bytes that no copy writes to zero.
void BeginUnit(const plan::Program& program, std::span<std::byte> unit_bytes,
               std::vector<double>* sums) {
  if (program.covered_bytes < unit_bytes.size()) {
    std::memset(unit_bytes.data(), 0, unit_bytes.size());
  }
  // Start from -0.0: adding it changes no value, not even a negative zero.
  if (!program.means.empty()) sums->assign(unit_bytes.size() / ItemSize(program.to), -0.0);
}

void PlaceRead(const plan::Program& program, const plan::Read& read,
               std::span<const std::byte> bytes, std::span<std::byte> unit_bytes,
               std::vector<double>* sums) {
  for (std::uint32_t c = 0; c < read.copy_count; ++c) {
    Place(program.copies[read.first_copy + c], bytes, program.to, unit_bytes, sums);
  }
}

/// Completes a unit after the last read: stores its means.
void EndUnit(const plan::Program& program, std::span<std::byte> unit_bytes,
             const std::vector<double>& sums) {
  const std::uint64_t item = ItemSize(program.to);
  for (const plan::Mean& mean : program.means) {
    StoreMean(std::span(sums).subspan(mean.at / item, mean.elems), mean.count, program.to,
              unit_bytes.subspan(mean.at, mean.elems * item));
  }
}

/// Returns the position in the unit of a read that is stored as one unchanged
/// piece. Absent if its elements are scattered, converted or averaged.
std::optional<std::uint64_t> PlaceOfWhole(const plan::Program& program, const plan::Read& read) {
  const plan::Copy& first = program.copies[read.first_copy];
  if (read.copy_count != 1 || first.from != program.to || first.accumulate) return std::nullopt;
  return first.at;
}

/// Computes the checksum of a unit from those of its pieces, as long as they determine it.
class UnitCrc {
 public:
  UnitCrc(const plan::Program& program, std::uint64_t unit_bytes) : unit_bytes_(unit_bytes) {
    if (program.covered_bytes == unit_bytes && program.means.empty()) crc_ = 0;
  }
  void Add(const std::optional<std::uint32_t>& crc, std::uint64_t at, std::uint64_t bytes) {
    if (!crc) crc_.reset();
    if (crc_) *crc_ ^= Crc32Share(*crc, unit_bytes_ - at - bytes);
  }
  void Forget() { crc_.reset(); }
  const std::optional<std::uint32_t>& value() const { return crc_; }

 private:
  const std::uint64_t unit_bytes_;
  std::optional<std::uint32_t> crc_;
};

}  // namespace

Status GatherUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                  std::span<std::byte> unit_bytes, Workspace* workspace, std::vector<Share>* shares,
                  std::optional<std::uint32_t>* crc32) {
  if (crc32 != nullptr) crc32->reset();
  const plan::Payload& payload = plan.target().files[unit.file].payloads[unit.payload];
  if (payload.kind == plan::Payload::Kind::kInline) {
    std::memcpy(unit_bytes.data(), payload.bytes_inline.data() + unit.first, unit.bytes);
    return {};
  }
  plan::Program& program = workspace->program;
  plan.Fill(unit, &program);
  BeginUnit(program, unit_bytes, &workspace->sums);
  UnitCrc crc(program, unit.bytes);
  for (const plan::Read& read : program.reads) {
    if (const auto at = PlaceOfWhole(program, read)) {
      const std::span<std::byte> place = unit_bytes.subspan(*at, read.bytes);
      SW_TRY(source.Read(read.member, read.offset, place));
      if (crc32 == nullptr) continue;
      crc.Add(NoteShare(plan.source(), read, place, shares), *at, read.bytes);
      continue;
    }
    crc.Forget();
    workspace->scratch.resize(read.bytes);
    SW_TRY(source.Read(read.member, read.offset, workspace->scratch));
    NoteShare(plan.source(), read, workspace->scratch, shares);
    PlaceRead(program, read, workspace->scratch, unit_bytes, &workspace->sums);
  }
  EndUnit(program, unit_bytes, workspace->sums);
  if (crc32 != nullptr) *crc32 = crc.value();
  return {};
}

std::optional<std::uint32_t> SumUnit(const plan::Plan& plan, const plan::Unit& unit,
                                     std::span<const std::byte> unit_bytes, Workspace* workspace,
                                     std::vector<Share>* shares) {
  const plan::Payload& payload = plan.target().files[unit.file].payloads[unit.payload];
  if (payload.kind == plan::Payload::Kind::kInline) return std::nullopt;
  plan::Program& program = workspace->program;
  plan.Fill(unit, &program);
  UnitCrc crc(program, unit.bytes);
  for (const plan::Read& read : program.reads) {
    const auto at = PlaceOfWhole(program, read);
    if (!at) {
      crc.Forget();
      continue;
    }
    const std::span<const std::byte> place = unit_bytes.subspan(*at, read.bytes);
    crc.Add(NoteShare(plan.source(), read, place, shares), *at, read.bytes);
  }
  return crc.value();
}

std::uint64_t ReadBytes(const plan::Program& program) {
  std::uint64_t bytes = 0;
  for (const plan::Read& read : program.reads) bytes += read.bytes;
  return bytes;
}

Status ReadUnit(const plan::Plan& plan, const plan::Program& program, ByteSource& source,
                std::span<std::byte> read_bytes, std::vector<Share>* shares) {
  for (const plan::Read& read : program.reads) {
    const std::span<std::byte> place = read_bytes.first(read.bytes);
    SW_TRY(source.Read(read.member, read.offset, place));
    NoteShare(plan.source(), read, place, shares);
    read_bytes = read_bytes.subspan(read.bytes);
  }
  return {};
}

void FinishUnit(const plan::Program& program, std::span<const std::byte> read_bytes,
                std::span<std::byte> unit_bytes, std::vector<double>* sums) {
  BeginUnit(program, unit_bytes, sums);
  for (const plan::Read& read : program.reads) {
    PlaceRead(program, read, read_bytes.first(read.bytes), unit_bytes, sums);
    read_bytes = read_bytes.subspan(read.bytes);
  }
  EndUnit(program, unit_bytes, *sums);
}

}  // namespace shardwright::exec
