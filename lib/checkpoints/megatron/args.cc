// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/args.h"

#include <algorithm>

#include "support/base/limits.h"
#include "support/base/str_cat.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Kind;
using pickle::Node;

constexpr std::uint64_t kMost = std::uint64_t{1} << 40;

/// Reads attributes one by one and records the first error.
class Attributes {
 public:
  explicit Attributes(const Node* dict) : dict_(dict) {}

  /// Returns an attribute, or null if it is absent or None.
  const Node* Find(std::string_view name) const {
    const Node* node = dict_ == nullptr ? nullptr : dict_->Find(name);
    return node == nullptr || node->is_none() ? nullptr : node;
  }

  /// Returns true if the run's release has the attribute, even with value None.
  bool Has(std::string_view name) const { return dict_->Find(name) != nullptr; }

  std::optional<std::uint64_t> Count(std::string_view name) {
    const Node* node = Find(name);
    if (node == nullptr) return std::nullopt;
    const Result<std::uint64_t> count = pickle::AsCount(node);
    if (count && *count <= kMost) return *count;
    Wrong(name, "a count", node);
    return std::nullopt;
  }

  std::uint64_t Count(std::string_view name, std::uint64_t otherwise) {
    return Count(name).value_or(otherwise);
  }

  /// Returns a number of ranks, which is at least 1.
  std::uint64_t Ranks(std::string_view name, std::uint64_t otherwise) {
    const std::uint64_t count = Count(name, otherwise);
    if (count >= 1 && count <= limits::kRanks) return count;
    if (status_) {
      status_ = Fail(Errc::kBadInput, "args: ", name, ": 1 to ", limits::kRanks,
                     " ranks expected, found ", count);
    }
    return 1;
  }

  bool Flag(std::string_view name) {
    const Node* node = Find(name);
    if (node == nullptr) return false;
    if (node->kind == Kind::kBool) return node->integer != 0;
    Wrong(name, "True or False", node);
    return false;
  }

  std::string Text(std::string_view name) {
    const Node* node = Find(name);
    if (node == nullptr) return "";
    const Result<std::string_view> text = pickle::AsString(node);
    if (text) return std::string(*text);
    Wrong(name, "a text", node);
    return "";
  }

  Status status() const { return status_; }

 private:
  void Wrong(std::string_view name, const char* wanted, const Node* found) {
    if (!status_) return;
    status_ = Fail(Errc::kBadInput, "args: ", name, ": ", wanted, " expected, found ",
                   pickle::Describe(found));
  }

  const Node* dict_;
  Status status_;
};

void ReadRanks(Attributes& from, Args* out) {
  const std::uint64_t old = from.Ranks("model_parallel_size", 1);
  out->tp = from.Ranks("tensor_model_parallel_size", old);
  out->pp = from.Ranks("pipeline_model_parallel_size", 1);
  out->vpp = from.Ranks("virtual_pipeline_model_parallel_size", 1);
  out->ep = from.Ranks("expert_model_parallel_size", 1);
  out->etp = from.Ranks("expert_tensor_parallel_size", out->tp);
  out->cp = from.Ranks("context_parallel_size", 1);
  out->dp = from.Ranks("data_parallel_size", 1);
  out->sequence_parallel = from.Flag("sequence_parallel");
  for (const char* name :
       {"decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"}) {
    if (!out->first) out->first = from.Count(name);
  }
  for (const char* name :
       {"decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"}) {
    if (!out->last) out->last = from.Count(name);
  }
  out->embedding_counts = from.Flag("account_for_embedding_in_pipeline_split");
  out->loss_counts = from.Flag("account_for_loss_in_pipeline_split");
  out->listed_stages = from.Find("pipeline_model_parallel_layout") != nullptr;
}

/// Returns true if layers differ. Keys of torch_dist then contain layer numbers.
bool LayersDiffer(Attributes& from, std::uint64_t experts) {
  const Node* every = from.Find("moe_layer_freq");
  const bool listed = every != nullptr && (every->is_list() || every->is_string());
  const Result<std::uint64_t> count = pickle::AsCount(every);
  return (experts > 0 && (listed || (count && *count > 1))) ||
         from.Find("linear_attention_freq") != nullptr ||
         from.Find("heterogeneous_layers_config_path") != nullptr ||
         from.Flag("hetereogenous_dist_checkpoint");
}

DType WeightsOf(const Attributes& from) {
  const Node* node = from.Find("params_dtype");
  if (node != nullptr && node->kind == Kind::kGlobal && node->text.starts_with("torch.")) {
    if (const auto dtype = DTypeFromName(std::string_view(node->text).substr(6))) return *dtype;
  }
  return DType::kF32;
}

/// Returns the first argument that changes what the values of weights mean, and how.
std::string OwnValuesOf(Attributes& from) {
  for (const char* name : {"layernorm_zero_centered_gamma", "apply_layernorm_1p"}) {
    if (from.Flag(name)) return StrCat(name, ": norms store their weights minus 1");
  }
  if (from.Flag("rotary_interleaved")) {
    return "rotary_interleaved: heads rotate even elements with odd ones";
  }
  for (const char* name :
       {"moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"}) {
    if (from.Count(name)) return StrCat(name, ": rows of gate and up projections alternate");
  }
  return "";
}

