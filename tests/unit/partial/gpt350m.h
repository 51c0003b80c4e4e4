// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "partial/select/sizes.h"

namespace shardwright::partial::published {

// The MoC-System paper's models: biases, vocabulary 51200, 2048 positions, every other layer has
// experts. GPT-350M-16E: hidden size 1024, 24 layers, 16 experts.
inline constexpr std::uint64_t kHidden = 1024;
inline constexpr std::uint32_t kLayers = 24;
inline constexpr std::uint32_t kMoeLayers = kLayers / 2;
inline constexpr std::uint32_t kExperts = 16;

constexpr std::uint64_t ExpertParams(std::uint64_t hidden) {
  return 8 * hidden * hidden + 5 * hidden;
}

// Bytes of a parameter: bf16 weights, fp32 master and two fp32 moments.
inline ComponentBytes BytesOf(std::uint64_t params) { return {params * 2, params * 4, params * 8}; }

// Parameters of the non-expert modules: embeddings, attention with its norms, dense feed-forward or
// gate, the last norm.
inline std::vector<std::uint64_t> NonExpertParams(std::uint64_t hidden, std::uint32_t layers,
                                                  std::uint64_t experts) {
  std::vector<std::uint64_t> params = {51200 * hidden, 2048 * hidden};
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    params.push_back(4 * hidden * hidden + 4 * hidden + 4 * hidden);
    params.push_back(layer % 2 == 0 ? ExpertParams(hidden) : experts * hidden);
  }
  params.push_back(2 * hidden);
  return params;
}

inline ModelBytes Gpt350M() {
  ModelBytes model;
  for (std::uint64_t params : NonExpertParams(kHidden, kLayers, kExperts)) {
    model.nonexpert.push_back(BytesOf(params));
  }
  model.expert.assign(kMoeLayers,
                      std::vector<ComponentBytes>(kExperts, BytesOf(ExpertParams(kHidden))));
  return model;
}

}  // namespace shardwright::partial::published
