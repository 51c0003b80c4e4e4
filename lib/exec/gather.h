#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "exec/byte_source.h"
#include "exec/integrity.h"
#include "plan/plan.h"

namespace shardwright::exec {

/// A thread's memory for one unit at a time.
struct Workspace {
  plan::Program program;
  std::vector<std::byte> unit;     ///< the unit's bytes
  std::vector<std::byte> scratch;  ///< a read that is scattered or converted
  std::vector<double> sums;        ///< accumulators of means, by element of the unit
  /// The unit's CRC-32, where the checksums of the pieces read into it already tell it.
  std::optional<std::uint32_t> crc32;
};

/// Upper bound of a workspace's bytes: a unit of 2-byte elements converted from 8-byte ones is the
/// largest.
inline constexpr std::uint64_t kWorkspaceBytes = 9 * plan::kUnitBytes;

/// Brings a unit's bytes together in workspace->unit: reads, scatters, converts, averages, pads
/// with zeros. \param shares  where to note the pieces of source members read; null to skip their
/// checksums \error what the source returns Local; many threads may gather at once, each with its
/// own workspace.
Status GatherUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                  Workspace* workspace, std::vector<Share>* shares);

/// Same, into `unit_bytes` instead of workspace->unit, and faster: of pieces that come to lie there
/// as they were read nothing is noted before SumUnit. \pre unit_bytes.size() == unit.bytes
Status CopyUnit(const plan::Plan& plan, const plan::Unit& unit, ByteSource& source,
                std::span<std::byte> unit_bytes, Workspace* workspace, std::vector<Share>* shares);

/// What CopyUnit left out, from the bytes that it has brought together.
/// \returns the unit's CRC-32, where those of the pieces tell it
/// Local.
std::optional<std::uint32_t> SumUnit(const plan::Plan& plan, const plan::Unit& unit,
                                     std::span<const std::byte> unit_bytes, Workspace* workspace,
                                     std::vector<Share>* shares);

}  // namespace shardwright::exec
