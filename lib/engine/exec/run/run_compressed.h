// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "engine/exec/byte_source.h"
#include "engine/exec/run/run.h"
#include "engine/plan/plan.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/comm/comm.h"

namespace shardwright::exec {

/// Executes a plan like Run, but writes each file that has payloads in compressed form (zpack.h).
/// Every such payload is a source member. Files are distributed over ranks, and blocks over
/// threads, because sizes are known only after compression. A resumed run keeps files that are
/// complete.
/// \error kBadInput, kIo, kBusy, kStopped
/// Collective. Source: docs/formats/catalogue.md.
Result<RunReport> RunCompressed(comm::Comm& comm, const plan::Plan& plan, ByteSource& source,
                                const RunOptions& options, Sink& sink);

}  // namespace shardwright::exec
