// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/flat.h"
#include "engine/tensor/shape.h"
#include "files/pickle/node.h"
#include "files/torch_pt/writer.h"
#include "support/base/crc32.h"

namespace shardwright::checkpoints {

using pickle::Arena;
using pickle::Node;

/// One `.pt` file under construction.
class PtFile {
 public:
  Arena arena;

  /// \param dtype  type of the storage's elements; `values` supplies their bytes
  std::uint32_t Storage(std::vector<float> values, DType dtype = DType::kF32) {
    specs_.push_back({dtype, false, values.size() * sizeof(float) / ItemSize(dtype)});
    payloads_.push_back(std::move(values));
    return static_cast<std::uint32_t>(specs_.size() - 1);
  }
  const Node* View(std::uint32_t storage, Shape shape, std::uint64_t offset = 0) {
    pickle::Tensor tensor;
    tensor.storage = storage;
    tensor.dtype = specs_[storage].dtype;
    tensor.offset = offset;
    tensor.strides = ContiguousStrides(shape);
    tensor.shape = std::move(shape);
    return arena.TensorOf(std::move(tensor));
  }
  const Node* Tensor(std::vector<float> values, Shape shape) {
    return View(Storage(std::move(values)), std::move(shape));
  }
  const Node* Flat(std::vector<float> values) {
    const Shape shape{values.size()};
    return Tensor(std::move(values), shape);
  }
  Node* Dict(const std::vector<std::pair<std::string, const Node*>>& entries,
             bool ordered = false) {
    Node* dict = arena.Dict(ordered);
    for (const auto& [key, value] : entries) pickle::Set(arena, dict, key, value);
    return dict;
  }
  /// A dict with int keys 0, 1, ...
  const Node* Numbered(const std::vector<const Node*>& values) {
    Node* dict = arena.Dict();
    for (std::size_t i = 0; i < values.size(); ++i) {
      dict->items.push_back(arena.Int(static_cast<std::int64_t>(i)));
      dict->items.push_back(values[i]);
    }
    return dict;
  }
  const Node* Counts(const std::vector<std::uint64_t>& values) {
    std::vector<const Node*> items;
    items.reserve(values.size());
    for (const std::uint64_t value : values) {
      items.push_back(arena.Int(static_cast<std::int64_t>(value)));
    }
    return arena.List(items);
  }

  void Write(const std::filesystem::path& path, const Node* root) const {
    const auto layout = torch_pt::Layout::Make(root, specs_);
    ASSERT_TRUE(layout) << layout.error().message;
    std::string bytes(layout->file_bytes(), '\0');
    std::vector<std::uint32_t> sums;
    for (std::size_t i = 0; i < payloads_.size(); ++i) {
      const auto payload = std::as_bytes(std::span(payloads_[i]));
      sums.push_back(Crc32(payload));
      if (!payload.empty()) {
        std::memcpy(bytes.data() + layout->payload_offset(i), payload.data(), payload.size());
      }
    }
    for (const auto& piece : layout->Frame(sums)) {
      std::memcpy(bytes.data() + piece.offset, piece.bytes.data(), piece.bytes.size());
    }
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
  }

 private:
  std::vector<torch_pt::StorageSpec> specs_;
  std::vector<std::vector<float>> payloads_;
};

struct TinyParam {
  std::string name;
  Shape shape;
  std::size_t group = 0;
};

/// Element `i` of a parameter's state: every element of a checkpoint is different.
inline float TinyValue(std::size_t param, const std::string& state, std::uint64_t i) {
  const float base = static_cast<float>(1000 * (param + 1)) + static_cast<float>(i);
  return state == "fp32" ? base : state == "exp_avg" ? -base : base / 4;
}

/// A ZeRO-1/2 checkpoint of a few small parameters, with hooks to change every part.
struct TinyZero {
  std::vector<TinyParam> params{{"emb.weight", {11, 6}, 0},
                                {"l1.weight", {7, 6}, 0},
                                {"l2.weight", {6, 7}, 0},
                                {"l1.bias", {7}, 1},
                                {"l2.bias", {6}, 1}};
  std::size_t groups = 2;
  std::uint64_t ranks = 2;
  std::int64_t stage = 2;
  bool round_robin = false;
  std::vector<std::vector<std::uint64_t>> gaps;  ///< by group, in flat order; empty: none
  bool write_gaps = false;                       ///< as param_alignment_paddings
  enum class Slices { kNone, kTrue, kOriginalOrder } slices = Slices::kTrue;
  bool strip_padding = true;
  enum class Step { kTensor, kInt, kGroup, kNone } step = Step::kTensor;
  std::int64_t steps = 4;
  std::vector<std::string> states{"exp_avg", "exp_avg_sq"};
  /// Last changes to a file's dicts: rank, outer or inner dict.
  std::function<void(PtFile&, Node*)> change_model = [](PtFile&, Node*) {};
  std::function<void(PtFile&, std::uint64_t, Node*)> change_shard = [](PtFile&, std::uint64_t,
                                                                       Node*) {};

