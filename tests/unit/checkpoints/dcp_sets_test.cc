// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/registry.h"
#include "engine/layout/shard_map.h"
#include "files/dcp/index.h"
#include "fixtures.h"
#include "unit/support/os/scratch.h"

namespace shardwright::checkpoints::dcp {
namespace {

namespace file_format = shardwright::dcp;

/// A PyTorch folder with a changed index: items keep their places but have other names.
class DcpSets : public os::Scratch {
 protected:
  void SetUp() override {
    os::Scratch::SetUp();
    folder_ = At("ckpt");
    fs::copy(fs::path(SW_SOURCE_DIR) / "tests/data/dcp/nested_w3/ckpt", folder_);
  }

  void Change(const std::function<void(file_format::Index*)>& change) {
    Result<file_format::Index> index = file_format::ReadIndex(ReadFileText(folder_ / ".metadata"));
    ASSERT_TRUE(index) << index.error().message;
    change(&*index);
    const Result<std::string> bytes = file_format::DumpIndex(*index);
    ASSERT_TRUE(bytes) << bytes.error().message;
    std::ofstream(folder_ / ".metadata", std::ios::binary) << *bytes;
  }

  /// Gives the tensors of the model a second name, below another root.
  void Copy(const std::string& root) {
    Change([&](file_format::Index* index) {
      const std::vector<file_format::Entry> entries = index->entries;
      for (const file_format::Entry& entry : entries) {
        if (entry.part(0) == "model" && entry.is_tensor) {
          index->entries.push_back(Renamed(entry, root, entry.name.substr(entry.path[0].end + 1)));
        }
      }
    });
  }

  /// Renames the root of the model.
  void Rename(const std::string& root) {
    Change([&](file_format::Index* index) {
      for (file_format::Entry& entry : index->entries) {
        if (entry.part(0) != "model") continue;
        entry = Renamed(entry, root, entry.name.substr(entry.path[0].end + 1));
      }
    });
  }

  void DropOptimizer() {
    Change([](file_format::Index* index) {
      std::erase_if(index->entries,
                    [](const file_format::Entry& entry) { return entry.part(0) == "optim"; });
    });
  }

  static file_format::Entry Renamed(file_format::Entry entry, const std::string& root,
                                    const std::string& name) {
    entry.name = root + "." + name;
    entry.path = {{static_cast<std::uint32_t>(root.size()), false},
                  {static_cast<std::uint32_t>(entry.name.size()), false}};
    return entry;
  }

  Result<Checkpoint> Read(const std::string& weights_of = "") {
    SW_TRY_ASSIGN(SourceSet set, ScanSource({folder_.string()}));
    set.weights_of = weights_of;
    return ReadCheckpoint(set, Patterns());
  }

  fs::path folder_;
};

bool Mentions(const std::vector<std::string>& texts, std::string_view words) {
  return std::any_of(texts.begin(), texts.end(), [&](const std::string& text) {
    return text.find(words) != std::string::npos;
  });
}

TEST_F(DcpSets, OneSetIsNoNews) {
  const auto read = Read();
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->weight_sets.size(), 1U);
  EXPECT_EQ(read->weight_sets.front().name, "model");
  EXPECT_TRUE(read->warnings.empty());
}

TEST_F(DcpSets, TheModelIsTakenNotItsAverage) {
  Copy("ema");
  const auto read = Read();
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->weight_sets.size(), 2U);
  EXPECT_EQ(read->weight_sets[0].name, "model");
  EXPECT_EQ(read->weight_sets[1].name, "ema");
  EXPECT_TRUE(Mentions(read->warnings, "\"model\""));
  EXPECT_TRUE(Mentions(read->own->Contents(), "the weights of \"ema\""));
  EXPECT_EQ(read->own->Contents().size(), 5U) << "one line for all tensors of a set";
}

TEST_F(DcpSets, WithoutAnOptimizerToo) {
  Copy("ema");
  Rename("net");
  DropOptimizer();
  const auto read = Read();
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->weight_sets[0].name, "net");
}

TEST_F(DcpSets, TheAverageIsTakenWhereItIsAskedFor) {
  Copy("ema");
  const auto read = Read("ema");
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->weight_sets[0].name, "ema");
  EXPECT_TRUE(Mentions(read->left_out, "the weights of \"model\""));
  EXPECT_TRUE(Mentions(read->warnings, "--weights-of selects \"ema\""));
  // In a DCP folder the average then has the place of the model.
  const auto& own = dynamic_cast<const DcpState&>(*read->own);
  EXPECT_EQ(own.naming.model, std::vector<std::string>{"model"});
  EXPECT_TRUE(std::none_of(own.extras.begin(), own.extras.end(),
                           [](const Extra& extra) { return extra.set.has_value(); }));
  const auto none = Read("average");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Errc::kUsage);
}

TEST_F(DcpSets, SetsThatNothingTellsApartAreRefused) {
  Copy("other");
  Rename("one");
  const auto read = Read();
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Errc::kUnsupported);
  EXPECT_NE(read.error().message.find("\"one\", \"other\""), std::string::npos)
      << read.error().message;
  const auto asked = Read("other");
  ASSERT_TRUE(asked) << asked.error().message;
  EXPECT_EQ(asked->weight_sets[0].name, "other");
}

TEST_F(DcpSets, WrapperNamesOfTheModelAreMatchedWithTheOptimizers) {
  const auto before = Read();
  ASSERT_TRUE(before) << before.error().message;
  Change([](file_format::Index* index) {
    for (file_format::Entry& entry : index->entries) {
      if (entry.part(0) != "model") continue;
      entry = Renamed(entry, "model", "_orig_mod." + entry.name.substr(entry.path[0].end + 1));
    }
  });
  const auto read = Read();
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(read->fused.empty());
  EXPECT_EQ(read->warnings, before->warnings);
  ASSERT_EQ(read->params.size(), before->params.size());
  EXPECT_EQ(read->map.tensors.size(), before->map.tensors.size());
  for (std::size_t i = 0; i < read->params.size(); ++i) {
    EXPECT_EQ(read->params[i].name, "_orig_mod." + before->params[i].name);
    EXPECT_EQ(read->params[i].group, before->params[i].group);
  }
  EXPECT_EQ(read->groups[0].params, before->groups[0].params);
}

TEST_F(DcpSets, ParametersOfGroupsWithoutStateAreTrained) {
  std::string name;
  Change([&](file_format::Index* index) {
    for (const file_format::Entry& entry : index->entries) {
      const bool state = entry.part_count() == 4 && entry.part(1) == "state";
      if (state && name.empty()) name = entry.part(2);
    }
    std::erase_if(index->entries, [&](const file_format::Entry& entry) {
      return entry.part_count() == 4 && entry.part(1) == "state" && entry.part(2) == name;
    });
  });
  ASSERT_FALSE(name.empty());
  const auto read = Read();
  ASSERT_TRUE(read) << read.error().message;
  const auto found = std::find_if(read->params.begin(), read->params.end(),
                                  [&](const Param& param) { return param.name == name; });
  ASSERT_NE(found, read->params.end());
  EXPECT_EQ(found->kind, ParamKind::kTrainable);
  EXPECT_GE(found->group, 0);
  EXPECT_TRUE(Mentions(read->warnings, name));
}

}  // namespace
}  // namespace shardwright::checkpoints::dcp
