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

// Gathers the bytes of one unit. engine/exec/units.h does it for many units.

namespace shardwright::exec {

/// A thread's memory for one unit at a time.
struct Workspace {
  plan::Program program;
  std::vector<std::byte> unit;     ///< the unit's bytes
  std::vector<std::byte> scratch;  ///< a read before its elements are scattered or converted
  std::vector<double> sums;        ///< accumulators of means, by element of the unit
};

/// Upper bound of the bytes of a workspace. The largest case is
/// a unit of 2-byte elements converted from 8-byte elements.
inline constexpr std::uint64_t kWorkspaceBytes = 9 * plan::kUnitBytes;

/// Fills `unit_bytes` with a unit: reads, scatters, converts, averages, and pads with zeros.
/// \param shares  receives the pieces of source members
///        that were read; null to skip their checksums
/// \param crc32   receives the unit's CRC-32 if the CRCs of its pieces determine
///        it; null to leave pieces that are stored unchanged in the unit to SumUnit
/// \pre unit_bytes.size() == unit.bytes
/// \error what the source returns
/// Local; many threads may gather at the same time, each with its own workspace.
Status GatherUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                  std::span<std::byte> unit_bytes, Workspace* workspace, std::vector<Share>* shares,
                  std::optional<std::uint32_t>* crc32);

/// Computes the checksums that GatherUnit skipped, from the
/// bytes that it gathered, and records the pieces in `shares`.
/// \returns the unit's CRC-32 if it follows from the CRCs of its pieces
/// Local.
std::optional<std::uint32_t> SumUnit(const plan::Plan& plan, const plan::Unit& unit,
                                     std::span<const std::byte> unit_bytes, Workspace* workspace,
                                     std::vector<Share>* shares);

// The two halves of GatherUnit, for a sink that converts by itself (UnitSink::converts).

/// Returns the total bytes of all reads of a program.
std::uint64_t ReadBytes(const plan::Program& program);

/// Reads the source bytes of a program, one read after the other, unconverted.
/// \param shares  receives the pieces of source members that were read; null: no checksums
/// \pre read_bytes.size() == ReadBytes(program)
/// \error what the source returns
/// Local.
Status ReadUnit(const plan::Plan& plan, const plan::Program& program, ByteSource& source,
                std::span<std::byte> read_bytes, std::vector<Share>* shares);

/// Makes a unit from the bytes of ReadUnit: scatters, converts, averages, and pads with zeros.
/// \param sums  buffer for the accumulators of means
/// Pure.
void FinishUnit(const plan::Program& program, std::span<const std::byte> read_bytes,
                std::span<std::byte> unit_bytes, std::vector<double>* sums);

}  // namespace shardwright::exec
