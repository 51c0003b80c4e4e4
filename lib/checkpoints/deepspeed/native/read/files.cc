// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "support/base/limits.h"

namespace shardwright::checkpoints::reader {
namespace {

std::string TwoDigits(std::uint64_t number) {
  std::string text = std::to_string(number);
  return text.size() < 2 ? "0" + text : text;
}

std::uint64_t RanksIn(const Grid::Ranked& files) {
  std::uint64_t ranks = 0;
  for (const auto& [key, file] : files) ranks = std::max(ranks, key.second + 1);
  return ranks;
}

/// Returns any model file, for values that are equal in all files of that kind.
std::optional<std::uint32_t> AnyModel(const Grid& grid) {
  if (!grid.model.empty()) return grid.model.begin()->second;
  if (!grid.model_zero3.empty()) return grid.model_zero3.begin()->second;
  return std::nullopt;
}

Status CheckCap(const Reading& reading, std::uint64_t count, const std::string& what) {
  if (count > 0 && count <= limits::kRanks) return {};
  return Fail(Errc::kBadInput, reading.source.tag, ": ", what, ": 1 to ", limits::kRanks,
              " expected, found ", count);
}

/// Returns the greatest partition count of a shard, which is the number of ZeRO ranks.
std::optional<std::uint64_t> PartitionCount(const Node* root) {
  const Node* counts = FindPath(root, {"optimizer_state_dict", "partition_count"});
  if (counts == nullptr) return std::nullopt;
  if (auto one = pickle::AsCount(counts)) return *one;
  auto list = pickle::AsShape(counts);
  if (!list || list->empty()) return std::nullopt;
  return *std::max_element(list->begin(), list->end());
}

bool IsEnabled(const Node* config, std::string_view section) {
  const Node* enabled = FindPath(config, {section, "enabled"});
  return enabled != nullptr && enabled->kind == pickle::Kind::kBool && enabled->integer != 0;
}

std::vector<std::string> MissingFiles(const Reading& reading, const std::string& prefix,
                                      bool shards) {
  const Grid& grid = reading.grid;
  std::vector<std::string> names;
  for (std::uint64_t mp = 0; mp < reading.mp_ranks; ++mp) {
    if (!grid.zero3() && !grid.model.contains(mp)) names.push_back(ModelFileName(false, 0, mp));
    for (std::uint64_t rank = 0; shards && rank < reading.ranks; ++rank) {
      if (grid.zero3() && !grid.model_zero3.contains({mp, rank})) {
        names.push_back(ModelFileName(true, rank, mp));
      }
      if (!grid.shard.contains({mp, rank})) names.push_back(ShardFileName(prefix, rank, mp));
    }
  }
  return names;
}

}  // namespace

std::string ShardFileName(const std::string& prefix, std::uint64_t rank, std::uint64_t mp) {
  return prefix + "zero_pp_rank_" + std::to_string(rank) + "_mp_rank_" + TwoDigits(mp) +
         "_optim_states.pt";
}

Status FindFiles(Reading* reading) {
  Grid& grid = reading->grid;
  const std::vector<SourceFile>& files = reading->source.files;
  const auto twice = [&](std::uint32_t a, std::uint32_t b) {
    return Fail(Errc::kBadInput, files[a].name, " and ", files[b].name,
                ": two files for the same rank");
  };
  for (std::uint32_t i = 0; i < files.size(); ++i) {
    const std::optional<FileName> name = ParseFileName(files[i].name);
    if (!name) continue;
    switch (name->role) {
      case FileRole::kModel:
        if (const auto [at, fresh] = grid.model.emplace(name->mp, i); !fresh) {
          return twice(at->second, i);
        }
        break;
      case FileRole::kModelZero3:
        if (const auto [at, fresh] = grid.model_zero3.emplace(std::pair(name->mp, name->rank), i);
            !fresh) {
          return twice(at->second, i);
        }
        break;
      case FileRole::kShard: {
        const auto [at, fresh] = grid.shard.emplace(std::pair(name->mp, name->rank), i);
        if (!fresh || (grid.shard.size() > 1 && grid.shard_prefix != name->prefix)) {
          return twice(fresh ? grid.shard.begin()->second : at->second, i);
        }
        grid.shard_prefix = name->prefix;
        break;
      }
      case FileRole::kLayer:
        grid.layers[name->layer].emplace(name->axes, i);
        break;
      case FileRole::kExpert:
        if (name->old_style) {
          return Fail(Errc::kUnsupported, files[i].path,
                      ": expert files without a layer number (DeepSpeed before 0.5.1)");
        }
        grid.experts[{name->layer, name->expert}].emplace(name->mp, i);
        break;
      case FileRole::kExpertOptim:
        grid.expert_optim.emplace(name->rank, i);
        break;
    }
  }
  if (!grid.model.empty() && grid.zero3()) {
    return Fail(Errc::kUnsupported, files[grid.model.begin()->second].name, " and ",
                files[grid.model_zero3.begin()->second].name,
                ": model states of stage 3 and of another stage in one folder: move the files of "
                "one save to a folder of its own");
  }
  if (reading->only_weights) {
    if (grid.zero3()) {
      return Fail(Errc::kUnsupported, reading->source.tag,
                  ": at stage 3 the weights are in the optimizer shards");
    }
    grid.shard.clear();
    grid.expert_optim.clear();
  }
  if (grid.shard.empty() && !grid.expert_optim.empty()) {
    return Fail(
        Errc::kUnsupported, files[grid.expert_optim.begin()->second].path,
        ": experts trained without ZeRO are not supported: train them with ZeRO stage 1 or 2");
  }
  return {};
}

Status CheckComplete(Reading* reading) {
  const Grid& grid = reading->grid;
  const std::optional<std::uint32_t> any = AnyModel(grid);
  if (!any) return Missing(*reading, {ModelFileName(false, 0, 0)});
  SW_TRY_ASSIGN(const Document model, Open(*reading, *any));
  const Node* config = model.root->Find("ds_config");

  std::uint64_t mp = 1;
  for (const auto& [rank, file] : grid.model) mp = std::max(mp, rank + 1);
  for (const auto* files : {&grid.model_zero3, &grid.shard}) {
    for (const auto& [key, file] : *files) mp = std::max(mp, key.first + 1);
  }
  if (model.root->Find("mp_world_size") != nullptr) {
    SW_TRY_ASSIGN(const std::uint64_t said, CountAt(*reading, *any, model.root, "mp_world_size"));
    mp = std::max(mp, said);
  }
  reading->mp_ranks = mp;
  SW_TRY(CheckCap(*reading, mp, "model-parallel ranks"));

  std::uint64_t world = std::max(RanksIn(grid.shard), RanksIn(grid.model_zero3));
  bool shards = !grid.shard.empty() || grid.zero3();
  std::string prefix = grid.shard_prefix;
  std::optional<std::uint64_t> count;
  if (!grid.shard.empty()) {
    SW_TRY_ASSIGN(const Document shard, Open(*reading, grid.shard.begin()->second));
    count = PartitionCount(shard.root);
  } else {
    const Node* shapes = model.root->Find("param_shapes");
    shards = !reading->only_weights && (shards || (shapes != nullptr && !shapes->is_none()));
    if (shards && (IsEnabled(config, "bf16") || IsEnabled(config, "bfloat16"))) prefix = "bf16_";
  }
  if (!count && model.root->Find("dp_world_size") != nullptr) {
    SW_TRY_ASSIGN(count, CountAt(*reading, *any, model.root, "dp_world_size"));
  }
  if (count && shards && world > *count) {
    return Fail(Errc::kBadInput, reading->source.tag, ": files of ", world,
                " ZeRO ranks found, the checkpoint was written by ", *count);
  }
  reading->ranks = std::max(world, count.value_or(1));
  SW_TRY(CheckCap(*reading, reading->ranks, "ZeRO ranks"));
  const std::vector<std::string> missing = MissingFiles(*reading, prefix, shards);
  if (!missing.empty()) return Missing(*reading, missing);
  return {};
}

}  // namespace shardwright::checkpoints::reader
