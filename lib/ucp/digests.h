#pragma once

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "ucp/input.h"

namespace shardwright::ucp {

/// Compares files of a source with the digests that the checkpoint itself tells of them
/// (Checkpoint::digests). Ranks and threads share them out; each file is read whole.
/// \error kBadInput  names the file and both digests; kNotFound  a file is gone
/// Collective.
Status VerifyDigests(comm::Comm& comm, const Input& input, unsigned threads, Sink& sink);

}  // namespace shardwright::ucp
