// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "fixtures.h"

namespace shardwright::checkpoints {
namespace {

struct Case {
  fs::path folder;
  std::string note;  ///< the client state that the trainer has given
  Topology topology;
  std::size_t groups = 0;
  std::string source = "ckpt";                    // below the folder
  std::string expected = "expected.safetensors";  // below the folder
  std::size_t warnings = 0;
  bool frozen = true;  ///< true if the checkpoint contains frozen parameters
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.folder; }

Topology Make(std::uint64_t zero, std::uint64_t dp, DType dtype) {
  Topology out;
  out.zero = zero;
  out.dp = dp;
  out.dtype = dtype;
  return out;
}

/// Collects cases with folders below `root`.
class Cases {
 public:
  Cases(fs::path root, std::string note) : root_(std::move(root)), note_(std::move(note)) {}

  Case& Add(
      const std::string& name, Topology topology, std::size_t groups,
      const std::function<void(Topology&)>& more = [](Topology&) {}) {
    more(topology);
    Case added;
    added.folder = root_ / name;
    added.note = note_;
    added.topology = topology;
    added.groups = groups;
    return list_.emplace_back(added);
  }

  /// Checkpoints of one run, step by step.
  void AddSeries(const std::string& name, int first, int last, const Topology& topology) {
    for (int step = first; step <= last; ++step) {
      Case& one = Add(name, topology, 4, [](Topology& t) { t.ep = 2; });
      one.source = "ckpt/global_step" + std::to_string(step);
      one.expected = "expected_" + std::to_string(step) + ".safetensors";
    }
  }

  /// Adds the cases that both folders have.
  void AddCommon() {
    Add("zero1_w2", Make(1, 2, DType::kF32), 2);
    Add("zero1_w2_sgd", Make(1, 2, DType::kF32), 2);
    Add("zero2_w4_three_groups", Make(2, 4, DType::kF32), 3);
    Add("zero2_w3_frozen_tied", Make(2, 3, DType::kF32), 1);
    Add("zero2_w2_round_robin", Make(2, 2, DType::kF32), 1,
        [](Topology& t) { t.round_robin = true; });
    Add("bf16_zero2_w2", Make(2, 2, DType::kBF16), 2);
    Add("bf16opt_w4", Make(1, 4, DType::kBF16), 2, [](Topology& t) { t.bf16_optimizer = true; });
    Add("zero3_w4_frozen", Make(3, 4, DType::kF32), 1);
    Add("bf16_zero3_w3", Make(3, 3, DType::kBF16), 2);
    Add("zero0_w1_fp32", Make(0, 1, DType::kF32), 2);
    Add("zero0_w2_bf16", Make(0, 2, DType::kBF16), 2);
    Add("moe4_ep2_zero1_w2", Make(1, 2, DType::kF32), 4, [](Topology& t) { t.ep = 2; });
    Add("moe4_ep2_zero2_w4", Make(2, 4, DType::kBF16), 4, [](Topology& t) { t.ep = 2; });
    Add("pp2_dp2_zero1", Make(1, 2, DType::kF32), 2, [](Topology& t) {
      t.pp = 2;
      t.pipeline = true;
    });
    Add("autotp2_dp2_zero1", Make(1, 2, DType::kF32), 1, [](Topology& t) { t.tp = 2; });
  }

  std::vector<Case> Take() { return std::move(list_); }

 private:
  fs::path root_;
  std::string note_;
  std::vector<Case> list_;
};

std::vector<Case> OwnCases() {
  Cases cases(OwnCheckpoints(), "kept by whoever converts");
  cases.AddCommon();
  cases.Add("zero3_w2_sub_groups", Make(3, 2, DType::kF32), 2,
            [](Topology& t) { t.sub_group = 300; });
  cases.Add("fp16_zero2_w2", Make(2, 2, DType::kF16), 2);
  cases.Add("zero2_w2_left_out", Make(2, 2, DType::kF32), 1).frozen = false;
  cases.AddSeries("moe4_ep2_series", 4, 6, Make(2, 2, DType::kF32));
  // These do not distinguish frozen parameters from buffers, which causes a warning.
  const auto experts = [](Topology& t) { t.ep = 2; };
  cases.Add("0.12.6_moe4_ep2_zero1_w2", Make(1, 2, DType::kF32), 4, experts).warnings = 1;
  cases.Add("0.12.6_bf16_zero2_w3", Make(2, 3, DType::kBF16), 1);
  cases.Add("0.14.5_moe4_ep2_zero2_w4", Make(2, 4, DType::kF32), 4, experts).warnings = 1;
  cases.Add("0.14.5_zero3_w2", Make(3, 2, DType::kF32), 2);
  cases.Add("0.16.9_moe4_ep2_zero1_w2", Make(1, 2, DType::kF32), 4, experts).warnings = 1;
  cases.Add("0.16.9_bf16opt_w2", Make(1, 2, DType::kBF16), 2,
            [](Topology& t) { t.bf16_optimizer = true; });
  return cases.Take();
}

std::vector<Case> SharedCases() {
  const std::vector<fs::path> roots = SharedCheckpoints({""});
  if (roots.empty()) return {};
  Cases cases(roots[0], "client state must survive");
  cases.AddCommon();
  cases.Add("zero3_w2_sub_groups", Make(3, 2, DType::kF32), 2,
            [](Topology& t) { t.sub_group = 3000; });
  cases.Add("llama_tp1_zero2_w2", Make(2, 2, DType::kF32), 1);
  cases.AddSeries("moe8_ep2_series", 4, 9, Make(2, 2, DType::kF32));
  return cases.Take();
}

class RealCheckpoints : public testing::TestWithParam<Case> {
 protected:
  Result<SourceSet> Scan() const { return ScanSource({(folder_ / GetParam().source).string()}); }

