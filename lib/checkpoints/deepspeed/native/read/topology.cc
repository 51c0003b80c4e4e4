// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "checkpoints/deepspeed/native/read/read_internal.h"

namespace shardwright::checkpoints::reader {
namespace {

/// Returns the number of tensor-parallel ranks: every layer has one file per rank.
Result<std::uint64_t> LayerWidth(const Reading& reading) {
  const auto& layers = reading.grid.layers;
  std::size_t width = 0;
  for (const auto& [layer, files] : layers) width = std::max(width, files.size());
  for (const auto& [layer, files] : layers) {
    if (files.size() == width) continue;
    return Fail(Errc::kNotFound, reading.source.tag, ": layer ", layer, " has ", files.size(),
                " files (", reading.file_name(files.begin()->second), "), other layers have ",
                width);
  }
  return std::uint64_t{width};
}

/// Returns true if two mp ranks have the same parameters, as tensor-parallel peers do.
bool SameNames(const Model& a, const Model& b) {
  if (a.has_shapes && b.has_shapes) return a.trainable == b.trainable;
  if (a.module == nullptr || b.module == nullptr) return a.module == b.module;
  if (a.module->entry_count() != b.module->entry_count()) return false;
  for (std::size_t i = 0; i < a.module->entry_count(); ++i) {
    if (a.module->key(i)->text != b.module->key(i)->text) return false;
  }
  return true;
}

/// Returns true if a model file states as many model-parallel ranks as there are
/// files. Contradicting degrees are then ignored: with sequence parallelism groups
/// (Ulysses) DeepSpeed writes the number of a sequence's ranks as tp_degree.
Result<bool> CountsAllRanks(const Reading& reading, const Model& model) {
  if (model.document.root->Find("mp_world_size") == nullptr) return false;
  SW_TRY_ASSIGN(const std::uint64_t said,
                CountAt(reading, model.file, model.document.root, "mp_world_size"));
  return said == reading.mp_ranks;
}

Status ReadDegrees(Reading* reading) {
  Topology& to = reading->topology;
  const Model& model = reading->models.front();
  const std::string& name = reading->file_name(model.file);
  const std::uint64_t mp = reading->mp_ranks;
  if (const Node* said = model.document.root->Find("checkpoint_parallel_dimensions");
      said != nullptr && said->is_dict()) {
    SW_TRY_ASSIGN(to.pp, CountAt(*reading, model.file, said, "pp_degree"));
    SW_TRY_ASSIGN(to.tp, CountAt(*reading, model.file, said, "tp_degree"));
    if (to.pp != 0 && mp % to.pp == 0 && mp / to.pp == to.tp) return {};
    SW_TRY_ASSIGN(const bool counted, CountsAllRanks(*reading, model));
    if (!counted) {
      return Fail(Errc::kBadInput, name, ": checkpoint_parallel_dimensions: pp ", to.pp,
                  " times tp ", to.tp, " differs from ", mp, " model-parallel ranks");
    }
  }
  to.tp = mp;
  if (!reading->grid.layers.empty()) {
    SW_TRY_ASSIGN(to.tp, LayerWidth(*reading));
    if (to.tp == 0 || mp % to.tp != 0) {
      return Fail(Errc::kBadInput, reading->source.tag, ": ", mp,
                  " model-parallel ranks do not divide into the ", to.tp, " files of each layer");
    }
  }
  to.pp = mp / to.tp;
  return {};
}

Status CheckPeers(const Reading& reading) {
  const Topology& to = reading.topology;
  for (std::uint64_t mp = 0; mp < reading.mp_ranks; ++mp) {
    const Model& peer = reading.models[mp - mp % to.tp];
    if (SameNames(peer, reading.models[mp])) continue;
    return Fail(Errc::kBadInput, reading.file_name(peer.file), " and ",
                reading.file_name(reading.models[mp].file),
                ": different parameters on ranks of one tensor-parallel group");
  }
  return {};
}

Status ReadExpertParallel(Reading* reading) {
  Topology& to = reading->topology;
  if (reading->shards.empty()) return {};
  std::optional<std::uint64_t> expert_ranks;
  for (const std::vector<Shard>& shards : reading->shards) {
    const Shard& shard = shards.front();
    for (const std::uint64_t count : shard.partition_count) {
      if (count == reading->ranks) continue;
      if (count == 0 || reading->ranks % count != 0) {
        return Fail(Errc::kBadInput, reading->file_name(shard.file), ": partition_count ", count,
                    " does not divide ", reading->ranks);
      }
      if (expert_ranks && *expert_ranks != count) {
        return Fail(Errc::kUnsupported, reading->file_name(shard.file),
                    ": expert groups of different sizes: partition_count ", *expert_ranks, " and ",
                    count);
      }
      expert_ranks = count;
    }
  }
  if (!expert_ranks) return {};
  to.ep = reading->ranks / *expert_ranks;
  const Model& model = reading->models.front();
  if (model.has_shapes && reading->config == nullptr && *expert_ranks > 1) {
    reading->out.warnings.push_back(
        reading->file_name(model.file) +
        ": the file has no ds_config: use_data_before_expert_parallelism is assumed to be off");
  }
  return {};
}

}  // namespace

Status ReadTopology(Reading* reading) {
  Topology& to = reading->topology;
  to.dp = reading->ranks;
  to.pipeline = !reading->grid.layers.empty();
  if (!reading->shards.empty()) {
    to.zero = reading->shards.front().front().stage;
    to.bf16_optimizer = reading->shards.front().front().bf16_optimizer;
  }
  if (reading->only_weights) {
    const auto stage = pickle::AsCount(FindPath(reading->config, {"zero_optimization", "stage"}));
    to.zero = stage ? std::min<std::uint64_t>(*stage, 2) : 0;
  }
  SW_TRY(ReadDegrees(reading));
  SW_TRY(CheckPeers(*reading));
  SW_TRY(ReadExpertParallel(reading));
  to.stages.resize(to.pp);
  if (to.pp > 1 && !to.pipeline) {
    return Fail(
        Errc::kUnsupported, reading->source.tag, ": ", to.pp,
        " pipeline stages without layer files: only DeepSpeed pipeline modules are supported");
  }
  if (to.pipeline && !reading->grid.experts.empty()) {
    return Fail(Errc::kUnsupported, reading->source.tag,
                ": experts in a pipeline module are not supported");
  }
  return {};
}

}  // namespace shardwright::checkpoints::reader
