// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "convert/convert.h"
#include "engine/plan/target.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// What a compressed catalogue is made of.
struct CompressedPack {
  const layout::ShardMap& map;   ///< the members that fill the pack files
  const plan::Target& target;    ///< the pack files in plain form
  exec::ByteSource& bytes;       ///< reads the members
  std::string catalogue_path;    ///< relative
  const std::string& catalogue;  ///< its bytes
  std::string manifest_head;
};

/// Writes a catalogue with compressed pack files. Sizes are known only when all is compressed, so
/// this does not run as a copy program; files are spread over ranks, blocks over threads. A resumed
/// run keeps the files that are complete. Every member is compared with its checksum.
/// \error kBadInput, kIo, kBusy, kStopped
/// Collective.
Result<ConvertReport> PackCompressed(comm::Comm& comm, const Input& input,
                                     const CompressedPack& pack, const ConvertOptions& options,
                                     Sink& sink);

}  // namespace shardwright::convert
