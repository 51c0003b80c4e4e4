#pragma once

#include <vector>

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "dialect/checkpoint.h"
#include "exec/byte_source.h"

namespace shardwright::ucp {

/// Proves what a reader had to infer: a parameter's master weights, rounded to the type of its
/// weight, are its weight. Compares the first and last elements of what each rank holds of it.
/// Nothing to do where nothing was inferred.
/// \param file_owner  as Input::file_owner
/// \error kUnsupported  a parameter's masters lie elsewhere; names it, the files and both values
/// Collective.
Status ProveInferred(comm::Comm& comm, const dialect::Checkpoint& checkpoint,
                     const std::vector<int>& file_owner, exec::ByteSource& bytes, Sink& sink);

}  // namespace shardwright::ucp
