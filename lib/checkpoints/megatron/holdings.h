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

/// A place among the ranks that share a model.
struct Rank {
  std::uint64_t t = 0;
  std::uint64_t p = 0;
  std::uint64_t e = 0;
};

/// A tensor that a rank has of a virtual chunk.
struct Holding {
  std::uint32_t param = 0;  ///< index into the parameters
  bool shared = false;      ///< an embedding that another stage has as well
  bool copy = false;        ///< the last stage's copy of it, see CopyName
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

/// What a rank has of a virtual chunk of its stage, whatever its tensor rank, as `order` has it;
/// buffers as well, names of tied parameters not.
/// \param stages  see StagesOf
/// \param order   indices into `params`
/// Pure.
std::vector<Holding> HoldingsOf(const Args& args, std::span<const Stage> stages,
                                std::span<const Param> params, std::span<const std::uint32_t> order,
                                const Rank& rank, std::uint64_t chunk);

/// Indices of parameters in the order in which Megatron-Core's modules make them.
std::vector<std::uint32_t> ModelOrder(std::span<const Param> params);

/// True for experts, also of a source that took them for parameters like others.
bool IsExpert(const Param& param);

/// Ranks that share the gradient buffers of one optimizer of a chain, by their number in names of
/// torch_dist: tensor ranks first, then expert ranks, then stages.
/// \param experts  of the second optimizer
std::vector<Rank> BufferRanks(const Args& args, bool experts);

}  // namespace shardwright::checkpoints::megatron
