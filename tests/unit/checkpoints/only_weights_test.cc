// SPDX-License-Identifier: Apache-2.0
// Sources with a missing optimizer, or one of an unsupported form: only their model is read.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "checkpoints/registry.h"
#include "dtensor_folder.h"
#include "engine/layout/shard_map.h"
#include "engine/layout/states.h"
#include "files/dcp/index.h"
#include "fixtures.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints {
namespace {

Result<Checkpoint> ReadFrom(const fs::path& folder) {
  SW_TRY_ASSIGN(const SourceSet set, ScanSource({folder.string()}));
  return ReadCheckpointOrWeights(set, Patterns());
}

/// The element values of a model tensor, for any state.
std::string ValueOf(const Checkpoint& checkpoint, const std::string& name) {
  for (const layout::LogicalTensor& tensor : checkpoint.map.tensors) {
    if (tensor.name == name && layout::IsModelState(tensor.state)) {
      return Gatherer(checkpoint.map).Whole(tensor);
    }
  }
  return "";
}

/// Expects that `folder` has the model of `whole` and no optimizer, for a reason with these words.
void ExpectOnlyWeights(const fs::path& folder, const Checkpoint& whole, Errc code,
                       std::string_view words) {
  const Result<Checkpoint> read = ReadFrom(folder);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_TRUE(read->only_weights);
  EXPECT_EQ(read->only_weights->why.code, code);
  EXPECT_NE(read->only_weights->why.message.find(words), std::string::npos)
      << read->only_weights->why.message;
  EXPECT_FALSE(CheckUnbound(*read));
  EXPECT_EQ(OptimizerLeftOut(*read).size(), 1U);
  EXPECT_TRUE(layout::Validate(read->map));
  EXPECT_TRUE(read->states.empty());
  for (const layout::LogicalTensor& tensor : read->map.tensors) {
    EXPECT_TRUE(layout::IsModelState(tensor.state) || layout::IsPadding(tensor.state))
        << tensor.name << " " << tensor.state;
  }
  ASSERT_EQ(read->params.size(), whole.params.size());
  for (const Param& param : whole.params) {
    if (!param.alias_of.empty()) continue;
    EXPECT_FALSE(ValueOf(*read, param.name).empty()) << param.name;
    EXPECT_EQ(ValueOf(*read, param.name), ValueOf(whole, param.name)) << param.name;
  }
}

/// A copy of real folders with an index that can be changed.
class OnlyWeights : public os::Scratch {
 protected:
  /// Rewrites the index with all names that `change` changes.
  void Rename(const fs::path& folder, const std::function<void(std::string*)>& change) {
    Result<dcp::Index> index = dcp::ReadIndex(ReadFileText(folder / ".metadata"));
    ASSERT_TRUE(index) << index.error().message;
    std::size_t changed = 0;
    for (dcp::Entry& entry : index->entries) {
      const std::string before = entry.name;
      change(&entry.name);
      ASSERT_EQ(entry.name.size(), before.size());  // paths are places in the name
      changed += entry.name == before ? 0 : 1;
    }
    ASSERT_GT(changed, 0U);
    const Result<std::string> bytes = dcp::DumpIndex(*index);
    ASSERT_TRUE(bytes) << bytes.error().message;
    std::ofstream(folder / ".metadata", std::ios::binary) << *bytes;
  }

