// SPDX-License-Identifier: Apache-2.0
// Any bytes as the index of a DCP folder. An accepted index can be written, and reads and writes
// the same again. Partitioned into the indexes of two ranks, it merges to the same index.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "files/dcp/index.h"
#include "fuzz/mutate/mutate.h"
#include "support/base/result.h"

namespace dcp = shardwright::dcp;
using shardwright::Errc;
using shardwright::Result;

namespace {

/// Two ranks have the boxes of every tensor in turn, and both have all objects.
void Unite(const dcp::Index& index) {
  std::array<dcp::Index, 2> ranks = {index, index};
  std::size_t objects = 0;
  for (std::size_t e = 0; e < index.entries.size(); ++e) {
    objects += index.entries[e].is_tensor ? 0 : 1;
    for (dcp::Index& rank : ranks) rank.entries[e].chunks.clear();
    for (std::size_t c = 0; c < index.entries[e].chunks.size(); ++c) {
      ranks[c % 2].entries[e].chunks.push_back(index.entries[e].chunks[c]);
    }
  }
  dcp::IndexUnion all;
  SW_CHECK(all.Add("__0.metadata", std::move(ranks[0])));
  SW_CHECK(all.Add("__1.metadata", std::move(ranks[1])));
  const Result<dcp::Index> made = std::move(all).Finish();
  SW_CHECK(made);
  SW_CHECK(made->entries.size() == index.entries.size());
  SW_CHECK(made->copies.size() == objects);
  for (std::size_t e = 0; e < index.entries.size(); ++e) {
    SW_CHECK(made->entries[e].name == index.entries[e].name);
    SW_CHECK(made->entries[e].chunks.size() == index.entries[e].chunks.size());
  }
}

}  // namespace

SW_FUZZ_MUTATION(MutatePickle)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size_bytes);
  const Result<dcp::Index> index = dcp::ReadIndex(bytes);
  if (!index) {
    SW_CHECK(index.error().code != Errc::kInternal);
    return 0;
  }
  static_cast<void>(dcp::CheckVolumes(*index));
  Unite(*index);
  const Result<std::string> first = dcp::DumpIndex(*index);
  SW_CHECK(first);
  const Result<dcp::Index> again = dcp::ReadIndex(*first);
  SW_CHECK(again);
  SW_CHECK(again->entries.size() == index->entries.size());
  const Result<std::string> second = dcp::DumpIndex(*again);
  SW_CHECK(second);
  SW_CHECK(*first == *second);
  return 0;
}
