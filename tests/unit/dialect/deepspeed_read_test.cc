#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "fixtures.h"

namespace shardwright::dialect {
namespace {

struct Case {
  std::string folder;
  std::string source;    // below the folder
  std::string expected;  // below the folder
  Topology topology;
  std::size_t groups = 0;
};

Topology Make(std::uint64_t zero, std::uint64_t dp, DType dtype) {
  Topology out;
  out.zero = zero;
  out.dp = dp;
  out.dtype = dtype;
  return out;
}

std::vector<Case> Cases() {
  std::vector<Case> out;
  const auto add = [&](
                       const std::string& name, Topology topology, std::size_t groups,
                       const std::function<void(Topology&)>& more = [](Topology&) {}) {
    more(topology);
    out.push_back({name, "ckpt", "expected.safetensors", topology, groups});
  };
  add("zero1_w2", Make(1, 2, DType::kF32), 2);
  add("zero1_w2_sgd", Make(1, 2, DType::kF32), 2);
  add("zero2_w4_three_groups", Make(2, 4, DType::kF32), 3);
  add("zero2_w3_frozen_tied", Make(2, 3, DType::kF32), 1);
  add("zero2_w2_round_robin", Make(2, 2, DType::kF32), 1,
      [](Topology& t) { t.round_robin = true; });
  add("llama_tp1_zero2_w2", Make(2, 2, DType::kF32), 1);
  add("bf16_zero2_w2", Make(2, 2, DType::kBF16), 2);
  add("bf16opt_w4", Make(1, 4, DType::kBF16), 2, [](Topology& t) { t.bf16_optimizer = true; });
  add("zero3_w2_sub_groups", Make(3, 2, DType::kF32), 2, [](Topology& t) { t.sub_group = 3000; });
  add("zero3_w4_frozen", Make(3, 4, DType::kF32), 1);
  add("bf16_zero3_w3", Make(3, 3, DType::kBF16), 2);
  add("zero0_w1_fp32", Make(0, 1, DType::kF32), 2);
  add("zero0_w2_bf16", Make(0, 2, DType::kBF16), 2);
  add("moe4_ep2_zero1_w2", Make(1, 2, DType::kF32), 4, [](Topology& t) { t.ep = 2; });
  add("moe4_ep2_zero2_w4", Make(2, 4, DType::kBF16), 4, [](Topology& t) { t.ep = 2; });
  add("pp2_dp2_zero1", Make(1, 2, DType::kF32), 2, [](Topology& t) {
    t.pp = 2;
    t.pipeline = true;
  });
  add("autotp2_dp2_zero1", Make(1, 2, DType::kF32), 1, [](Topology& t) { t.tp = 2; });
  for (int step = 4; step <= 9; ++step) {
    Case series{"moe8_ep2_series", "ckpt/global_step" + std::to_string(step),
                "expected_" + std::to_string(step) + ".safetensors", Make(2, 2, DType::kF32), 4};
    series.topology.ep = 2;
    out.push_back(series);
  }
  return out;
}

class RealCheckpoints : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    folder_ = SharedFixtures();
    if (folder_.empty()) GTEST_SKIP() << "no shared fixtures: set SHARDWRIGHT_SHARED";
    folder_ /= GetParam().folder;
  }

  Result<SourceSet> Scan() const { return ScanSource({(folder_ / GetParam().source).string()}); }

  Result<Checkpoint> Read() const {
    SW_TRY_ASSIGN(const SourceSet source, Scan());
    Patterns patterns;
    return ReadDeepSpeed(source, patterns);
  }

  fs::path folder_;
};

TEST_P(RealCheckpoints, EveryTensorIsWhereTheMapSays) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Expected expected = Expected::Read(folder_ / GetParam().expected);
  Gatherer gatherer(checkpoint->map);
  std::set<std::string> found;
  for (const layout::LogicalTensor& tensor : checkpoint->map.tensors) {
    if (tensor.state == "weight") continue;  // compared with its master below
    const std::string key = tensor.name + "/" + tensor.state;
    const auto at = expected.tensors.find(key);
    ASSERT_NE(at, expected.tensors.end()) << key << " is not in the model";
    EXPECT_EQ(tensor.shape, at->second.shape) << key;
    EXPECT_TRUE(gatherer.Whole(tensor) == at->second.bytes) << key << " differs";
    found.insert(key);
  }
  for (const Param& param : checkpoint->params) {
    if (param.alias_of.empty()) continue;
    const std::string key = param.name + "/alias_of";
    ASSERT_TRUE(expected.tensors.contains(key)) << key;
    EXPECT_EQ(expected.tensors.at(key).bytes, param.alias_of);
    found.insert(key);
  }
  for (const auto& [key, tensor] : expected.tensors) {
    EXPECT_TRUE(found.contains(key)) << key << " was not found";
  }
}

TEST_P(RealCheckpoints, WeightsAreTheRoundedMasters) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const layout::ShardMap& map = checkpoint->map;
  const layout::TensorIndex index(map);
  Gatherer gatherer(map);
  std::size_t compared = 0;
  for (const Param& param : checkpoint->params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    const auto weight = index.Find(param.name, "weight");
    const auto master = index.Find(param.name, "fp32");
    ASSERT_TRUE(master) << param.name;
    if (!weight) continue;
    std::string rounded = gatherer.Whole(map.tensors[*master]);
    std::string low(Elems(param.shape) * ItemSize(param.dtype), '\0');
    Convert(DType::kF32, std::as_bytes(std::span(rounded)), param.dtype,
            std::as_writable_bytes(std::span(low)));
    Convert(param.dtype, std::as_bytes(std::span(low)), DType::kF32,
            std::as_writable_bytes(std::span(rounded)));
    EXPECT_TRUE(gatherer.Whole(map.tensors[*weight]) == rounded) << param.name;
    ++compared;
  }
  const Topology& to = checkpoint->topology;
  const bool has_weights = to.zero != 3 && !(to.zero == 0 && to.dtype == DType::kF32);
  EXPECT_EQ(compared > 0, has_weights);
}

