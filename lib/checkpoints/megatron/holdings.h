// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/stages.h"
#include "checkpoints/model/checkpoint.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Coordinates among the ranks that share a model.
struct Rank {
  std::uint64_t t = 0;
  std::uint64_t p = 0;
  std::uint64_t e = 0;
};

/// A tensor of a virtual chunk on one rank.
struct Holding {
  std::uint32_t param = 0;  ///< index into the parameters
  bool shared = false;      ///< an embedding that another stage also has
  bool copy = false;        ///< the last stage's copy of the embedding, see CopyName
};

/// Returns true if the last stage has a copy of the first stage's embedding, for a tied output
/// layer or for layers of multi-token prediction.
bool HasCopy(const Args& args);

/// Returns true if a chunk has a parameter or module of the model on any expert rank.
/// \param index  index of the chunk in `stages`
bool StageHas(const ParamName& name, std::span<const Stage> stages, std::uint64_t index);

/// Returns the name of the last stage's copy of the embedding.
std::string_view CopyName(const Args& args);

/// Checks that Megatron-Core can save multi-token prediction in this number of pipeline stages.
/// \error kUnsupported  tied embeddings or learned positions in several stages
/// Pure.
Status CheckMtpStages(const Args& args);

/// Returns the tensors of a virtual chunk on a rank, in the sequence of `order`. The result
/// does not depend on the tensor rank. It contains buffers but no aliases of tied parameters.
/// \param stages  see StagesOf
/// \param order   indices into `params`
/// Pure.
std::vector<Holding> HoldingsOf(const Args& args, std::span<const Stage> stages,
                                std::span<const Param> params, std::span<const std::uint32_t> order,
                                const Rank& rank, std::uint64_t chunk);

/// Returns the indices of parameters in the order in which Megatron-Core's modules create them.
std::vector<std::uint32_t> ModelOrder(std::span<const Param> params);

/// Returns true for experts, also if the source treats them as ordinary parameters.
bool IsExpert(const Param& param);

/// Returns the ranks that share the gradient buffers of one chained optimizer, by their
/// number in torch_dist names. Tensor ranks vary fastest, then expert ranks, then stages.
/// \param experts  selects the second optimizer
std::vector<Rank> BufferRanks(const Args& args, bool experts);

}  // namespace shardwright::checkpoints::megatron
