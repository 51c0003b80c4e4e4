// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/megatron: checkpoints of Megatron-LM and Megatron-Core.
// Two containers hold the same model: legacy folders `mp_rank_*`, one for each tensor, pipeline and
// expert rank, and torch_dist, a distributed checkpoint of PyTorch whose keys are those of the
// whole model. Names, cuts (rules.h), stages (stages.h) and the gradient buffers of the distributed
// optimizer (buckets.h) are the same for both. Source: docs/formats/megatron.md.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/megatron/args.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/format.h"
#include "checkpoints/tp_rules/patterns.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

inline constexpr std::string_view kTracker = "latest_checkpointed_iteration.txt";

/// A value of a source file, with the storages of the tensors in it.
struct Value {
  std::shared_ptr<const torch_pt::Document> document;
  const pickle::Node* root = nullptr;
  /// By storage of the document: in the source map, kNoMember for those of other values.
  std::vector<std::uint32_t> members;
  static constexpr std::uint32_t kNoMember = ~std::uint32_t{0};
};

/// What only this format understands.
struct RunState : OwnState {
  Value common;  ///< dict: "args", "opt_param_scheduler", ... : what belongs to no rank
  Args args;
  /// Random states by pipeline and tensor rank.
  std::map<std::pair<std::uint64_t, std::uint64_t>, Value> random;
  /// By optimizer (dense, experts): state of a loss scaler, a value without root where there is
  /// none.
  std::vector<Value> scalers;
  /// Extra state of modules, such as scales of 8-bit types, by its name in the whole model:
  /// "decoder.layers.3.self_attention.linear_qkv._extra_state". For linear layers in layers of the
  /// model it is listed only if it is not None.
  std::map<std::string, Value> modules;
  std::vector<std::shared_ptr<const torch_pt::Document>> kept;  ///< own nodes of groups
  bool noted = false;              ///< names and places do not tell all: our notes do
  std::vector<std::string> extra;  ///< objects that have no place in a target

  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
};

/// Which files there are, and what the optimizer's state looks like in them.
enum class Files : std::uint8_t { kTorch, kTorchDist };
enum class OptimizerForm : std::uint8_t {
  kNone,                    ///< no distributed optimizer: state of whole parameters
  kDpReshardable,           ///< buckets: for this tensor, pipeline and expert parallelism only
  kFullyReshardable,        ///< state of whole parameters, of a distributed optimizer
  kFullyShardedModelSpace,  ///< the same in stretches, as releases of 2024 wrote it
};

/// A layout of Megatron's, beyond the mesh.
struct MegatronLayout : OwnLayout {
  Mesh mesh;
  Files files = Files::kTorchDist;
  OptimizerForm optimizer = OptimizerForm::kNone;
  std::uint64_t vpp = 1;
  std::uint64_t etp = 1;
  std::uint64_t first = 0;  ///< layers of the first stage, 0: as many as others
  std::uint64_t last = 0;
  std::uint64_t bucket = 0;  ///< elements of a gradient bucket, 0: no limit
  bool sequence_parallel = false;
  DType dtype = DType::kF32;

  std::string Json() const override;
};

/// Checks what metadata.json says: that a folder is torch_dist, in the one version there is.
/// \param path  for messages
/// \error kBadInput  anything else; kUnsupported  zarr
/// Pure.
Status CheckMetadata(std::string_view text, const std::string& path);

// The row of the table; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);

/// "100" means iter_0000100, "release" itself.
Result<std::string> TagOf(std::string_view pointed);

/// Finds the files of an iteration.
/// \error kUnsupported  legacy folders next to a torch_dist checkpoint, a metadata.json of another
///        backend, such as zarr
/// Local; reads headers.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan has found, as Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Source: docs/formats/megatron.md.
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights.
Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns);

/// \error kUnsupported  ranks that layers, heads or experts do not divide by
Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// Those of Megatron-Core, with Transformer Engine unless told otherwise.
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// torch_dist with common.pt, or legacy files.
/// \error kUnsupported  what Megatron-Core has no form for, or cannot load; names it
/// Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);

/// As TargetKey::check. \error kUsage
Status CheckRanks(std::string_view key, std::string_view value);
Status CheckWord(std::string_view key, std::string_view value);

}  // namespace shardwright::checkpoints::megatron

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 11> kMegatronKeys = {{
    {.name = "tp", .help = "tensor-parallel ranks", .check = megatron::CheckRanks},
    {.name = "pp", .help = "pipeline stages", .check = megatron::CheckRanks},
    {.name = "vpp", .help = "virtual chunks of a stage", .check = megatron::CheckRanks},
    {.name = "ep", .help = "expert-parallel ranks", .check = megatron::CheckRanks},
    {.name = "etp", .help = "tensor-parallel ranks of experts", .check = megatron::CheckRanks},
    {.name = "dp", .help = "data-parallel ranks", .check = megatron::CheckRanks},
    {.name = "first",
     .help = "layers of the first stage, 0: as many as the others",
     .check = megatron::CheckRanks},
    {.name = "last",
     .help = "layers of the last stage, 0: as many as the others",
     .check = megatron::CheckRanks},
    {.name = "files", .help = "torch_dist, or torch: legacy", .check = megatron::CheckWord},
    {.name = "optimizer",
     .help = "none: of a run without the distributed optimizer; with it fully_reshardable, or "
             "dp_reshardable: gradient buckets, all that legacy files have",
     .check = megatron::CheckWord},
    {.name = "bucket",
     .help = "elements of a gradient bucket (dp_reshardable), 0: no limit",
     .check = megatron::CheckRanks},
}};

}  // namespace shardwright::checkpoints
