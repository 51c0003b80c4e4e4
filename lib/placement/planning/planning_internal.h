// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tbb/task_arena.h>

#include <cstdint>
#include <string>

#include "engine/exec/for_each.h"
#include "placement/planning/planning.h"

namespace shardwright::placement::internal {

/// Runs `body` with the given number of threads.
template <class Body>
auto InArena(unsigned threads, const Body& body) {
  tbb::task_arena arena(exec::ArenaThreads(threads));
  return arena.execute(body);
}

/// Reads one recording without its idle records.
/// \param counts  true on the rank that reports its reading
/// \param idle_records  increased by the number of idle records
/// \error as token_counts::ReadLoads
/// Local.
Result<token_counts::TokenTrace> ReadTrace(const std::string& path, bool counts,
                                           std::uint64_t* idle_records, Sink& sink);

/// Fails without rates: times would be 0, and hecate would silently copy nothing.
/// \error kUsage
/// Pure.
Status CheckRates(const PlanRequest& request, const Cluster& cluster);

}  // namespace shardwright::placement::internal
