// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/run_config.h"

#include <array>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::megatron {
namespace {

/// Attributes with the same name and meaning in a configuration and in Megatron's arguments.
constexpr std::array<std::string_view, 16> kCounts = {"tensor_model_parallel_size",
                                                      "pipeline_model_parallel_size",
                                                      "virtual_pipeline_model_parallel_size",
                                                      "expert_model_parallel_size",
                                                      "expert_tensor_parallel_size",
                                                      "context_parallel_size",
                                                      "num_attention_heads",
                                                      "num_query_groups",
                                                      "kv_channels",
                                                      "make_vocab_size_divisible_by",
                                                      "num_layers_in_first_pipeline_stage",
                                                      "num_layers_in_last_pipeline_stage",
                                                      "mtp_num_layers",
                                                      "num_moe_experts",
                                                      "moe_mlp_glu_interleave_size",
                                                      "moe_shared_expert_glu_interleave_size"};
constexpr std::array<std::string_view, 7> kFlags = {"sequence_parallel",
                                                    "attention_output_gate",
                                                    "multi_latent_attention",
                                                    "layernorm_zero_centered_gamma",
                                                    "rotary_interleaved",
                                                    "account_for_embedding_in_pipeline_split",
                                                    "account_for_loss_in_pipeline_split"};
constexpr std::array<std::string_view, 3> kWords = {"normalization", "position_embedding_type",
                                                    "pipeline_model_parallel_layout"};

/// Returns the value of a line without quotes and comment, or nothing for null and non-scalars.
std::optional<std::string_view> ScalarIn(std::string_view value) {
  if (value.front() == '"' || value.front() == '\'') {
    const std::size_t end = value.find(value.front(), 1);
    if (end == std::string_view::npos) return std::nullopt;
    return value.substr(1, end - 1);
  }
  value = Trimmed(value.substr(0, value.find(" #")));
  constexpr std::string_view kOthers = "&*|>[{!%@`";
  if (value.empty() || value == "null" || value == "~") return std::nullopt;
  if (kOthers.find(value.front()) != std::string_view::npos) return std::nullopt;
  return value;
}

struct Level {
  std::size_t indent = 0;
  std::string path;  // with a trailing dot
};

/// Adds the exceptions to Megatron's rules for weight decay and learning rates (Args).
void SetOptimizer(pickle::Arena& arena, const std::map<std::string, std::string>& scalars,
                  pickle::Node* args) {
  const auto value = [&](const char* name) {
    const auto found = scalars.find(name);
    return found == scalars.end() ? std::string() : found->second;
  };
  if (value("optimizer.apply_wd_to_qk_layernorm") == "true") {
    Set(arena, args, "apply_wd_to_qk_layernorm", arena.Bool(true));
  }
  if (const std::string rule = value("scheduler.no_weight_decay_cond_type"); !rule.empty()) {
    Set(arena, args, "no_weight_decay_cond_type", arena.String(rule));
  }
  if (const auto rate = NumberIn<double>(value("optimizer.decoupled_lr"))) {
    Set(arena, args, "decoupled_lr", arena.Float(*rate));
  }
}

}  // namespace

std::map<std::string, std::string> YamlScalars(std::string_view text) {
  constexpr std::size_t kDepth = 32;
  std::map<std::string, std::string> scalars;
  std::vector<Level> levels;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    const std::size_t indent = line.find_first_not_of(' ');
    if (indent == std::string_view::npos) continue;
    const std::string_view rest = Trimmed(line);
    if (rest.empty() || rest.front() == '#' || rest.front() == '-') continue;
    const std::size_t colon = rest.find(':');
    if (colon == std::string_view::npos || colon == 0) continue;
    while (!levels.empty() && levels.back().indent >= indent) levels.pop_back();
    const std::string path =
        (levels.empty() ? "" : levels.back().path) + std::string(Trimmed(rest.substr(0, colon)));
    const std::string_view value = Trimmed(rest.substr(colon + 1));
    if (value.empty() || value.front() == '#') {
      if (levels.size() < kDepth) levels.push_back({indent, path + "."});
    } else if (const auto scalar = ScalarIn(value)) {
      scalars.emplace(path, *scalar);
    }
  }
  return scalars;
}

std::string ModelValue(const std::map<std::string, std::string>& scalars, std::string_view name) {
  for (const std::string_view before : {"model.", "config.", "model.config.", ""}) {
    const auto found = scalars.find(std::string(before) + std::string(name));
    if (found != scalars.end()) return found->second;
  }
  return "";
}

Result<Args> ArgsOfConfig(pickle::Arena& arena, const std::map<std::string, std::string>& scalars) {
  pickle::Node* dict = arena.Dict();
  for (const std::string_view name : kCounts) {
    const auto count = NumberIn<std::int64_t>(ModelValue(scalars, name));
    if (!count) continue;
    // Megatron uses another name for experts, and a separate flag for query groups.
    Set(arena, dict, name == "num_moe_experts" ? "num_experts" : name, arena.Int(*count));
    if (name == "num_query_groups") Set(arena, dict, "group_query_attention", arena.Bool(true));
  }
  for (const std::string_view name : kFlags) {
    const std::string word = ModelValue(scalars, name);
    if (word == "true" || word == "True") Set(arena, dict, name, arena.Bool(true));
  }
  for (const std::string_view name : kWords) {
    const std::string word = ModelValue(scalars, name);
    if (!word.empty()) Set(arena, dict, name, arena.String(word));
  }
  SetOptimizer(arena, scalars, dict);
  SW_TRY_ASSIGN(Args args, ReadArgs(dict));
  const auto hidden = NumberIn<std::int64_t>(ModelValue(scalars, "hidden_size"));
  if (args.channels == 0 && args.heads > 0 && hidden && *hidden > 0) {
    args.channels = static_cast<std::uint64_t>(*hidden) / args.heads;
  }
  return args;
}

}  // namespace shardwright::checkpoints::megatron
