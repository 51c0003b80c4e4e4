// SPDX-License-Identifier: Apache-2.0
#include "convert/api/calls_internal.h"

#include "support/base/run_options.h"

namespace shardwright::internal {

Result<convert::InputOptions> InputOf(const Source& source) {
  if (source.paths.empty()) return Fail(Errc::kUsage, "a source needs a path");
  for (const std::string& path : source.paths) {
    if (path.empty()) return Fail(Errc::kUsage, "a path of the source is empty");
  }
  if (source.maps.empty() && !source.map_sizes.empty()) {
    return Fail(Errc::kUsage, "map sizes \"", source.map_sizes, "\" require a map");
  }
  convert::InputOptions options;
  options.source_paths = source.paths;
  options.pattern_files = source.pattern_files;
  options.node_local = source.node_local;
  options.allow_mixed = source.allow_mixed;
  options.weights_of = source.weights_of;
  options.maps = {source.maps, source.map_sizes, {}, false, nullptr};
  options.proof.reset();
  return options;
}

Status CheckWork(unsigned threads, std::uint64_t memory_bytes) {
  if (threads < 1 || threads > kThreadsMax) {
    return Fail(Errc::kUsage, threads, " threads: 1 to ", kThreadsMax, " expected");
  }
  if (memory_bytes < kMemoryMinBytes) {
    return Fail(Errc::kUsage, memory_bytes, " bytes of memory: at least ", kMemoryMinBytes,
                " expected");
  }
  return {};
}

}  // namespace shardwright::internal
