// SPDX-License-Identifier: Apache-2.0
// lib/trainer/cache: checkpoints in memory that trainers map.
// Load brings a source into shared memory of devices, in the layout of a target: share_out.h says
// which process holds what, and what several of them hold each reads a share of, and has the rest
// from the others. Serve (serve.h) does that and stays; a trainer finds it behind a socket file
// (attach.h), maps the memory, and reads from it what it needs, as from any other source. Nothing
// here knows a trainer or a device: lib/trainer/load and lib/engine/device do. Source:
// docs/formats/resident.md.

#pragma once

#include <cstdint>
#include <memory>

#include "checkpoints/model/format.h"
#include "convert/input.h"
#include "engine/device/device.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"
#include "trainer/cache/partition.h"

namespace shardwright::cache {

struct LoadOptions {
  bool verify = true;  ///< compare what is read with the checksums of its files
  unsigned threads = 1;
  /// Bytes of buffers that this rank may use beside the memory that is filled.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// A source in memory.
struct Loaded {
  SharedOut where;                         ///< the same on all ranks
  std::unique_ptr<device::Buffer> buffer;  ///< of this rank, kShared
  checkpoints::Layout layout;              ///< of the target
  // Sums over all ranks.
  std::uint64_t bytes_read = 0;      ///< of the source's payloads
  std::uint64_t bytes_gathered = 0;  ///< that ranks had from others in place of the source
  std::uint64_t bytes_resident = 0;
  std::uint64_t members_verified = 0;
};

/// Brings a source into shared memory of all ranks' devices, as the files of a target have it. Rank
/// r is process r of ShareOut. Each byte of the source is read by one rank, once. Tensors that the
/// target would have and the source has not, as weights that are rounded masters, are left to who
/// takes them.
/// \param format  the format of the target
/// \error kUnsupported  a format whose files are for no ranks in particular; kLimit  memory_bytes
///        is too small, or the device's memory; as `resolve` and `write` of the format, ShareOut,
///        plan::Plan::Make and exec::UnitLoop; kBadInput  damage
/// Collective.
Result<Loaded> Load(comm::Comm& comm, device::Device& device, const convert::Input& input,
                    const checkpoints::TargetSpec& spec, const checkpoints::Format& format,
                    const LoadOptions& options, Sink& sink);

}  // namespace shardwright::cache
