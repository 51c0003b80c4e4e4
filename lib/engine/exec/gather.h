// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/exec/byte_source.h"
#include "engine/exec/integrity.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"

// How the bytes of one unit are brought together. engine/exec/units.h does it for many.

namespace shardwright::exec {

/// A thread's memory for one unit at a time.
struct Workspace {
  plan::Program program;
  std::vector<std::byte> unit;     ///< the unit's bytes
  std::vector<std::byte> scratch;  ///< a read that is scattered or converted
  std::vector<double> sums;        ///< accumulators of means, by element of the unit
};

/// Upper bound of a workspace's bytes: a unit of 2-byte elements converted from 8-byte ones is the
/// largest.
inline constexpr std::uint64_t kWorkspaceBytes = 9 * plan::kUnitBytes;

/// Brings a unit's bytes together in `unit_bytes`: reads, scatters, converts, averages, pads with
/// zeros.
/// \param shares  gets the pieces of source members that were read; null to skip their checksums
/// \param crc32   gets the unit's CRC-32 where those of the pieces tell it; null to note no piece
///        that comes to lie in the unit as it was read: SumUnit does that later
/// \pre unit_bytes.size() == unit.bytes
/// \error what the source returns
/// Local; many threads may gather at once, each with its own workspace.
Status GatherUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                  std::span<std::byte> unit_bytes, Workspace* workspace, std::vector<Share>* shares,
                  std::optional<std::uint32_t>* crc32);

/// Checksums what GatherUnit left out, from the bytes that it brought together, and notes the
/// pieces.
/// \returns the unit's CRC-32, where those of the pieces tell it
/// Local.
std::optional<std::uint32_t> SumUnit(const plan::Plan& plan, const plan::Unit& unit,
                                     std::span<const std::byte> unit_bytes, Workspace* workspace,
                                     std::vector<Share>* shares);

// The two halves of GatherUnit, for a sink that converts by itself (UnitSink::converts).

/// Bytes of all reads of a program.
std::uint64_t ReadBytes(const plan::Program& program);

/// Reads what a program needs, one read after the other, as the source has it.
/// \param shares  gets the pieces of source members that were read; null to skip their checksums
/// \pre read_bytes.size() == ReadBytes(program)
/// \error what the source returns
/// Local.
Status ReadUnit(const plan::Plan& plan, const plan::Program& program, ByteSource& source,
                std::span<std::byte> read_bytes, std::vector<Share>* shares);

/// Makes a unit of what ReadUnit has read: scatters, converts, averages, pads with zeros.
/// \param sums  memory for it
/// Pure.
void FinishUnit(const plan::Program& program, std::span<const std::byte> read_bytes,
                std::span<std::byte> unit_bytes, std::vector<double>* sums);

}  // namespace shardwright::exec
