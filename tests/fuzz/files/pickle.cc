// SPDX-License-Identifier: Apache-2.0
// Any bytes as a pickle. The writer writes each accepted pickle or returns an error. Its output
// must read back, and be written the same again.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "files/pickle/reader.h"
#include "files/pickle/writer.h"
#include "fuzz/mutate/mutate.h"
#include "support/base/result.h"

namespace pickle = shardwright::pickle;
using shardwright::Errc;
using shardwright::Result;

SW_FUZZ_MUTATION(MutatePickle)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size_bytes);
  std::size_t resume = 0;
  const Result<std::optional<std::size_t>> end = pickle::FindEnd(bytes, resume);
  const Result<pickle::Graph> graph = pickle::Load(bytes);
  if (!graph) {
    SW_CHECK(graph.error().code != Errc::kInternal);
    return 0;
  }
  SW_CHECK(end && *end == size_bytes);
  const Result<pickle::Dumped> first = pickle::Dump(graph->root, graph->storages);
  if (!first) {
    SW_CHECK(first.error().code == Errc::kBadInput || first.error().code == Errc::kLimit);
    return 0;
  }
  const Result<pickle::Graph> again = pickle::Load(first->bytes);
  SW_CHECK(again);
  const Result<pickle::Dumped> second = pickle::Dump(again->root, again->storages);
  SW_CHECK(second);
  SW_CHECK(first->bytes == second->bytes);
  return 0;
}
