// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdlib>

#include "unit/checkpoints/same_checkpoint.h"

// Compares folders that DeepSpeed's own ds_to_universal makes of real checkpoints with those
// checkpoints.

namespace shardwright::checkpoints {
namespace {

struct Case {
  fs::path folder;
  bool pipeline = false;  ///< the converter writes neither buffers nor frozen parameters of it
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.folder; }

std::vector<Case> Cases(const std::vector<fs::path>& folders) {
  std::vector<Case> out;
  out.reserve(folders.size());
  for (const fs::path& folder : folders) {
    out.push_back({folder, folder.filename() == "pp2_dp2_zero1"});
  }
  return out;
}

std::string CaseName(const testing::TestParamInfo<Case>& tested) {
  return TestName(tested.param.folder.filename().string());
}

/// Python of the environment that scripts/peers makes; empty if there is none.
fs::path PeerPython() {
  const char* given = std::getenv("SHARDWRIGHT_PEERS");
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  fs::path folder;
  if (given != nullptr) {
    folder = given;
  } else if (cache != nullptr) {
    folder = fs::path(cache) / "shardwright" / "peers";
  } else if (home != nullptr) {
    folder = fs::path(home) / ".cache" / "shardwright" / "peers";
  }
  const fs::path python = folder / "bin" / "python";
  return !folder.empty() && fs::exists(python) ? python : fs::path();
}

std::string Quoted(const fs::path& path) { return "'" + path.string() + "'"; }

class Upstream : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const fs::path python = PeerPython();
    if (python.empty()) GTEST_SKIP() << "no peers: run scripts/peers";
    source_ = GetParam().folder / "ckpt";
    const std::string tag = ReadFileText(source_ / "latest");
    const std::string command =
        "DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PATH=" + Quoted(python.parent_path()) + ":$PATH " +
        Quoted(python) + " -m deepspeed.checkpoint.ds_to_universal --inject_missing_state " +
        "--no_strict --num_extract_workers 1 --num_merge_workers 1 --input_folder " +
        Quoted(source_ / tag) + " --output_folder " + Quoted(scratch_ / (tag + "_universal")) +
        " >" + Quoted(scratch_ / "log") + " 2>&1";
    ASSERT_EQ(std::system(command.c_str()), 0) << ReadFileText(scratch_ / "log");
  }

  fs::path source_;
  Scratch scratch_;
};

/// Reduces a checkpoint to the contents known when only trainable parameters are known.
void KeepTrainable(Checkpoint* checkpoint) {
  std::vector<std::uint32_t> moved(checkpoint->params.size());
  std::vector<Param> kept;
  for (std::uint32_t i = 0; i < moved.size(); ++i) {
    moved[i] = static_cast<std::uint32_t>(kept.size());
    if (checkpoint->params[i].kind == ParamKind::kTrainable) kept.push_back(checkpoint->params[i]);
  }
  checkpoint->params = std::move(kept);
  std::sort(checkpoint->params.begin(), checkpoint->params.end(),
            [](const Param& a, const Param& b) { return a.name < b.name; });
  std::erase_if(checkpoint->map.tensors, [](const layout::LogicalTensor& tensor) {
    return tensor.state == "buffer" || tensor.state == "frozen";
  });
}

/// Groups as lists of names.
std::vector<std::vector<std::string>> GroupNames(const Checkpoint& checkpoint) {
  std::vector<std::vector<std::string>> names;
  for (const Group& group : checkpoint.groups) {
    names.emplace_back();
    for (std::uint32_t index : group.params) names.back().push_back(checkpoint.params[index].name);
  }
  return names;
}

TEST_P(Upstream, FoldersHoldWhatTheirSourcesHold) {
  auto before = Read(source_);
  auto after = Read(scratch_ / "");
  ASSERT_TRUE(before.has_value()) << before.error().message;
  ASSERT_TRUE(after.has_value()) << after.error().message;
  EXPECT_EQ(after->origin, "universal");
  EXPECT_EQ(after->tag, before->tag);
  const auto resolved = ResolveTopology({}, *before);
  const auto again = ResolveTopology({}, *after);
  ASSERT_TRUE(resolved && again);
  ExpectSameTopology(*resolved, *again);
  EXPECT_EQ(GroupNames(*before), GroupNames(*after));
  for (std::size_t g = 0; g < before->groups.size(); ++g) {
    EXPECT_TRUE(SameNode(before->groups[g].options, after->groups[g].options)) << "group " << g;
  }
  if (GetParam().pipeline) {
    KeepTrainable(&*before);
    KeepTrainable(&*after);
  }
  ExpectSameParams(*before, *after);
  ExpectSameTensors(*before, *after);
  ExpectSameClient(*before, *after);
}

const std::vector<std::string>& CommonCases() {
  static const std::vector<std::string> kNames = {
      "zero1_w2",      "zero2_w3_frozen_tied", "zero2_w4_three_groups", "bf16_zero2_w2",
      "bf16opt_w4",    "zero3_w2_sub_groups",  "zero3_w4_frozen",       "bf16_zero3_w3",
      "pp2_dp2_zero1", "autotp2_dp2_zero1"};
  return kNames;
}

INSTANTIATE_TEST_SUITE_P(Own, Upstream, testing::ValuesIn(Cases(OwnCheckpoints(CommonCases()))),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Shared, Upstream,
                         testing::ValuesIn(Cases(SharedCheckpoints(CommonCases()))), CaseName);
INSTANTIATE_TEST_SUITE_P(SharedOnly, Upstream,
                         testing::ValuesIn(Cases(SharedCheckpoints({"llama_tp1_zero2_w2"}))),
                         CaseName);

}  // namespace
}  // namespace shardwright::checkpoints
