// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/deepspeed.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/registry.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "engine/tensor/shape.h"
#include "files/torch_pt/reader.h"
#include "support/base/crc32.h"

namespace shardwright::checkpoints::test {

/// A source checkpoint in memory: every tensor whole, one member each. Element e of tensor t holds
/// the float 1000 t + e.
class Model {
 public:
  Model() {
    source_.origin = "deepspeed";
    source_.tag = "global_step4";
    Topology topology;
    topology.zero = 1;
    topology.dp = 2;
    source_.layout = LayoutOf(topology);
    source_.states = {"exp_avg", "exp_avg_sq"};
    source_.arena = std::make_shared<pickle::Arena>();
    source_.map.files = {"source.pt"};
    pickle::Arena& arena = *source_.arena;
    model_ = arena.Dict();
    Set(arena, model_, "global_steps", arena.Int(4));
    Set(arena, model_, "skipped_steps", arena.Int(0));
    Set(arena, model_, "ds_version", arena.String("0.19.8"));
    Set(arena, model_, "note", arena.String("kept"));
    pickle::Node* config = arena.Dict();
    Set(arena, config, "gradient_clipping", arena.Float(1.0));
    Set(arena, model_, "ds_config", config);
    Passed passed;
    passed.document.arena = source_.arena;
    passed.document.root = model_;
    state_->model_states.push_back(passed);
    source_.own = state_;
    source_.iteration = 4;
  }

  /// Adds a parameter of group `group` (-1: frozen, -2: buffer).
  Param& Add(const std::string& name, const Shape& shape, int group = 0) {
    Param param;
    param.name = name;
    param.shape = shape;
    param.dtype = source_.layout.dtype;
    param.group = group;
    param.kind = group >= 0    ? ParamKind::kTrainable
                 : group == -1 ? ParamKind::kFrozen
                               : ParamKind::kBuffer;
    const auto index = static_cast<std::uint32_t>(source_.params.size());
    if (group < 0) {
      AddTensor(name, group == -1 ? "frozen" : "buffer", shape);
    } else {
      while (source_.groups.size() <= static_cast<std::size_t>(group)) AddGroup();
      source_.groups[static_cast<std::size_t>(group)].params.push_back(index);
      for (const char* state : {"fp32", "weight", "exp_avg", "exp_avg_sq"}) {
        AddTensor(name, state, shape);
      }
      Scalar step;
      step.state = "step";
      step.is_tensor = true;
      step.bytes = std::string("\0\0\x80\x40", 4);  // 4.0F
      param.scalars.push_back(step);
    }
    source_.params.push_back(std::move(param));
    return source_.params.back();
  }

  Param& AddExpert(std::uint32_t layer, std::uint32_t expert, const std::string& rest,
                   const Shape& shape, int group) {
    Param& param =
        Add("blocks." + std::to_string(layer) + ".moe.deepspeed_moe.experts.deepspeed_experts." +
                std::to_string(expert) + "." + rest,
            shape, group);
    param.expert = ExpertId{layer, expert, ExpertModuleOf(param.name)};
    source_.groups[static_cast<std::size_t>(group)].moe = true;
    return param;
  }

  void AddAlias(const std::string& name, const std::string& of) {
    Param param = source_.params.front();
    param.name = name;
    param.alias_of = of;
    param.scalars.clear();
    source_.params.push_back(std::move(param));
  }

  Checkpoint& source() { return source_; }
  EngineState& state() { return *state_; }
  /// Changes the source's topology.
  template <class F>
  void Change(const F& change) {
    Topology topology = TopologyOf(source_.layout);
    change(topology);
    source_.layout = LayoutOf(topology);
  }
  pickle::Node* model() { return model_; }
  pickle::Arena& arena() { return *source_.arena; }

  static float ValueOf(std::size_t tensor, std::uint64_t elem) {
    return static_cast<float>(tensor * 1000 + elem);
  }

  /// The number that identifies a tensor's values.
  std::size_t TensorOf(const std::string& name, const std::string& state) const {
    const auto found = layout::TensorIndex(source_.map).Find(name, state);
    return found ? *found : ~std::size_t{0};
  }

 private:
  void AddGroup() {
    Group group;
    pickle::Node* options = arena().Dict();
    Set(arena(), options, "lr", arena().Float(0.001 * (1.0 + double(source_.groups.size()))));
    Set(arena(), options, "name", arena().String("g" + std::to_string(source_.groups.size())));
    group.options = options;
    source_.groups.push_back(std::move(group));
  }

  void AddTensor(const std::string& name, const std::string& state, const Shape& shape) {
    layout::ShardMap& map = source_.map;
    const std::uint64_t elems = Elems(shape);
    const auto number = static_cast<std::uint32_t>(map.members.size());
    map.members.push_back({.file = 0, .offset = at_, .bytes = elems * 4, .crc32 = {}, .name = "d"});
    at_ += elems * 4;
    map.arrays.push_back({.dtype = DType::kF32, .regions = {{number, 0, elems}}});
    layout::LogicalTensor tensor{name, state, DType::kF32, shape, {}};
    tensor.fragments.push_back({std::make_shared<const layout::Cut>(layout::Cut::Whole(shape)),
                                {.array = number},
                                layout::Role::kOwner});
    map.tensors.push_back(std::move(tensor));
  }

