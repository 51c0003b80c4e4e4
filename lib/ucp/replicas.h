#pragma once

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "exec/byte_source.h"
#include "layout/shard_map.h"

namespace shardwright::ucp {

/// Demands that every replica repeats its owner bit for bit.
/// \error kBadInput  names the tensor and both files
/// Collective; tensors are spread over ranks and threads. \pre every rank can read every file
Status CompareReplicas(comm::Comm& comm, const layout::ShardMap& map, exec::ByteSource& bytes,
                       unsigned threads, Sink& sink);

}  // namespace shardwright::ucp