  /// One group of one rank, for its last changes.
  struct GroupDicts {
    PtFile& file;
    std::uint64_t rank;
    std::uint64_t partition;
    Node* state;
    Node* options;
  };
  std::function<void(const GroupDicts&)> change_group = [](const GroupDicts&) {};

  /// Indices into params of a group, in flat order.
  std::vector<std::size_t> Order(std::size_t group) const {
    std::vector<std::size_t> mine;
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (params[i].group == group) mine.push_back(i);
    }
    if (!round_robin) return mine;
    std::vector<std::size_t> out;
    for (const std::uint32_t i : RoundRobinOrder(mine.size(), ranks)) out.push_back(mine[i]);
    return out;
  }

  /// A group's flat buffer before the tail padding.
  std::vector<float> Buffer(std::size_t group, const std::string& state) const {
    std::vector<float> out;
    const std::vector<std::size_t> order = Order(group);
    for (std::size_t k = 0; k < order.size(); ++k) {
      for (std::uint64_t i = 0; i < Elems(params[order[k]].shape); ++i) {
        out.push_back(TinyValue(order[k], state, i));
      }
      if (!gaps.empty() && k + 1 < order.size()) out.resize(out.size() + gaps[group][k], -1.0F);
    }
    return out;
  }

  /// Slices of a rank: where each parameter starts in its partition.
  const Node* SlicesOf(PtFile& file, std::size_t group, std::uint64_t rank,
                       std::uint64_t partition) const {
    TinyZero told = *this;
    if (slices == Slices::kOriginalOrder) {
      told.round_robin = false;
      told.gaps.clear();
    }
    const std::vector<std::size_t> order = told.Order(group);
    Node* dict = file.arena.Dict(true);
    std::uint64_t at = 0;
    for (std::size_t k = 0; k < order.size(); ++k) {
      const std::uint64_t end = at + Elems(params[order[k]].shape);
      const std::uint64_t first = std::max(at, rank * partition);
      const std::uint64_t last = std::min(end, (rank + 1) * partition);
      if (first < last) {
        Node* address = file.arena.Dict();
        pickle::Set(file.arena, address, "numel",
                    file.arena.Int(static_cast<std::int64_t>(last - first)));
        pickle::Set(file.arena, address, "start",
                    file.arena.Int(static_cast<std::int64_t>(first - rank * partition)));
        pickle::Set(file.arena, dict, params[order[k]].name,
                    file.arena.Object("deepspeed.utils.tensor_fragment.fragment_address", address));
      }
      at = end + (told.gaps.empty() || k + 1 == order.size() ? 0 : told.gaps[group][k]);
    }
    return dict;
  }

