#include "exec/gather.h"

#include <cstring>

#include "format/zip/crc32.h"
#include "tensor/convert.h"

namespace shardwright::exec {
namespace {

/// Notes what a read contributes to its member's checksum; where there is none to compare with,
/// that it was read: a resumed run keeps only units that say what they are made of. \returns the
/// CRC-32 of `bytes`, if it was worked out
std::optional<std::uint32_t> NoteShare(const layout::ShardMap& map, const plan::Read& read,
                                       std::span<const std::byte> bytes,
                                       std::vector<Share>* shares) {
  if (shares == nullptr || !read.primary) return std::nullopt;
  const layout::Member& member = map.members[read.member];
  std::optional<std::uint32_t> crc;
  std::uint32_t share = 0;
  if (member.crc32) {
    crc = zip::Crc32(bytes);
    share = zip::Crc32Share(*crc, member.bytes - read.offset - read.bytes);
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
           std::span<std::byte> unit_bytes, Workspace* workspace) {
  const std::span<const std::byte> elements =
      from.subspan(copy.skip, copy.elems * ItemSize(copy.from));
  if (copy.accumulate) {
    const std::uint64_t first = copy.at / ItemSize(to);
    Accumulate(copy.from, elements, std::span(workspace->sums).subspan(first, copy.elems));
    return;
  }
  Convert(copy.from, elements, to, unit_bytes.subspan(copy.at, copy.elems * ItemSize(to)));
}

/// The place of a read whose bytes stay as they are and together; absent: they are scattered,
/// converted or added up.
std::optional<std::uint64_t> PlaceOfWhole(const plan::Program& program, const plan::Read& read) {
  const plan::Copy& first = program.copies[read.first_copy];
  if (read.copy_count != 1 || first.from != program.to || first.accumulate) return std::nullopt;
  return first.at;
}

/// The checksum of a unit, as long as those of its pieces tell it.
class UnitCrc {
 public:
  UnitCrc(const plan::Program& program, std::uint64_t unit_bytes) : unit_bytes_(unit_bytes) {
    if (program.covered_bytes == unit_bytes && program.means.empty()) crc_ = 0;
  }
  void Add(const std::optional<std::uint32_t>& crc, std::uint64_t at, std::uint64_t bytes) {
    if (!crc) crc_.reset();
    if (crc_) *crc_ ^= zip::Crc32Share(*crc, unit_bytes_ - at - bytes);
  }
  void Forget() { crc_.reset(); }
  const std::optional<std::uint32_t>& value() const { return crc_; }

 private:
  const std::uint64_t unit_bytes_;
  std::optional<std::uint32_t> crc_;
};

/// \param sum_whole  whether pieces that stay whole are noted, too
Status Gather(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
              std::span<std::byte> unit_bytes, bool sum_whole, Workspace* workspace,
              std::vector<Share>* shares) {
  workspace->crc32.reset();
  const plan::Payload& payload = plan.target().files[unit.file].payloads[unit.payload];
  if (payload.kind == plan::Payload::Kind::kInline) {
    std::memcpy(unit_bytes.data(), payload.bytes_inline.data() + unit.first, unit.bytes);
    return {};
  }
  plan::Program& program = workspace->program;
  plan.Fill(unit, &program);
  if (program.covered_bytes < unit.bytes) std::memset(unit_bytes.data(), 0, unit.bytes);
  UnitCrc crc(program, unit.bytes);
  // -0.0 is what adding to leaves every value as it is, a negative zero too.
  if (!program.means.empty()) workspace->sums.assign(unit.bytes / ItemSize(program.to), -0.0);
  for (const plan::Read& read : program.reads) {
    if (const auto at = PlaceOfWhole(program, read)) {
      const std::span<std::byte> place = unit_bytes.subspan(*at, read.bytes);
      SW_TRY(source.Read(read.member, read.offset, place));
      if (sum_whole) crc.Add(NoteShare(plan.source(), read, place, shares), *at, read.bytes);
      continue;
    }
    crc.Forget();
    workspace->scratch.resize(read.bytes);
    SW_TRY(source.Read(read.member, read.offset, workspace->scratch));
    NoteShare(plan.source(), read, workspace->scratch, shares);
    for (std::uint32_t c = 0; c < read.copy_count; ++c) {
      Place(program.copies[read.first_copy + c], workspace->scratch, program.to, unit_bytes,
            workspace);
    }
  }
  for (const plan::Mean& mean : program.means) {
    const std::uint64_t item = ItemSize(program.to);
    StoreMean(std::span(workspace->sums).subspan(mean.at / item, mean.elems), mean.count,
              program.to, unit_bytes.subspan(mean.at, mean.elems * item));
  }
  if (sum_whole) workspace->crc32 = crc.value();
  return {};
}

}  // namespace

Status GatherUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                  Workspace* workspace, std::vector<Share>* shares) {
  workspace->unit.resize(unit.bytes);
  return Gather(plan, unit, source, workspace->unit, true, workspace, shares);
}

Status CopyUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                std::span<std::byte> unit_bytes, Workspace* workspace, std::vector<Share>* shares) {
  return Gather(plan, unit, source, unit_bytes, false, workspace, shares);
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

}  // namespace shardwright::exec
