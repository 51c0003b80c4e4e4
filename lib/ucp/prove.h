#pragma once

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "dialect/core/checkpoint.h"
#include "exec/exchange.h"

namespace shardwright::ucp {

/// Proves what a reader had to infer: a parameter's master weights, rounded to the type of its
/// weight, are its weight. Compares the first and last elements of what each rank holds of it.
/// Nothing to do where nothing was inferred.
/// \error kUnsupported  a parameter's masters lie elsewhere; names it, the files and both values
/// \error kBadInput  they do not fit because a file is damaged, as its checksum tells; names it
/// Collective.
Status ProveInferred(comm::Comm& comm, const dialect::Checkpoint& checkpoint,
                     exec::Exchange& source, Sink& sink);

}  // namespace shardwright::ucp