void ReadModel(Attributes& from, Args* out) {
  out->layers = from.Count("num_layers", 0);
  out->heads = from.Count("num_attention_heads", 0);
  out->groups = out->heads;
  if (from.Flag("group_query_attention")) out->groups = from.Count("num_query_groups", out->heads);
  out->channels = from.Count("kv_channels", 0);
  out->attention_gate = from.Flag("attention_output_gate");
  out->experts = from.Count("num_experts", 0);
  out->mtp = from.Count("mtp_num_layers", 0);
  out->old_mtp_names = out->mtp > 0 && !from.Has("mtp_use_repeated_layer");
  out->vocab_multiple = std::max<std::uint64_t>(from.Count("make_vocab_size_divisible_by", 128), 1);
  out->vocab = from.Count("vocab_size");
  out->untied = from.Flag("untie_embeddings_and_output_weights");
  out->transformer_engine = from.Text("transformer_impl") == "transformer_engine";
  out->layers_differ = LayersDiffer(from, out->experts);
  out->hybrid = from.Find("hybrid_layer_pattern") != nullptr ||
                from.Find("hybrid_override_pattern") != nullptr || from.Flag("is_hybrid_model");
  out->own_values = OwnValuesOf(from);
  out->latent = from.Flag("multi_latent_attention");
  if (from.Find("swiglu") != nullptr) out->swiglu = from.Flag("swiglu");
  out->qk_layernorm = from.Flag("qk_layernorm");
  const auto word = [&](std::string_view name) {
    const Node* node = from.Find(name);  // only used to choose a map; other types are ignored
    return node != nullptr && node->is_string() ? node->text : std::string();
  };
  out->normalization = word("normalization");
  out->positions = word("position_embedding_type");
  out->fp16 = from.Flag("fp16");
  for (const char* name : {"fp8_param", "fp8_param_gather", "fp4_param", "fp4_param_gather"}) {
    out->quantized_weights = out->quantized_weights || from.Flag(name);
  }
  out->dtype = WeightsOf(from);
}

void ReadOptimizer(Attributes& from, Args* out) {
  if (const std::string name = from.Text("optimizer"); !name.empty()) out->optimizer = name;
  const Node* rule = from.Find("no_weight_decay_cond_type");
  out->decays_qk_norms =
      from.Flag("apply_wd_to_qk_layernorm") ||
      (rule != nullptr && (rule->text == "apply_wd_to_qk_layernorm" || rule->text == "qwen3_next"));
  // Releases with that flag (0.16 and later) let embeddings decay.
  out->spares_embeddings =
      from.Find("embedding_init_method_std") != nullptr && !from.Has("apply_wd_to_qk_layernorm");
  if (const Node* rate = from.Find("decoupled_lr"); rate != nullptr) {
    const Result<double> number = pickle::AsFloat(rate);
    if (number) out->vocabulary_rate = *number;
  }
  out->distributed = from.Flag("use_distributed_optimizer");
  const Node* kept = from.Find("store_param_remainders");  // default: yes
  out->remainders = from.Flag("use_precision_aware_optimizer") && from.Flag("bf16") &&
                    !from.Flag("optimizer_cpu_offload") &&
                    (kept == nullptr || from.Flag("store_param_remainders"));
  out->overlap_grad_reduce = from.Flag("overlap_grad_reduce");
  if (from.Find("accumulate_allreduce_grads_in_fp32") != nullptr) {
    out->gradients_in_f32 = from.Flag("accumulate_allreduce_grads_in_fp32");
  }
  out->pad_buckets = from.Flag("ddp_pad_buckets_for_high_nccl_busbw");
  out->unlimited_buckets = from.Flag("overlap_param_gather_with_optimizer_step");
  out->bucket_count = from.Count("ddp_num_buckets");
  out->bucket_elems = from.Count("ddp_bucket_size");
  out->fully_parallel_save = from.Flag("ckpt_fully_parallel_save");
  out->samples = from.Count("consumed_train_samples");
}

}  // namespace

const Node* AttributesOf(const Node* args) {
  if (args == nullptr) return nullptr;
  if (args->is_dict()) return args;
  const bool object = args->kind == Kind::kObject && args->state != nullptr;
  return object && args->state->is_dict() ? args->state : nullptr;
}

Result<Args> ReadArgs(const Node* args) {
  const Node* dict = AttributesOf(args);
  if (dict == nullptr) {
    return Fail(Errc::kBadInput, "args: a namespace expected, found ", pickle::Describe(args));
  }
  Attributes from(dict);
  Args out;
  ReadRanks(from, &out);
  ReadModel(from, &out);
  ReadOptimizer(from, &out);
  SW_TRY(from.status());
  for (const char* name : {"gtp_weight_remat_size", "expert_gtp_weight_remat_size"}) {
    const std::uint64_t shards = from.Ranks(name, 1);
    SW_TRY(from.status());
    if (shards == 1) continue;
    return Fail(Errc::kUnsupported, "args: ", name, " is ", shards,
                ": weights that ranks split and rematerialize are not supported, only 1 is");
  }
  // Each factor is at most kRanks, so no product of three overflows.
  const bool too_many = out.tp * out.pp * out.cp > limits::kRanks ||
                        out.tp * out.pp * out.cp * out.dp > limits::kRanks ||
                        out.pp * out.vpp > limits::kRanks || out.ep * out.etp > limits::kRanks;
  if (!too_many) return out;
  return Fail(Errc::kLimit, "args: more than ", limits::kRanks, " ranks or chunks");
}

}  // namespace shardwright::checkpoints::megatron
