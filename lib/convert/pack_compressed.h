// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "convert/convert.h"
#include "engine/plan/target.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::convert {

/// Parts of a compressed catalogue.
struct CompressedPack {
  const layout::ShardMap& map;   ///< the members that fill the pack files
  const plan::Target& target;    ///< the pack files before compression
  exec::ByteSource& bytes;       ///< reads the members
  std::string catalogue_path;    ///< relative path of the catalogue
  const std::string& catalogue;  ///< its bytes
  std::string manifest_head;
};

/// Writes a catalogue with compressed pack files. This is not a copy program, because sizes are
/// known only after compression. Files are distributed over ranks, and blocks over threads. A
/// resumed run keeps the files that are complete. Every member is compared with its checksum.
/// \error kBadInput, kIo, kBusy, kStopped
/// Collective.
Result<ConvertReport> PackCompressed(comm::Comm& comm, const Input& input,
                                     const CompressedPack& pack, const ConvertOptions& options,
                                     Sink& sink);

}  // namespace shardwright::convert
