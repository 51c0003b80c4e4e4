// SPDX-License-Identifier: Apache-2.0
// Fixture for native stage 1 and 2 checkpoints made by a test.

#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"
#include "tiny_checkpoint.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints {

class FlatLayout : public os::Scratch {
 protected:
  void SetUp() override {
    Scratch::SetUp();
    save_ = At("save");
    fs::create_directories(save_);
  }

  Result<Checkpoint> Read() const {
    SW_TRY_ASSIGN(const SourceSet source, ScanSource({save_.string()}));
    Patterns patterns;
    return ReadDeepSpeed(source, patterns);
  }

  /// Reads the checkpoint, which must have exactly the values of `tiny`.
  std::optional<Checkpoint> ReadRight(const TinyZero& tiny) const {
    auto checkpoint = Read();
    EXPECT_TRUE(checkpoint) << checkpoint.error().message;
    if (!checkpoint) return std::nullopt;
    EXPECT_EQ(checkpoint->map.tensors.size(), tiny.params.size() * (2 + tiny.states.size()));
    Gatherer gatherer(checkpoint->map);
    for (const layout::LogicalTensor& tensor : checkpoint->map.tensors) {
      std::size_t param = 0;
      while (tiny.params[param].name != tensor.name) ++param;
      const std::string state = tensor.state == "weight" ? "fp32" : tensor.state;
      std::vector<float> want;
      for (std::uint64_t i = 0; i < Elems(tensor.shape); ++i) {
        want.push_back(TinyValue(param, state, i));
      }
      const std::string have = gatherer.Whole(tensor);
      EXPECT_TRUE(std::memcmp(have.data(), want.data(), have.size()) == 0)
          << tensor.name << " " << tensor.state;
    }
    return *std::move(checkpoint);
  }

  /// Reads the checkpoint, which must fail with a code and words of the message.
  void ExpectRefused(Errc code, const std::vector<std::string>& words) const {
    const auto checkpoint = Read();
    ASSERT_FALSE(checkpoint);
    EXPECT_EQ(checkpoint.error().code, code) << checkpoint.error().message;
    for (const std::string& word : words) {
      EXPECT_NE(checkpoint.error().message.find(word), std::string::npos)
          << "\"" << word << "\" is not in: " << checkpoint.error().message;
    }
  }

  fs::path Shard(int rank) const {
    return save_ / "global_step4" /
           ("zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt");
  }
  fs::path Model() const { return save_ / "global_step4" / "mp_rank_00_model_states.pt"; }

  fs::path save_;
};
}  // namespace shardwright::checkpoints