  Checkpoint source_;
  std::shared_ptr<EngineState> state_ = std::make_shared<EngineState>();
  pickle::Node* model_ = nullptr;
  std::uint64_t at_ = 0;
};

/// A target's files with their bytes, made as the engine would except for element types.
class Rendered {
 public:
  Rendered(const Model& model, const plan::Target& target) {
    const Status valid = layout::Validate(target.map);
    EXPECT_TRUE(valid.has_value()) << valid.error().message;
    for (std::size_t array = 0; array < target.map.arrays.size(); ++array) {
      for (const layout::Region& region : target.map.arrays[array].regions) {
        EXPECT_EQ(region.offset, 0U);
        bytes_[region.member] =
            std::string(region.elems * ItemSize(target.map.arrays[array].dtype), '\0');
      }
    }
    for (const layout::LogicalTensor& tensor : target.map.tensors)
      FillTensor(model, target, tensor);
    for (const plan::OutputFile& file : target.files) AddFile(target, file);
  }

  const std::string& bytes(const std::string& path) const { return files_.at(path); }
  bool has(const std::string& path) const { return files_.contains(path); }
  std::vector<std::string> paths() const {
    std::vector<std::string> paths;
    for (const auto& [path, bytes] : files_) paths.push_back(path);
    return paths;
  }

  /// Parses a `.pt` file back.
  torch_pt::Document Parse(const std::string& path) const {
    const auto folder = std::filesystem::temp_directory_path();
    const std::string at = (folder / ("sw-write-" + std::to_string(::getpid()) + ".pt")).string();
    std::ofstream(at, std::ios::binary) << files_.at(path);
    auto file = os::File::OpenRead(at);
    EXPECT_TRUE(file.has_value());
    auto metadata = torch_pt::ReadMetadata(*file);
    EXPECT_TRUE(metadata.has_value()) << path << ": " << metadata.error().message;
    auto document = torch_pt::Parse(*metadata);
    EXPECT_TRUE(document.has_value()) << path << ": " << document.error().message;
    std::filesystem::remove(at);
    return *std::move(document);
  }

  /// A float32 tensor's elements.
  std::vector<float> Floats(const std::string& path, const torch_pt::Document& document,
                            const pickle::Node* node) const {
    std::vector<float> values(Elems(node->tensor->shape));
    const auto& storage = document.storages[node->tensor->storage];
    std::memcpy(values.data(), files_.at(path).data() + storage.offset + node->tensor->offset * 4,
                values.size() * 4);
    return values;
  }

 private:
  void FillTensor(const Model& model, const plan::Target& target,
                  const layout::LogicalTensor& tensor) {
    std::size_t number = model.TensorOf(tensor.name, tensor.state);
    // A weight is its master rounded, a master a widened weight.
    for (const char* other : {"fp32", "weight"}) {
      if (number == ~std::size_t{0}) number = model.TensorOf(tensor.name, other);
    }
    ASSERT_NE(number, ~std::size_t{0}) << tensor.name << " " << tensor.state;
    if (tensor.dtype != DType::kF32) return;
    for (const layout::Fragment& fragment : tensor.fragments) {
      const layout::Placement& at = fragment.at;
      fragment.cut->ForShardRange(0, fragment.cut->shard_elems(), [&](const layout::Run& run) {
        for (std::uint64_t i = 0; i < run.elems; ++i) {
          const std::uint64_t v = run.shard + i + at.vector_offset;
          const layout::Region& region = target.map.arrays[at.array].regions.at(v / at.chunk);
          const std::uint64_t place = (at.region_offset + v % at.chunk) * 4;
          const float value = Model::ValueOf(number, run.logical + i);
          std::string& bytes = bytes_.at(region.member);
          ASSERT_LE(place + 4, bytes.size());
          std::memcpy(bytes.data() + place, &value, 4);
        }
      });
    }
  }

  void AddFile(const plan::Target& target, const plan::OutputFile& file) {
    std::string bytes(file.bytes, '\xee');
    std::vector<std::uint32_t> crcs;
    std::uint64_t last = 0;
    std::uint64_t covered = 0;
    for (const plan::Payload& payload : file.payloads) {
      EXPECT_GE(payload.offset, last) << file.path;
      last = payload.offset + payload.bytes;
      std::string part = payload.bytes_inline;
      if (payload.kind == plan::Payload::Kind::kArray) {
        const auto& region = target.map.arrays[payload.array].regions.at(payload.holder);
        EXPECT_EQ(target.map.members[region.member].offset, payload.offset);
        EXPECT_EQ(target.map.files[target.map.members[region.member].file], file.path);
        part = bytes_.at(region.member);
      } else if (payload.kind == plan::Payload::Kind::kMember) {
        part = std::string(payload.bytes, static_cast<char>('a' + payload.member));
      }
      EXPECT_EQ(part.size(), payload.bytes) << file.path;
      crcs.push_back(Crc32(std::as_bytes(std::span(part))));
      bytes.replace(payload.offset, payload.bytes, part);
      covered += payload.bytes;
    }
    const Status made =
        file.frame(crcs, [&](std::uint64_t offset, std::string_view piece) -> Status {
          EXPECT_LE(offset + piece.size(), bytes.size());
          bytes.replace(offset, piece.size(), piece);
          covered += piece.size();
          return {};
        });
    ASSERT_TRUE(made.has_value()) << made.error().message;
    EXPECT_EQ(covered, file.bytes) << file.path;
    files_[file.path] = std::move(bytes);
  }

  std::map<std::uint32_t, std::string> bytes_;
  std::map<std::string, std::string> files_;
};

}  // namespace shardwright::checkpoints::test