  Result<Checkpoint> Read() const {
    SW_TRY_ASSIGN(const SourceSet source, Scan());
    Patterns patterns;
    return ReadDeepSpeed(source, patterns);
  }

  fs::path folder_ = GetParam().folder;
};

TEST_P(RealCheckpoints, EveryTensorIsWhereTheMapSays) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  ExpectTensors(*checkpoint, Expected::Read(folder_ / GetParam().expected), GetParam().frozen);
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
  const Topology to = TopologyOf(checkpoint->layout);
  const bool has_weights = to.zero != 3 && !(to.zero == 0 && to.dtype == DType::kF32);
  EXPECT_EQ(compared > 0, has_weights);
}

TEST_P(RealCheckpoints, TopologyAndGroupsAreThoseOfTheTraining) {
  auto checkpoint = Read();
  ASSERT_TRUE(checkpoint) << checkpoint.error().message;
  const Topology have = TopologyOf(checkpoint->layout);
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
  EXPECT_EQ(checkpoint->warnings.size(), GetParam().warnings)
      << testing::PrintToString(checkpoint->warnings);
  ASSERT_EQ(checkpoint->groups.size(), GetParam().groups);
  // Experts of all ranks come layer by layer, as one rank with all of them lists them.
  for (const Group& group : checkpoint->groups) {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> experts;
    for (const std::uint32_t param : group.params) {
      const auto& id = checkpoint->params[param].expert;
      if (id) experts.emplace_back(id->layer, id->expert);
    }
    EXPECT_TRUE(std::is_sorted(experts.begin(), experts.end()));
  }
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
  const bool sgd = folder_.filename() == "zero1_w2_sgd";
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
  const EngineState* state = EngineStateOf(*checkpoint);
  ASSERT_NE(state, nullptr);
  ASSERT_EQ(state->model_states.size(), TopologyOf(checkpoint->layout).mp());
  ASSERT_EQ(state->optimizer.size(), TopologyOf(checkpoint->layout).mp());
  for (const auto* passed : {&state->model_states, &state->optimizer}) {
    for (const Passed& one : *passed) {
      ASSERT_EQ(one.members.size(), one.document.storages.size());
      for (std::size_t i = 0; i < one.members.size(); ++i) {
        const layout::Member& member = checkpoint->map.members.at(one.members[i]);
        EXPECT_EQ(member.offset, one.document.storages[i].offset);
        EXPECT_EQ(member.bytes, one.document.storages[i].bytes);
      }
    }
  }
  const pickle::Node* note = state->model_states[0].document.root->Find("note");
  ASSERT_NE(note, nullptr);
  EXPECT_EQ(note->text, GetParam().note);
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
    const Container& a = again->files[i].containers.at(0);
    const Container& b = source->files[i].containers.at(0);
    EXPECT_EQ(a.inlined, b.inlined);
    EXPECT_EQ(a.metadata->header, b.metadata->header);
    EXPECT_EQ(a.metadata->storages.size(), b.metadata->storages.size());
  }
  Patterns patterns;
  const auto checkpoint = ReadDeepSpeed(*again, patterns);
  EXPECT_TRUE(checkpoint) << checkpoint.error().message;
}

std::string CaseName(const testing::TestParamInfo<Case>& tested) {
  std::string name = tested.param.folder.filename().string();
  constexpr std::string_view kWhole = "ckpt";
  if (tested.param.source != kWhole) name += "_" + tested.param.source.substr(kWhole.size() + 1);
  return TestName(name);
}

INSTANTIATE_TEST_SUITE_P(Own, RealCheckpoints, testing::ValuesIn(OwnCases()), CaseName);
INSTANTIATE_TEST_SUITE_P(Shared, RealCheckpoints, testing::ValuesIn(SharedCases()), CaseName);

}  // namespace
}  // namespace shardwright::checkpoints
