// SPDX-License-Identifier: Apache-2.0
// Any bytes as the pickle of one rank's model file and of its optimizer file: the reader returns a
// checkpoint of one rank or an error. The writer makes a checkpoint for three ranks, or fails.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoints/registry.h"
#include "checkpoints/tp_rules/patterns.h"
#include "fuzz/checkpoints/pickled_file.h"
#include "fuzz/mutate/mutate.h"
#include "support/base/result.h"

namespace checkpoints = shardwright::checkpoints;
namespace fuzz = shardwright::fuzz;
using shardwright::Errc;
using shardwright::Result;

SW_FUZZ_MUTATION(MutateTwoPickles)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size_bytes);
  const auto [model, optimizer] = fuzz::TwoPickles(bytes);
  checkpoints::SourceSet set;
  set.format = "dtensor";
  set.tag = "actor";
  set.files.push_back(fuzz::PickledFile("model_world_size_1_rank_0.pt", model));
  if (!optimizer.empty()) {
    set.files.push_back(fuzz::PickledFile("optim_world_size_1_rank_0.pt", optimizer));
  }
  const Result<checkpoints::Checkpoint> read =
      checkpoints::ReadCheckpoint(set, checkpoints::Patterns());
  if (!read) {
    SW_CHECK(read.error().code != Errc::kInternal);
    return 0;
  }
  const checkpoints::Format* format = checkpoints::FindFormat("dtensor");
  const checkpoints::TargetSpec spec{{{"dp_shard", "3"}}};
  const Result<checkpoints::Layout> layout = format->resolve(spec, *read);
  if (!layout) {
    SW_CHECK(layout.error().code != Errc::kInternal);
    return 0;
  }
  const Result<checkpoints::Written> written = format->write(*read, *layout);
  if (!written) {
    SW_CHECK(written.error().code != Errc::kInternal);
    return 0;
  }
  SW_CHECK(shardwright::layout::Validate(written->target.map) ||
           read->map.tensors.size() > written->target.map.tensors.size());
  return 0;
}
