// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "partial/store/modules.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial::test {

/// Submits gradients of all experts, made up by parameter and iteration.
class AgentReplayTest : public test::AgentTest {
 protected:
  AgentOptions Replaying() const {
    AgentOptions options = Options();
    options.save.k_snapshot = 1;
    options.replay = true;
    return options;
  }

  /// Describes the experts of the first checkpoint.
  void SetUp() override {
    AgentTest::SetUp();
    const auto input = Open(1);
    const layout::ShardMap& map = input->checkpoint.map;
    const auto model = DescribeModel(input->checkpoint);
    ASSERT_TRUE(model);
    for (std::size_t i = model->nonexpert_count; i < model->modules.size(); ++i) {
      Handing::Module module{model->modules[i].name, {}};
      for (const ModuleTensor& one : model->modules[i].part(Component::kMaster).tensors) {
        const layout::LogicalTensor& tensor = map.tensors[one.tensor];
        const std::uint64_t elems = one.bytes / sizeof(float);
        module.pieces.push_back(
            {tensor.name, elems, 0, elems, DType::kF32, handing_.place_bytes, 0});
        handing_.place_bytes += one.bytes;
      }
      handing_.modules.push_back(std::move(module));
    }
    handing_.tensors = 1;
    handing_.places = 1;
    handing_.begun = 1;
    ASSERT_GT(handing_.place_bytes, 0U);
  }

  static LogStep StepOfIteration(std::uint64_t iteration) {
    LogStep step;
    step.step.lr = 0.01;
    step.step.beta1 = 0.9;
    step.step.beta2 = 0.99;
    step.step.eps = 1e-8;
    // The checkpoints of the series have made as many steps as their iteration.
    step.step.count = static_cast<float>(iteration);
    return step;
  }

  std::vector<std::byte> PlaceOf(std::uint64_t iteration) const {
    std::vector<float> place(handing_.place_bytes / sizeof(float));
    for (std::size_t i = 0; i < place.size(); ++i) {
      place[i] = static_cast<float>(i % 13) / 8 - static_cast<float>(iteration % 3);
    }
    const auto bytes = std::as_bytes(std::span(place));
    return {bytes.begin(), bytes.end()};
  }

  void HandOver(Agent& agent, std::uint64_t iteration) {
    const auto done = agent.logs().Append(handing_, iteration, PlaceOf(iteration),
                                          std::vector{StepOfIteration(iteration)});
    ASSERT_TRUE(done) << done.error().message;
  }

  /// A component of a module as the newest snapshot has it.
  static std::vector<float> ValuesOf(const MemoryCheckpoint& record, std::size_t module,
                                     Component component) {
    const auto& held = record.manifest.modules[module][static_cast<std::size_t>(component)];
    const auto bytes = record.blobs.at(held->blob.digest)->bytes();
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  static std::uint64_t VersionOf(const MemoryCheckpoint& record, std::size_t module) {
    return record.manifest.modules[module][static_cast<std::size_t>(Component::kMaster)]->version;
  }

  static std::map<std::uint64_t, std::size_t> Versions(const MemoryCheckpoint& record) {
    std::map<std::uint64_t, std::size_t> versions;
    for (std::size_t i = 0; i < record.manifest.modules.size(); ++i)
      ++versions[VersionOf(record, i)];
    return versions;
  }

  Handing handing_;
};

}  // namespace shardwright::partial::test
