// SPDX-License-Identifier: Apache-2.0
// Any bytes as metadata.json and integrity.json, or as the pickles of a legacy folder of one rank.
// The reader returns a checkpoint or an error. The test writes each checkpoint for two pipeline
// stages, or gets an error.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoints/megatron/integrity.h"
#include "checkpoints/megatron/megatron.h"
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
  if (bytes.starts_with('{')) {
    const auto checked = checkpoints::megatron::CheckMetadata(bytes, "metadata.json");
    SW_CHECK(checked || checked.error().code != Errc::kInternal);
    const auto sums = checkpoints::megatron::ParseIntegrity(bytes, "integrity.json");
    if (sums) {
      const auto again = checkpoints::megatron::ParseIntegrity(
          checkpoints::megatron::IntegrityText(*sums), "integrity.json");
      SW_CHECK(again && *again == *sums);
    } else {
      SW_CHECK(sums.error().code != Errc::kInternal);
    }
    return 0;
  }
  const auto [model, optimizer] = fuzz::TwoPickles(bytes);
  checkpoints::SourceSet set;
  set.format = "megatron";
  set.tag = "iter_0000004";
  const std::string folder = "mp_rank_00/";
  if (!optimizer.empty()) {
    set.files.push_back(fuzz::PickledFile(folder + "distrib_optim.pt", optimizer));
  }
  set.files.push_back(fuzz::PickledFile(folder + "model_optim_rng.pt", model));
  const Result<checkpoints::Checkpoint> read =
      checkpoints::ReadCheckpoint(set, checkpoints::Patterns());
  if (!read) {
    SW_CHECK(read.error().code != Errc::kInternal);
    return 0;
  }
  const checkpoints::Format* format = checkpoints::FindFormat("megatron");
  const checkpoints::TargetSpec spec{
      {{"pp", "2"}, {"files", model.size() % 2 == 0 ? "torch" : "torch_dist"}}};
  const Result<checkpoints::Layout> layout = format->resolve(spec, *read);
  if (!layout) {
    SW_CHECK(layout.error().code != Errc::kInternal);
    return 0;
  }
  const Result<checkpoints::Written> written = format->write(*read, *layout);
  SW_CHECK(written || written.error().code != Errc::kInternal);
  return 0;
}
