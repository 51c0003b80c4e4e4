// SPDX-License-Identifier: Apache-2.0
// lib/trainer/cache: checkpoints in memory that trainers map.
// Load brings a source into shared memory of devices, in the layout of a target.
// partition.h assigns tensors to processes. If several processes need the same data, each
// reads a part and receives the rest from the others. Serve (serve.h) loads and keeps the
// memory. A trainer connects to its socket file (attach.h), maps the memory, and reads it
// like any other source. The folder knows neither trainers (see lib/trainer/load) nor
// kinds of devices (see lib/engine/device). Source: docs/formats/cache.md.

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
  bool verify = true;  ///< compare source data with the checksums of its files
  unsigned threads = 1;
  /// Limit for the buffers of this rank in bytes, in addition to the memory that is filled.
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
};

/// A source in memory.
struct Loaded {
  SharedOut where;                         ///< placement of tensors, the same on all ranks
  std::unique_ptr<device::Buffer> buffer;  ///< of this rank, kShared
  checkpoints::Layout layout;              ///< of the target
  // Totals over all ranks.
  std::uint64_t bytes_read = 0;      ///< of the source's payloads
  std::uint64_t bytes_gathered = 0;  ///< received from other ranks instead of the source
  std::uint64_t bytes_cached = 0;
  std::uint64_t members_verified = 0;
};

/// Loads a source into shared memory of all ranks' devices, in the layout of a target's
/// files. Rank r is process r of ShareOut. Each byte of the source is read once, by one
/// rank. Tensors of the target that the source lacks, such as weights derived from masters,
/// are omitted: the trainer computes them when it reads the memory.
/// \param format  the format of the target
/// \error kUnsupported  the files of the format are not assigned to ranks;
///        kLimit  memory_bytes or the device's memory is too small; as `resolve` and `write`
///        of the format, ShareOut, plan::Plan::Make and exec::UnitLoop; kBadInput  damage
/// Collective.
Result<Loaded> Load(comm::Comm& comm, device::Device& device, const convert::Input& input,
                    const checkpoints::TargetSpec& spec, const checkpoints::Format& format,
                    const LoadOptions& options, Sink& sink);

}  // namespace shardwright::cache
