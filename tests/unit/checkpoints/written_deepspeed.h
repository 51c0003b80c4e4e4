// SPDX-License-Identifier: Apache-2.0
// Reads the files that the writer of native DeepSpeed checkpoints makes of a model.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "write_model.h"

namespace shardwright::checkpoints::test {

using pickle::Node;

inline Topology Zero(std::uint64_t stage, std::uint64_t dp) {
  Topology to;
  to.zero = stage;
  to.dp = dp;
  return to;
}

inline Rendered Write(const Model& model, const Checkpoint& source, const Topology& to) {
  const auto target = WriteDeepSpeed(source, to);
  EXPECT_TRUE(target.has_value()) << target.error().message;
  return Rendered(model, target->target);
}

inline const std::string kTag = "global_step4/";

inline std::string Shard(std::uint64_t rank, const std::string& prefix = "") {
  return kTag + prefix + "zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt";
}

inline const Node* Inner(const torch_pt::Document& document) {
  const Node* inner = document.root->Find("optimizer_state_dict");
  EXPECT_NE(inner, nullptr);
  return inner;
}

inline std::vector<std::int64_t> Ints(const Node* list) {
  std::vector<std::int64_t> ints;
  for (const Node* item : list->items) ints.push_back(item->integer);
  return ints;
}

/// "name (start, numel)" of a param_slice_mappings entry.
inline std::vector<std::string> Mapping(const Node* inner, std::size_t group) {
  std::vector<std::string> texts;
  const Node* mapping = inner->Find("param_slice_mappings")->items.at(group);
  for (std::size_t i = 0; i < mapping->entry_count(); ++i) {
    const Node* address = mapping->value(i);
    EXPECT_EQ(address->callable->text, "deepspeed.utils.tensor_fragment.fragment_address");
    texts.push_back(mapping->key(i)->text + " " +
                    std::to_string(address->state->Find("start")->integer) + " " +
                    std::to_string(address->state->Find("numel")->integer));
  }
  return texts;
}

inline std::vector<std::string> Keys(const Node* dict) {
  std::vector<std::string> keys;
  for (std::size_t i = 0; i < dict->entry_count(); ++i) keys.push_back(dict->key(i)->text);
  return keys;
}

inline const Node* StateOf(const Node* states, std::int64_t index) {
  for (std::size_t i = 0; i < states->entry_count(); ++i) {
    if (states->key(i)->integer == index) return states->value(i);
  }
  return nullptr;
}

using Texts = std::vector<std::string>;
using Numbers = std::vector<std::int64_t>;

}  // namespace shardwright::checkpoints::test
