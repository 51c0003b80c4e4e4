// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "convert/convert.h"
#include "convert/input.h"
#include "same_checkpoint.h"
#include "support/comm/comm.h"
#include "tiny_checkpoint.h"

// The form of state files: DeepSpeed's universal loaders differ in the forms that they open.

namespace shardwright::checkpoints {
namespace {

using pickle::Node;

struct Case {
  const char* release;  // that saved the source; "" is unknown
  const char* target;
  Loader loader;
  bool bare;
};

class StateFiles : public testing::Test {
 protected:
  void WriteSource(const std::string& release) {
    TinyZero tiny;
    tiny.change_model = [&](PtFile& file, Node* root) {
      pickle::Remove(root, "ds_version");
      if (!release.empty()) Set(file.arena, root, "ds_version", file.arena.String(release));
      Node* module = pickle::CopyDict(file.arena, root->Find("module"));
      Set(file.arena, module, "frozen.weight", file.Flat({1, 2, 3}));
      Set(file.arena, root, "module", module);
    };
    tiny.Write(scratch_ / "source");
  }

  static std::string Word(Loader loader) {
    return std::string(universal::kLoaderWords.at(static_cast<std::size_t>(loader)));
  }

  Status Convert(const std::string& from, const std::string& to, const std::string& target,
                 Loader loader) {
    const Format& universal = *FindFormat("universal");
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    SW_TRY_ASSIGN(const auto input,
                  convert::OpenInput(*comm, {{(scratch_ / from).string()}, {}, false}, sink));
    SW_TRY_ASSIGN(
        const TargetSpec spec,
        ParseTarget(universal, target + (target.empty() ? "" : ",") + "loader=" + Word(loader)));
    convert::ConvertOptions options;
    options.output = (scratch_ / to).string();
    SW_TRY(convert::Convert(*comm, *input, spec, universal, "test", options, sink));
    return {};
  }

  torch_pt::Document Atom(const std::string& name) {
    const fs::path path = scratch_ / "atoms" / "global_step4_universal" / "zero" / (name + ".pt");
    auto file = os::File::OpenRead(path.string());
    EXPECT_TRUE(file.has_value()) << path;
    auto metadata = torch_pt::ReadMetadata(*file);
    EXPECT_TRUE(metadata.has_value()) << path;
    auto document = torch_pt::Parse(*metadata);
    EXPECT_TRUE(document.has_value()) << path;
    return *std::move(document);
  }

  Scratch scratch_;
};

class UniversalLoaders : public StateFiles, public testing::WithParamInterface<Case> {};

TEST_P(UniversalLoaders, GetTheFormThatTheyOpen) {
  const Case& wanted = GetParam();
  WriteSource(wanted.release);
  const Status written = Convert("source", "atoms", wanted.target, wanted.loader);
  ASSERT_TRUE(written.has_value()) << written.error().message;
  for (const char* state : {"fp32", "exp_avg", "exp_avg_sq"}) {
    const auto document = Atom(std::string("l1.weight/") + state);
    if (wanted.bare) {
      ASSERT_TRUE(document.root->is_tensor()) << state;
      EXPECT_EQ(document.root->tensor->shape, (Shape{7, 6}));
    } else {
      ASSERT_TRUE(document.root->is_dict()) << state;
      EXPECT_EQ(document.root->Find("param")->tensor->shape, (Shape{7, 6}));
    }
  }
  // DeepSpeed's loaders never open this one.
  EXPECT_TRUE(Atom("frozen.weight/frozen").root->is_dict());
}

TEST_P(UniversalLoaders, HaveTheSameStateInEveryForm) {
  const Case& wanted = GetParam();
  WriteSource(wanted.release);
  ASSERT_TRUE(Convert("source", "atoms", wanted.target, wanted.loader).has_value());
  const auto before = Read(scratch_ / "source");
  const auto after = Read(scratch_ / "atoms");
  ASSERT_TRUE(before.has_value()) << before.error().message;
  ASSERT_TRUE(after.has_value()) << after.error().message;
  ExpectSameParams(*before, *after);
  ExpectSameGroups(*before, *after);
  ExpectSameTensors(*before, *after);
}

INSTANTIATE_TEST_SUITE_P(Forms, UniversalLoaders,
                         testing::Values(Case{"0.14.5", "zero=3,dp=2", Loader::kAuto, true},
                                         Case{"0.16.9+cpu", "zero=3,dp=2", Loader::kAuto, true},
                                         Case{"0.19.2", "zero=3,dp=2", Loader::kAuto, true},
                                         Case{"", "zero=3,dp=2", Loader::kAuto, true},
                                         Case{"0.19.3", "zero=3,dp=2", Loader::kAuto, false},
                                         Case{"0.20.0", "zero=3,dp=2", Loader::kAuto, false},
                                         Case{"1.0", "zero=3,dp=2", Loader::kAuto, false},
                                         Case{"0.16.9", "", Loader::kAuto, false},
                                         Case{"0.16.9", "zero=1,dp=3", Loader::kAuto, false},
                                         Case{"0.16.9", "zero=3,dp=2", Loader::kAny, false},
                                         Case{"0.19.8", "zero=3,dp=2", Loader::kStage3, true},
                                         Case{"0.19.8", "zero=1", Loader::kStage3, true}));

TEST_F(StateFiles, OfStage3KnowNoTensorParallelism) {
  WriteSource("0.16.9");
  Checkpoint source = *Read(scratch_ / "source");
  Topology to = TopologyOf(source.layout);
  to.tp = 2;
  const auto refused = WriteUniversal(source, to, Loader::kStage3);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("tp=2"), std::string::npos);
}

}  // namespace
}  // namespace shardwright::checkpoints
