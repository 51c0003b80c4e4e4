#pragma once

#include <string>

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "plan/target.h"
#include "ucp/convert.h"

namespace shardwright::ucp {

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

}  // namespace shardwright::ucp
