// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "unit/checkpoints/tiny_checkpoint.h"

namespace shardwright::checkpoints {

/// A legacy Megatron checkpoint of two tensor-parallel ranks. Tests can change its fields. It has
/// one layer of width 4, 2 heads, 1 query group, a gated MLP, 5 words padded to 6, tied, float32.
struct TinyMegatron {
  std::map<std::string, std::int64_t> args{{"tensor_model_parallel_size", 2},
                                           {"pipeline_model_parallel_size", 1},
                                           {"num_layers", 1},
                                           {"num_attention_heads", 2},
                                           {"num_query_groups", 1},
                                           {"kv_channels", 2},
                                           {"vocab_size", 5},
                                           {"make_vocab_size_divisible_by", 3},
                                           {"consumed_train_samples", 48}};
  std::map<std::string, std::string> words;  ///< further arguments: true, false or a text
  /// Of one rank, in the order of the model.
  std::vector<std::string> names{"embedding.word_embeddings.weight",
                                 "decoder.layers.0.input_layernorm.weight",
                                 "decoder.layers.0.self_attention.linear_proj.weight",
                                 "decoder.layers.0.self_attention.linear_qkv.weight",
                                 "decoder.layers.0.mlp.linear_fc1.weight",
                                 "decoder.layers.0.mlp.linear_fc2.weight"};
  std::map<std::string, Shape> shapes{
      {"embedding.word_embeddings.weight", {3, 4}},
      {"decoder.layers.0.input_layernorm.weight", {4}},
      {"decoder.layers.0.self_attention.linear_proj.weight", {4, 2}},
      {"decoder.layers.0.self_attention.linear_qkv.weight", {4, 4}},
      {"decoder.layers.0.mlp.linear_fc1.weight", {4, 4}},
      {"decoder.layers.0.mlp.linear_fc2.weight", {4, 2}}};
  std::map<std::string, Shape> odd_rank_shapes;  ///< on rank 1
  std::map<std::string, std::string> rename;
  std::optional<std::uint64_t> leave_out;  ///< a rank
  double version = 3.0;
  bool model_twice = false;
  std::vector<std::uint64_t> optimizer_ids{0, 1, 2, 3, 4};  ///< of the group with weight decay
  std::vector<std::uint64_t> vector_ids{5};                 ///< of the group without
  std::vector<std::uint64_t> own_rate_ids;  ///< of a group with weight decay and a rate of 2
  /// Number of a parameter's group. Default: matrices 0, vectors 1.
  std::function<int(const std::string&)> group_of;

  void Write(const std::filesystem::path& folder) const {
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      if (leave_out != rank) WriteRank(folder, rank);
    }
    std::ofstream(folder / "latest_checkpointed_iteration.txt") << "4";
  }

 private:
  Shape ShapeOf(const std::string& name, std::uint64_t rank) const {
    const auto odd = odd_rank_shapes.find(name);
    return rank == 1 && odd != odd_rank_shapes.end() ? odd->second : shapes.at(name);
  }

  static const Node* Tensor(PtFile& file, const Shape& shape, float first) {
    std::vector<float> values(Elems(shape));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
    return file.Tensor(std::move(values), shape);
  }

  static Node* Group(PtFile& file, double decay, const std::vector<std::uint64_t>& ids) {
    Arena& arena = file.arena;
    return file.Dict({{"wd_mult", arena.Float(decay == 0 ? 0.0 : 1.0)},
                      {"lr_mult", arena.Float(1.0)},
                      {"lr", arena.Float(0.01)},
                      {"weight_decay", arena.Float(decay)},
                      {"params", file.Counts(ids)}});
  }

  void WriteRank(const std::filesystem::path& folder, std::uint64_t rank) const {
    PtFile file;
    Arena& arena = file.arena;
    Node* attributes = arena.Dict();
    for (const auto& [key, value] : args) Set(arena, attributes, key, arena.Int(value));
    for (const auto& [key, word] : words) {
      const bool flag = word == "true" || word == "false";
      Set(arena, attributes, key, flag ? arena.Bool(word == "true") : arena.String(word));
    }
    Set(arena, attributes, "group_query_attention", arena.Bool(true));
    Node* model = arena.Dict(true);
    std::vector<std::string> order;  // of the optimizer: group by group
    for (const std::string& name : names) {
      const auto other = rename.find(name);
      const float first = static_cast<float>(1000 * (order.size() + 1) + 100 * rank);
      Set(arena, model, other == rename.end() ? name : other->second,
          Tensor(file, ShapeOf(name, rank), first));
      order.push_back(name);
    }
    const auto number = [&](const std::string& name) {
      if (group_of) return group_of(name);
      return shapes.at(name).size() > 1 ? 0 : 1;
    };
    std::stable_sort(order.begin(), order.end(), [&](const std::string& a, const std::string& b) {
      return number(a) < number(b);
    });
    std::vector<const Node*> states;
    for (const std::string& name : order) {
      const Shape shape = ShapeOf(name, rank);
      states.push_back(file.Dict({{"step", file.Tensor({4}, {})},
                                  {"exp_avg", Tensor(file, shape, -1)},
                                  {"exp_avg_sq", Tensor(file, shape, 1)}}));
    }
    std::vector<const Node*> all = {Group(file, 0.1, optimizer_ids), Group(file, 0, vector_ids)};
    if (!own_rate_ids.empty()) {
      Node* own = Group(file, 0.1, own_rate_ids);
      Set(arena, own, "max_lr", arena.Float(2));
      all.push_back(own);
    }
    const Node* groups = arena.List(std::move(all));
    Node* root = file.Dict(
        {{"args", arena.Object("argparse.Namespace", attributes)},
         {"checkpoint_version", arena.Float(version)},
         {"iteration", arena.Int(4)},
         {"model", model},
         {"optimizer", file.Dict({{"state", file.Numbered(states)}, {"param_groups", groups}})}});
    if (model_twice) Set(arena, root, "model0", model);
    file.Write(
        folder / "iter_0000004" / ("mp_rank_0" + std::to_string(rank)) / "model_optim_rng.pt",
        root);
  }
};

}  // namespace shardwright::checkpoints