  void WriteShard(const std::filesystem::path& folder, std::uint64_t rank) const {
    PtFile file;
    std::vector<const Node*> masters;
    std::vector<const Node*> states_by_group;
    std::vector<const Node*> options;
    std::vector<const Node*> paddings;
    std::vector<const Node*> slice_nodes;
    std::vector<const Node*> gap_nodes;
    for (std::size_t g = 0; g < groups; ++g) {
      std::vector<float> buffer = Buffer(g, "fp32");
      const std::uint64_t total = buffer.size();
      const std::uint64_t partition = *PartitionElems(total, ranks);
      const std::uint64_t padding = PartitionPadding(total, partition, rank);
      const auto part = [&](const std::string& state) {
        std::vector<float> all = Buffer(g, state);
        all.resize(partition * ranks, -7.0F);
        const auto first = static_cast<std::ptrdiff_t>(rank * partition);
        return std::vector<float>(all.begin() + first,
                                  all.begin() + first + static_cast<std::ptrdiff_t>(partition));
      };
      masters.push_back(
          file.View(file.Storage(part("fp32")), {strip_padding ? partition - padding : partition}));
      Node* state = file.arena.Dict();
      if (step == Step::kTensor) {
        pickle::Set(file.arena, state, "step", file.Tensor({static_cast<float>(steps)}, {}));
      } else if (step == Step::kInt) {
        pickle::Set(file.arena, state, "step", file.arena.Int(steps));
      }
      for (const std::string& name : states) {
        pickle::Set(file.arena, state, name, file.Flat(part(name)));
      }
      states_by_group.push_back(state);
      Node* group = file.Dict({{"lr", file.arena.Float(0.5)}, {"params", file.Counts({g})}});
      if (step == Step::kGroup) pickle::Set(file.arena, group, "step", file.arena.Int(steps));
      change_group({file, rank, partition, state, group});
      options.push_back(group);
      paddings.push_back(file.arena.Int(static_cast<std::int64_t>(padding)));
      slice_nodes.push_back(SlicesOf(file, g, rank, partition));
      std::vector<std::uint64_t> written(Order(g).size());
      if (!gaps.empty()) std::copy(gaps[g].begin(), gaps[g].end(), written.begin());
      gap_nodes.push_back(file.Counts(written));
    }
    Node* inner = file.Dict(
        {{"loss_scaler", file.arena.Float(1.0)},
         {"base_optimizer_state", file.Dict({{"state", file.Numbered(states_by_group)},
                                             {"param_groups", file.arena.List(options)}})},
         {"single_partition_of_fp32_groups", file.arena.List(masters)},
         {"zero_stage", file.arena.Int(stage)},
         {"group_paddings", file.arena.List(paddings)},
         {"partition_count", file.Counts(std::vector<std::uint64_t>(groups, ranks))}});
    if (slices != Slices::kNone) {
      pickle::Set(file.arena, inner, "param_slice_mappings", file.arena.List(slice_nodes));
    }
    if (write_gaps) {
      pickle::Set(file.arena, inner, "param_alignment_paddings", file.arena.List(gap_nodes));
    }
    change_shard(file, rank, inner);
    file.Write(folder / ("zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt"),
               file.Dict({{"optimizer_state_dict", inner}}));
  }

  void WriteModel(const std::filesystem::path& folder) const {
    PtFile file;
    Node* module = file.arena.Dict(true);
    for (std::size_t i = 0; i < params.size(); ++i) {
      std::vector<float> values;
      for (std::uint64_t k = 0; k < Elems(params[i].shape); ++k) {
        values.push_back(TinyValue(i, "fp32", k));
      }
      pickle::Set(file.arena, module, params[i].name, file.Tensor(values, params[i].shape));
    }
    std::vector<const Node*> shapes;
    for (std::size_t g = 0; g < groups; ++g) {
      Node* dict = file.arena.Dict(true);
      for (const std::size_t i : Order(g)) {
        pickle::Set(file.arena, dict, params[i].name, file.arena.SizeOf(params[i].shape));
      }
      shapes.push_back(dict);
    }
    Node* root = file.Dict({{"module", module},
                            {"buffer_names", file.arena.List({})},
                            {"optimizer", file.arena.None()},
                            {"param_shapes", file.arena.List(shapes)},
                            {"shared_params", file.arena.Dict()},
                            {"global_steps", file.arena.Int(steps)},
                            {"dp_world_size", file.arena.Int(static_cast<std::int64_t>(ranks))},
                            {"mp_world_size", file.arena.Int(1)},
                            {"ds_version", file.arena.String("0.19.6")}});
    change_model(file, root);
    file.Write(folder / "mp_rank_00_model_states.pt", root);
  }

  /// Writes SAVE/latest and SAVE/global_step4/...
  void Write(const std::filesystem::path& save) const {
    const std::filesystem::path folder = save / "global_step4";
    WriteModel(folder);
    for (std::uint64_t rank = 0; rank < ranks; ++rank) WriteShard(folder, rank);
    std::ofstream(save / "latest") << "global_step4\n";
  }
};

}  // namespace shardwright::checkpoints