  fs::path Copy(const std::string& data) {
    fs::path folder = At("ckpt");
    fs::copy(fs::path(SW_SOURCE_DIR) / "tests/data" / data, folder, fs::copy_options::recursive);
    return folder;
  }
};

TEST_F(OnlyWeights, AWholeSourceIsReadWhole) {
  const fs::path folder = Copy("dcp/nested_w3/ckpt");
  const Result<Checkpoint> read = ReadFrom(folder);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_FALSE(read->only_weights);
  EXPECT_TRUE(CheckUnbound(*read));
  EXPECT_TRUE(OptimizerLeftOut(*read).empty());
}

TEST_F(OnlyWeights, TwoOptimizersInOneDcpFolder) {
  const fs::path folder = Copy("dcp/nested_w3/ckpt");
  const Result<Checkpoint> whole = ReadFrom(folder);
  ASSERT_TRUE(whole) << whole.error().message;
  Rename(folder, [](std::string* name) {
    const bool second = name->starts_with("optim.param_groups.1.") ||
                        (name->starts_with("optim.state.") && name->find("bias") != name->npos);
    if (!second) return;
    name->replace(0, 5, "other");
    const std::size_t group = name->find(".param_groups.1.");
    if (group != std::string::npos) name->replace(group, 16, ".param_groups.0.");
  });
  ExpectOnlyWeights(folder, *whole, Errc::kUnsupported, "found several");
}

TEST_F(OnlyWeights, AFormOfMegatronsOptimizerThatIsNotKnown) {
  const fs::path folder = Copy("megatron/dist_full_tp2/ckpt");
  const Result<Checkpoint> whole = ReadFrom(folder);
  ASSERT_TRUE(whole) << whole.error().message;
  Rename(folder / "iter_0000002", [](std::string* name) {
    const std::size_t at = name->find("optimizer.state.");
    if (at != std::string::npos) name->replace(at, 15, "optimizer.newer");
  });
  ExpectOnlyWeights(folder, *whole, Errc::kUnsupported, "unknown form of optimizer state");
}

TEST_F(OnlyWeights, AWrongModelIsNoMatterOfTheOptimizer) {
  const fs::path folder = Copy("dcp/nested_w3/ckpt");
  fs::remove(folder / "__1_0.distcp");
  const Result<Checkpoint> read = ReadFrom(folder);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Errc::kNotFound);
  EXPECT_NE(read.error().message.find("__1_0.distcp"), std::string::npos) << read.error().message;
  EXPECT_NE(read.error().message.find("--also DIR"), std::string::npos) << read.error().message;
}

TEST(OnlyWeightsOfRanks, AnOptimizerOfMoreParametersThanTheModelHas) {
  dtensor::Folder folder;
  folder.Write();
  const Result<Checkpoint> whole = ReadFrom(folder.path());
  ASSERT_TRUE(whole) << whole.error().message;
  folder.Write([](std::uint64_t, const std::string& item, Document* document) {
    if (item != "optim") return;
    pickle::Arena& arena = document->arena;
    auto* group = const_cast<pickle::Node*>(document->root->Find("param_groups")->items[0]);
    pickle::Set(arena, group, "params", arena.List({arena.Int(0), arena.Int(1)}));
  });
  ExpectOnlyWeights(folder.path(), *whole, Errc::kUnsupported, "which is which");
}

TEST(OnlyWeightsOfRanks, StatesOfOtherShapesBindTheCheckpoint) {
  dtensor::Folder folder;
  folder.Write([](std::uint64_t, const std::string& item, Document* document) {
    if (item != "optim") return;
    auto* slots = const_cast<pickle::Node*>(document->root->Find("state")->items[1]);
    pickle::Node* blocks = document->arena.Dict();
    pickle::Set(document->arena, blocks, "absmax", document->AddTensor(0, DType::kF32, {2}));
    pickle::Set(document->arena, slots, "blocks", blocks);
    pickle::Set(document->arena, slots, "exp_avg_sq_row", document->AddTensor(0, DType::kF32, {5}));
  });
  const Result<Checkpoint> read = ReadFrom(folder.path());
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_FALSE(read->only_weights);
  ASSERT_EQ(read->bound.size(), 2U);
  EXPECT_NE(read->bound[0].find("\"blocks\""), std::string::npos) << read->bound[0];
  EXPECT_NE(read->bound[1].find("\"exp_avg_sq_row\""), std::string::npos) << read->bound[1];
  EXPECT_FALSE(CheckUnbound(*read));
}

}  // namespace
}  // namespace shardwright::checkpoints
