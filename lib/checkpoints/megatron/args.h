// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/tensor/dtype.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Arguments of a run that describe its model and its layout over ranks.
/// No argument is required. Missing arguments have Megatron's default.
/// Source: docs/formats/megatron.md, "Arguments".
struct Args {  // NOLINT(clang-analyzer-optin.performance.Padding): in the order of meaning
  // Ranks.
  std::uint64_t tp = 1;
  std::uint64_t pp = 1;
  std::uint64_t vpp = 1;  ///< virtual chunks of a stage
  std::uint64_t ep = 1;
  std::uint64_t etp = 1;  ///< tensor parallel size of experts
  std::uint64_t cp = 1;
  std::uint64_t dp = 1;
  bool sequence_parallel = false;
  std::optional<std::uint64_t> first;  ///< layers of the first stage, if different from others
  std::optional<std::uint64_t> last;
  bool embedding_counts = false;  ///< as a layer when layers are distributed over stages
  bool loss_counts = false;
  bool listed_stages = false;  ///< an explicit layout lists the contents of each stage

  // Model.
  std::uint64_t layers = 0;
  std::uint64_t heads = 0;
  std::uint64_t groups = 0;     ///< query groups, each sharing a key and a value
  std::uint64_t channels = 0;   ///< per head
  bool attention_gate = false;  ///< a group of queries has as many gate heads
  std::uint64_t experts = 0;
  std::uint64_t mtp = 0;       ///< number of multi-token prediction layers
  bool old_mtp_names = false;  ///< module names of releases before 0.17: see ParamName::OldStack
  std::uint64_t vocab_multiple = 128;  ///< of the padded vocabulary, times tp
  std::optional<std::uint64_t> vocab;  ///< without padding
  bool untied = false;
  bool transformer_engine = false;  ///< norms are parts of the linear layers after them
  bool layers_differ = false;       ///< therefore keys of torch_dist have layer numbers
  bool hybrid = false;
  /// The argument that gives weights other values than in other programs, and its effect, or empty.
  std::string own_values;
  bool latent = false;         ///< attention keeps keys and values in a latent space
  std::optional<bool> swiglu;  ///< known only for real runs
  bool qk_layernorm = false;
  std::string normalization;  ///< "RMSNorm"; empty: unknown, as for the next field
  std::string positions;      ///< "rope"
  bool fp16 = false;
  bool quantized_weights = false;  ///< weights of 8 bits or fewer, saved as `dtype`
  DType dtype = DType::kF32;

  // Optimizer.
  std::string optimizer = "adam";
  bool decays_qk_norms = false;           ///< the norms of queries and keys have weight decay
  bool spares_embeddings = false;         ///< embeddings have no weight decay
  std::optional<double> vocabulary_rate;  ///< learning rate of embedding and output layer, if own
  bool distributed = false;
  /// The optimizer keeps of a master weight only what its bfloat16 weight lacks.
  bool remainders = false;
  bool overlap_grad_reduce = false;
  std::optional<bool> gradients_in_f32;  ///< default: yes for bfloat16, no for float16
  bool pad_buckets = false;
  bool unlimited_buckets = false;  ///< no bucketing, regardless of the sizes below
  std::optional<std::uint64_t> bucket_count;
  std::optional<std::uint64_t> bucket_elems;
  bool fully_parallel_save = false;

  std::optional<std::uint64_t> samples;  ///< consumed in training
};

/// Returns the dict of attributes of an argument namespace or a dict; null for other nodes.
const pickle::Node* AttributesOf(const pickle::Node* args);

/// \param args  argparse.Namespace, or a dict
/// \error kBadInput  an attribute has another type than Megatron gives it; names it
/// Pure.
Result<Args> ReadArgs(const pickle::Node* args);

}  // namespace shardwright::checkpoints::megatron
