#pragma once

#include <nlohmann/json_fwd.hpp>

#include "base/result.h"
#include "base/sink.h"
#include "comm/comm.h"
#include "ucp/convert.h"
#include "ucp/input.h"

namespace shardwright::ucp {

/// True if writing `topology` natively would only repeat the source's own files.
bool CanLink(const Input& input, const dialect::Topology& topology);

/// Makes OUTPUT/<tag> from links to the source's files (clones or copies where the file system
/// cannot link), with `latest` and a manifest; nothing is read. \returns the totals: files and
/// bytes that OUTPUT holds Collective; rank 0 acts.
Result<plan::Totals> LinkCheckpoint(comm::Comm& comm, const Input& input,
                                    const nlohmann::ordered_json& head,
                                    const ConvertOptions& options, Sink& sink);

}  // namespace shardwright::ucp
