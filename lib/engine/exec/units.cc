// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/units.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "engine/exec/for_each.h"
#include "support/base/crc32.h"

namespace shardwright::exec {

Status UnitLoop::ForUnits(std::span<const std::uint64_t> units, UnitSink& to, unsigned io_threads) {
  return ForAll(units, to, io_threads,
                [&](std::uint64_t index) { return Gather(index, false, to); });
}

Status UnitLoop::CopyUnits(std::span<const std::uint64_t> units, UnitSink& to) {
  return ForAll(units, to, 0, [&](std::uint64_t index) { return Gather(index, true, to); });
}

Status UnitLoop::SumUnits(std::span<const std::uint64_t> units, UnitSink& to) {
  SW_TRY(ForEach(arena_, units.size(), [&](std::uint64_t i) -> Status {
    const plan::Unit unit = plan_.unit(units[i]);
    SW_TRY_ASSIGN(const std::span<std::byte> bytes, to.Buffer(unit, unit.bytes));
    SW_CHECK(bytes.size() == unit.bytes);
    UnitRecord record;
    const auto crc32 = SumUnit(plan_, unit, bytes, &workspaces_.local(),
                               options_.sums == nullptr ? nullptr : &record.shares);
    SW_TRY(PutSummed({units[i], unit, bytes}, crc32, &record, to));
    if (options_.sums != nullptr) options_.sums->Add(record.shares);
    return {};
  }));
  return to.Drain();
}

template <class Work>
Status UnitLoop::ForAll(std::span<const std::uint64_t> units, UnitSink& to, unsigned io_threads,
                        const Work& work) {
  const auto one = [&](std::uint64_t i) -> Status {
    if (sink_.stop_requested()) return Fail(Errc::kStopped, options_.stopped);
    return work(units[i]);
  };
  SW_TRY(io_threads > 0 ? os::ForEachFile(units.size(), io_threads, one)
                        : ForEach(arena_, units.size(), one));
  return to.Drain();
}

Status UnitLoop::Gather(std::uint64_t index, bool sum_later, UnitSink& to) {
  const plan::Unit unit = plan_.unit(index);
  Workspace& workspace = workspaces_.local();
  if (to.converts()) return PutAsRead({index, unit, {}}, &workspace, to);
  SW_TRY_ASSIGN(std::span<std::byte> bytes, to.Buffer(unit, unit.bytes));
  if (bytes.empty()) {
    workspace.unit.resize(unit.bytes);
    bytes = workspace.unit;
  }
  SW_CHECK(bytes.size() == unit.bytes);
  UnitRecord record;
  std::optional<std::uint32_t> crc32;
  SW_TRY(GatherUnit(plan_, unit, source_, bytes, &workspace,
                    options_.sums == nullptr ? nullptr : &record.shares,
                    sum_later ? nullptr : &crc32));
  if (!sum_later && to.sums()) {
    SW_TRY(PutSummed({index, unit, bytes}, crc32, &record, to));
  } else {
    SW_TRY(to.Put({index, unit, bytes}));
  }
  Count(unit, record.shares);
  return {};
}

Status UnitLoop::PutAsRead(UnitInHand unit, Workspace* workspace, UnitSink& to) {
  const plan::Payload& payload = plan_.target().files[unit.unit.file].payloads[unit.unit.payload];
  std::vector<Share> shares;
  if (payload.kind == plan::Payload::Kind::kInline) {
    unit.bytes =
        std::as_bytes(std::span(payload.bytes_inline)).subspan(unit.unit.first, unit.unit.bytes);
  } else {
    plan_.Fill(unit.unit, &workspace->program);
    const std::uint64_t needed = ReadBytes(workspace->program);
    SW_TRY_ASSIGN(std::span<std::byte> bytes, to.Buffer(unit.unit, needed));
    if (bytes.empty()) {
      workspace->scratch.resize(needed);
      bytes = workspace->scratch;
    }
    SW_CHECK(bytes.size() == needed);
    SW_TRY(ReadUnit(plan_, workspace->program, source_, bytes,
                    options_.sums == nullptr ? nullptr : &shares));
    unit.bytes = bytes;
    unit.program = &workspace->program;
  }
  SW_TRY(to.Put(unit));
  Count(unit.unit, shares);
  return {};
}

Status UnitLoop::PutSummed(UnitInHand unit, std::optional<std::uint32_t> crc32, UnitRecord* record,
                           UnitSink& to) {
  record->sum = {crc32 ? *crc32 : Crc32(unit.bytes), DigestOf(unit.bytes),
                 static_cast<std::uint32_t>(unit.bytes.size())};
  unit.record = record;
  return to.Put(unit);
}

/// Counts a unit and its pieces after it was put.
void UnitLoop::Count(const plan::Unit& unit, std::span<const Share> shares) {
  if (options_.sums != nullptr) options_.sums->Add(shares);
  sink_.Progress(bytes_done_.fetch_add(unit.bytes, std::memory_order_relaxed) + unit.bytes,
                 options_.bytes_total);
}

void SortByPlace(const plan::Plan& plan, ByteSource& source, std::vector<std::uint64_t>* units) {
  if (!source.has_places()) return;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> placed;
  placed.reserve(units->size());
  plan::Program program;
  for (const std::uint64_t index : *units) {
    const plan::Unit unit = plan.unit(index);
    const plan::Payload& payload = plan.target().files[unit.file].payloads[unit.payload];
    std::optional<std::uint64_t> place;
    if (payload.kind != plan::Payload::Kind::kInline) {
      plan.Fill(unit, &program);
      for (const plan::Read& read : program.reads) {
        place = source.PlaceOf(read.member, read.offset);
        if (place) break;
      }
    }
    placed.emplace_back(place.value_or(0), index);
  }
  std::ranges::stable_sort(placed, {}, &std::pair<std::uint64_t, std::uint64_t>::first);
  for (std::size_t i = 0; i < placed.size(); ++i) (*units)[i] = placed[i].second;
}

Status ForUnitsInRounds(comm::Comm& comm, UnitLoop& loop, const plan::Plan& plan, Exchange& source,
                        std::span<const std::uint64_t> units, std::uint64_t most, UnitSink& to,
                        unsigned io_threads) {
  return InRounds(comm, units.size(), most, [&](std::uint64_t first, std::uint64_t last) -> Status {
    const auto part = units.subspan(first, last - first);
    SW_TRY(source.Round(plan, part));
    SW_TRY(to.BeginRound(part));
    return comm.Agree(loop.ForUnits(part, to, io_threads));
  });
}

}  // namespace shardwright::exec
