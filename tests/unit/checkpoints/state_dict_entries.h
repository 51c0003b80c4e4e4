// SPDX-License-Identifier: Apache-2.0
// Fixture that converts native checkpoints with unusual entries in their module's state dict.

#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "convert/convert.h"
#include "convert/input.h"
#include "same_checkpoint.h"
#include "support/comm/comm.h"
#include "tiny_checkpoint.h"

namespace shardwright::checkpoints {

using pickle::Arena;
using pickle::Node;

class StateDictEntries : public testing::Test {
 protected:
  using Change = std::function<void(PtFile&, Node* root, Node* module)>;

  void WriteSource(std::int64_t stage, const Change& change) {
    TinyZero tiny;
    tiny.stage = stage;
    tiny.change_model = [&](PtFile& file, Node* root) {
      Node* module = pickle::CopyDict(file.arena, root->Find("module"));
      Set(file.arena, root, "frozen_param_shapes", file.arena.None());
      Set(file.arena, root, "frozen_param_fragments", file.arena.None());
      Set(file.arena, root, "module", module);
      change(file, root, module);
    };
    tiny.Write(scratch_ / "source");
  }

  /// With the files of --patterns in pattern_files_.
  Result<convert::ConvertReport> TryConvert(const std::string& from, const std::string& to,
                                            const std::string& target,
                                            const std::string& name = "deepspeed") {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    SW_TRY_ASSIGN(
        const auto input,
        convert::OpenInput(*comm, {{(scratch_ / from).string()}, pattern_files_, false}, sink));
    warnings_ = input->checkpoint.warnings;
    const Format& format = *FindFormat(name);
    SW_TRY_ASSIGN(const TargetSpec spec, ParseTarget(format, target));
    convert::ConvertOptions options;
    options.output = (scratch_ / to).string();
    return convert::Convert(*comm, *input, spec, format, "test", options, sink);
  }

  std::vector<std::string> Convert(const std::string& from, const std::string& to,
                                   const std::string& target,
                                   const std::string& name = "deepspeed") {
    const auto done = TryConvert(from, to, target, name);
    EXPECT_TRUE(done.has_value()) << done.error().message;
    return done ? done->not_carried : std::vector<std::string>();
  }

  /// Expects that stage 3 fails because the source does not record the role of a tensor.
  void ExpectUndecided(const std::string& from, const std::string& tensor) {
    const auto refused = TryConvert(from, "refused", "zero=3,dp=2");
    ASSERT_FALSE(refused.has_value()) << from;
    EXPECT_EQ(refused.error().code, Errc::kUnsupported);
    EXPECT_NE(refused.error().message.find('"' + tensor + '"'), std::string::npos)
        << refused.error().message;
    EXPECT_NE(refused.error().message.find("frozen_parameters"), std::string::npos);
  }

  /// Writes a --patterns file that decides the role.
  void Decide(const std::string& text) {
    const fs::path path = scratch_ / "patterns.json";
    std::ofstream(path) << text;
    pattern_files_ = {path.string()};
  }

  torch_pt::Document Model(const std::string& folder, const std::string& rank = "") {
    return ParsedFile(scratch_ / folder / "global_step4" / (rank + "mp_rank_00_model_states.pt"));
  }

  /// The values of a float32 tensor of a checkpoint, whole.
  std::vector<float> Values(const std::string& folder, const std::string& name,
                            const std::string& state) {
    const auto checkpoint = Read(scratch_ / folder);
    EXPECT_TRUE(checkpoint.has_value()) << checkpoint.error().message;
    if (!checkpoint) return {};
    const auto found = layout::TensorIndex(checkpoint->map).Find(name, state);
    EXPECT_TRUE(found.has_value()) << name << " " << state;
    if (!found) return {};
    const std::string bytes = Gatherer(checkpoint->map).Whole(checkpoint->map.tensors[*found]);
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }

  static std::vector<std::string> Texts(const Node* list) {
    std::vector<std::string> out;
    for (const Node* item : list->items) out.push_back(item->text);
    return out;
  }

  Scratch scratch_;
  std::vector<std::string> pattern_files_;
  std::vector<std::string> warnings_;  // of the last source
};
}  // namespace shardwright::checkpoints
