#include "exec/gather.h"

#include <cstring>

#include "format/zip/crc32.h"
#include "tensor/convert.h"

namespace shardwright::exec {
namespace {

/// Notes what a read contributes to its member's checksum.
/// \returns the CRC-32 of `bytes`, if it was worked out
std::optional<std::uint32_t> NoteShare(const layout::ShardMap& map, const plan::Read& read,
                                       std::span<const std::byte> bytes,
                                       std::vector<Share>* shares) {
  if (shares == nullptr || !read.primary) return std::nullopt;
  const layout::Member& member = map.members[read.member];
  if (!member.crc32) return std::nullopt;
  const std::uint32_t crc = zip::Crc32(bytes);
  const std::uint32_t share = zip::Crc32Share(crc, member.bytes - read.offset - read.bytes);
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

}  // namespace

Status GatherUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                  Workspace* workspace, std::vector<Share>* shares) {
  workspace->unit.resize(unit.bytes);
  return GatherUnitInto(plan, unit, source, workspace->unit, workspace, shares);
}

Status GatherUnitInto(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                      std::span<std::byte> unit_bytes, Workspace* workspace,
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
  // -0.0 is what adding to leaves every value as it is, a negative zero too.
  if (program.covered_bytes == unit.bytes && program.means.empty()) workspace->crc32 = 0;
  if (!program.means.empty()) workspace->sums.assign(unit.bytes / ItemSize(program.to), -0.0);
  for (const plan::Read& read : program.reads) {
    const plan::Copy& first = program.copies[read.first_copy];
    if (read.copy_count == 1 && first.from == program.to && !first.accumulate) {
      const std::span<std::byte> place = unit_bytes.subspan(first.at, read.bytes);
      SW_TRY(source.Read(read.member, read.offset, place));
      const std::optional<std::uint32_t> crc = NoteShare(plan.source(), read, place, shares);
      if (!crc) workspace->crc32.reset();
      if (workspace->crc32) {
        *workspace->crc32 ^= zip::Crc32Share(*crc, unit.bytes - first.at - read.bytes);
      }
      continue;
    }
    workspace->crc32.reset();
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
  return {};
}

}  // namespace shardwright::exec
