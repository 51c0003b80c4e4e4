// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/stages.h"

#include <string>

namespace shardwright::checkpoints::megatron {
namespace {

tl::unexpected<Error> DoNotDivide(const Args& args, std::uint64_t layers, std::uint64_t chunks) {
  return Fail(Errc::kBadInput, layers, " layers do not divide by ", chunks, " (pp=", args.pp,
              ", virtual chunks ", args.vpp, ")");
}

/// Returns the layers per chunk if the first or last stage has a different number.
Result<std::vector<std::uint64_t>> Uneven(const Args& args) {
  const std::uint64_t ends = args.first.value_or(0) + args.last.value_or(0);
  const std::uint64_t middle = args.pp - (args.first ? 1 : 0) - (args.last ? 1 : 0);
  if (args.pp < 2 || ends > args.layers) {
    return Fail(Errc::kBadInput, ends, " layers in the first and last of ", args.pp,
                " stages, the model has ", args.layers);
  }
  const std::uint64_t rest = args.layers - ends;
  if (middle == 0 ? rest != 0 : rest % middle != 0) return DoNotDivide(args, rest, middle);
  std::vector<std::uint64_t> counts(args.pp, middle == 0 ? 0 : rest / middle);
  if (args.first) counts.front() = *args.first;
  if (args.last) counts.back() = *args.last;
  for (std::uint64_t& count : counts) {
    if (count % args.vpp != 0) return DoNotDivide(args, count, args.vpp);
    count /= args.vpp;
  }
  return counts;
}

}  // namespace

Result<std::vector<Stage>> StagesOf(const Args& args) {
  if (args.listed_stages) {
    return Fail(Errc::kUnsupported, "args: pipeline_model_parallel_layout is not supported");
  }
  const std::uint64_t chunks = args.pp * args.vpp;
  std::vector<std::uint64_t> counts(args.pp);
  if (args.first || args.last) {
    if (args.embedding_counts || args.loss_counts) {
      return Fail(Errc::kUnsupported,
                  "args: explicit numbers of layers for the first or last stage cannot be combined "
                  "with counting the embedding or loss as a layer");
    }
    SW_TRY_ASSIGN(counts, Uneven(args));
  } else {
    const std::uint64_t layers =
        args.layers + (args.embedding_counts ? 1 : 0) + (args.loss_counts ? 1 : 0);
    if (layers % chunks != 0) return DoNotDivide(args, layers, chunks);
    counts.assign(args.pp, layers / chunks);
  }
  std::vector<Stage> stages(chunks);
  std::uint64_t at = 0;
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    std::uint64_t count = counts[chunk % args.pp];
    const std::uint64_t none = (args.embedding_counts && chunk == 0 ? 1 : 0) +
                               (args.loss_counts && chunk + 1 == chunks ? 1 : 0);
    if (none > count) return DoNotDivide(args, args.layers, chunks);
    count -= none;
    stages[chunk] = {at, count};
    at += count;
  }
  return stages;
}

}  // namespace shardwright::checkpoints::megatron