TEST_P(RealCheckpoints, TopologyAndGroupsAreThoseOfTheTraining) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Topology& have = checkpoint->topology;
  const Topology& want = GetParam().topology;
  EXPECT_EQ(have.zero, want.zero);
  EXPECT_EQ(have.dp, want.dp);
  EXPECT_EQ(have.tp, want.tp);
  EXPECT_EQ(have.pp, want.pp);
  EXPECT_EQ(have.ep, want.ep);
  EXPECT_EQ(have.dtype, want.dtype);
  EXPECT_EQ(have.bf16_optimizer, want.bf16_optimizer);
  EXPECT_EQ(have.round_robin, want.round_robin);
  EXPECT_EQ(have.sub_group, want.sub_group);
  EXPECT_EQ(have.pipeline, want.pipeline);
  EXPECT_TRUE(checkpoint->warnings.empty()) << checkpoint->warnings.front();
  ASSERT_EQ(checkpoint->groups.size(), GetParam().groups);
  std::set<std::uint32_t> grouped;
  for (std::size_t g = 0; g < checkpoint->groups.size(); ++g) {
    const Group& group = checkpoint->groups[g];
    EXPECT_NE(group.options->Find("lr"), nullptr);
    EXPECT_EQ(group.options->Find("params"), nullptr);
    for (const std::uint32_t param : group.params) {
      EXPECT_EQ(checkpoint->params[param].group, static_cast<std::int32_t>(g));
      EXPECT_TRUE(grouped.insert(param).second) << checkpoint->params[param].name;
      EXPECT_EQ(checkpoint->params[param].expert.has_value(), group.moe);
    }
  }
  for (std::size_t i = 0; i < checkpoint->params.size(); ++i) {
    const Param& param = checkpoint->params[i];
    const bool trained = param.kind == ParamKind::kTrainable && param.alias_of.empty();
    EXPECT_EQ(grouped.contains(static_cast<std::uint32_t>(i)), trained) << param.name;
  }
}

TEST_P(RealCheckpoints, TheStepIsKeptInItsForm) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const bool sgd = GetParam().folder == "zero1_w2_sgd";
  for (const Param& param : checkpoint->params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    if (sgd) {
      EXPECT_TRUE(param.scalars.empty());
      continue;
    }
    ASSERT_EQ(param.scalars.size(), 1U) << param.name;
    EXPECT_EQ(param.scalars[0].state, "step");
    EXPECT_TRUE(param.scalars[0].is_tensor);
    float step = 0;
    ASSERT_EQ(param.scalars[0].bytes.size(), sizeof(step));
    std::memcpy(&step, param.scalars[0].bytes.data(), sizeof(step));
    EXPECT_GE(step, 4.0F);
  }
}

TEST_P(RealCheckpoints, PassedDocumentsKnowTheirPayloads) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ASSERT_EQ(checkpoint->model_states.size(), checkpoint->topology.mp());
  ASSERT_EQ(checkpoint->optimizer.size(), checkpoint->topology.mp());
  for (const auto* passed : {&checkpoint->model_states, &checkpoint->optimizer}) {
    for (const Passed& one : *passed) {
      ASSERT_EQ(one.members.size(), one.document.storages.size());
      for (std::size_t i = 0; i < one.members.size(); ++i) {
        const layout::Member& member = checkpoint->map.members.at(one.members[i]);
        EXPECT_EQ(member.offset, one.document.storages[i].offset);
        EXPECT_EQ(member.bytes, one.document.storages[i].bytes);
      }
    }
  }
  const pickle::Node* note = checkpoint->model_states[0].document.root->Find("note");
  ASSERT_NE(note, nullptr);
  EXPECT_EQ(note->text, "client state must survive");
}

TEST_P(RealCheckpoints, ACatalogueHoldsTheSame) {
  const auto source = Scan();
  ASSERT_TRUE(source) << source.error().message;
  const std::string bytes = Serialize(*source);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  ASSERT_EQ(again->files.size(), source->files.size());
  for (std::size_t i = 0; i < source->files.size(); ++i) {
    EXPECT_EQ(again->files[i].path, source->files[i].path);
    EXPECT_EQ(again->files[i].identity, source->files[i].identity);
    EXPECT_EQ(again->files[i].inlined, source->files[i].inlined);
    EXPECT_EQ(again->files[i].skeleton.pickle, source->files[i].skeleton.pickle);
    EXPECT_EQ(again->files[i].skeleton.storages.size(), source->files[i].skeleton.storages.size());
  }
  Patterns patterns;
  const auto checkpoint = ReadDeepSpeed(*again, patterns);
  EXPECT_TRUE(checkpoint) << checkpoint.error().message;
}

std::string CaseName(const testing::TestParamInfo<Case>& tested) {
  std::string name = tested.param.folder;
  constexpr std::string_view kWhole = "ckpt";
  if (tested.param.source != kWhole) name += "_" + tested.param.source.substr(kWhole.size() + 1);
  return name;
}

INSTANTIATE_TEST_SUITE_P(Fixtures, RealCheckpoints, testing::ValuesIn(Cases()), CaseName);

}  // namespace
}  // namespace shardwright::dialect
