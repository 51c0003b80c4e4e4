// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/megatron: Megatron-LM and Megatron-Core checkpoints. Megatron stores a
// model in one of two containers. Legacy folders `mp_rank_*` belong to one tensor, pipeline
// and expert rank each. torch_dist is a PyTorch distributed checkpoint with keys of the
// whole model. Both use the same names, cuts (rules.h), stages (stages.h) and gradient
// buffers of the distributed optimizer (buckets.h). Source: docs/formats/megatron.md.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
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
#include "support/base/limits.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

inline constexpr std::string_view kTracker = "latest_checkpointed_iteration.txt";
/// In the tracker file and as a folder: weights to begin a run with, not an iteration to resume.
inline constexpr std::string_view kRelease = "release";

/// A value of a source file, and the storages of its tensors.
struct Value {
  std::shared_ptr<const torch_pt::Document> document;
  const pickle::Node* root = nullptr;
  /// By storage of the document: index in the source map, or kNoMember for other values' storages.
  std::vector<std::uint32_t> members;
  static constexpr std::uint32_t kNoMember = ~std::uint32_t{0};
};

/// State that only this format can interpret.
struct RunState : OwnState {
  Value common;  ///< rank-independent dict: "args", "opt_param_scheduler", ...
  Args args;
  /// Random states by pipeline and tensor rank.
  std::map<std::pair<std::uint64_t, std::uint64_t>, Value> random;
  /// Loss scaler state by optimizer (dense, experts). An
  /// optimizer without a loss scaler has a value without root.
  std::vector<Value> scalers;
  /// Extra state of modules, such as scales of 8-bit types, by its name in the
  /// whole model: "decoder.layers.3.self_attention.linear_qkv._extra_state". Linear
  /// layers in layers of the model are listed only if their extra state is not None.
  std::map<std::string, Value> modules;
  std::vector<std::shared_ptr<const torch_pt::Document>> kept;  ///< own the groups' nodes
  bool noted = false;              ///< the checkpoint has Shardwright's notes, see notes.h
  std::vector<std::string> extra;  ///< objects that a target cannot store

  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
};

/// The container of a checkpoint.
enum class Files : std::uint8_t { kTorch, kTorchDist };
enum class OptimizerForm : std::uint8_t {
  kNone,                    ///< no distributed optimizer: states of whole parameters
  kDpReshardable,           ///< buckets: only for this tensor, pipeline and expert parallelism
  kFullyReshardable,        ///< states of whole parameters, from a distributed optimizer
  kFullyShardedModelSpace,  ///< the same in flat ranges, written by releases of 2024
};

/// Values that Megatron-LM compares with its own arguments when it resumes. A checkpoint of another
/// trainer does not record them.
struct NewRun {
  double max_rate = 0;        ///< --lr: part of the identity of parameter groups
  double min_rate = 0;        ///< --min-lr, the same
  std::uint64_t heads = 0;    ///< --num-attention-heads
  std::uint64_t samples = 0;  ///< consumed so far; the steps of Megatron's schedules
};

/// A Megatron layout: the mesh and Megatron's own options.
struct MegatronLayout : OwnLayout {
  Mesh mesh;
  Files files = Files::kTorchDist;
  OptimizerForm optimizer = OptimizerForm::kNone;
  std::uint64_t vpp = 1;
  std::uint64_t etp = 1;
  std::uint64_t first = 0;  ///< layers of the first stage, 0: as many as other stages
  std::uint64_t last = 0;
  std::uint64_t bucket = 0;  ///< elements of a gradient bucket, 0: no limit
  bool sequence_parallel = false;
  DType dtype = DType::kF32;
  std::optional<NewRun> run;  ///< set: Megatron-LM resumes another trainer's optimizer

  std::string Json() const override;
};

/// Checks metadata.json: the folder must be torch_dist, in its only version.
/// \param path  for messages
/// \error kBadInput  another content; kUnsupported  zarr
/// Pure.
Status CheckMetadata(std::string_view text, const std::string& path);

// Functions in the format's row of the registry; see Format.
bool Claims(const Listing& listing);
Belongs BelongsTo(std::string_view name);

/// Converts "100" to iter_0000100, and keeps "release".
Result<std::string> TagOf(std::string_view pointed);

/// Finds the files of an iteration.
/// \error kUnsupported  legacy folders next to a torch_dist checkpoint, a metadata.json of another
///        backend, such as zarr
/// Local; reads headers.
Result<SourceSet> Scan(const Listing& listing, const ScanOptions& options);

/// Reads the containers of one file that Scan found. Implements Format::read_file.
Result<std::vector<Container>> ReadFile(const Found& found, const os::File& file,
                                        const os::Identity& identity);

/// Reads a checkpoint. Source: docs/formats/megatron.md.
Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns);

/// Implements Format::read_weights.
Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns);

/// Chooses a layout.
/// \error kUnsupported  layers, heads or experts are not divisible by their
/// ranks, or `lr` for a checkpoint that no new run can resume; kUsage  keys that `lr` needs
Result<Layout> Resolve(const TargetSpec& spec, const Checkpoint& source);

/// Returns the naming schemes of Megatron-Core. Those with Transformer Engine come first.
std::span<const std::string_view> Sides(const TargetSpec& spec);

/// Writes torch_dist with common.pt, or legacy files.
/// \error kUnsupported  Megatron-Core cannot represent or load a part of the source; names it
/// Pure.
Result<Written> Write(const Checkpoint& source, const Layout& layout);

/// Implements TargetKey::check. \error kUsage
Status CheckWord(std::string_view key, std::string_view value);
Status CheckRate(std::string_view key, std::string_view value);

/// Checks that a value is a whole number within bounds. \error kUsage
Status CheckNumber(std::string_view key, std::string_view value, std::uint64_t least,
                   std::uint64_t most);

/// Implements TargetKey::check. \error kUsage
template <std::uint64_t kLeast, std::uint64_t kMost = limits::kRanks>
Status CheckCount(std::string_view key, std::string_view value) {
  return CheckNumber(key, value, kLeast, kMost);
}

inline constexpr std::uint64_t kMostSizes = std::uint64_t{1} << 53;  ///< of `heads` and `samples`

}  // namespace shardwright::checkpoints::megatron

namespace shardwright::checkpoints {

inline constexpr std::array<TargetKey, 15> kMegatronKeys = {{
    {.name = "tp", .help = "tensor-parallel ranks", .check = megatron::CheckCount<1>},
    {.name = "pp", .help = "pipeline stages", .check = megatron::CheckCount<1>},
    {.name = "vpp", .help = "virtual chunks of a stage", .check = megatron::CheckCount<1>},
    {.name = "ep", .help = "expert-parallel ranks", .check = megatron::CheckCount<1>},
    {.name = "etp", .help = "tensor-parallel ranks of experts", .check = megatron::CheckCount<1>},
    {.name = "dp", .help = "data-parallel ranks", .check = megatron::CheckCount<1>},
    {.name = "first",
     .help = "layers of the first stage, 0: as many as the others",
     .check = megatron::CheckCount<0>},
    {.name = "last",
     .help = "layers of the last stage, 0: as many as the others",
     .check = megatron::CheckCount<0>},
    {.name = "files",
     .help = "torch_dist, or torch for legacy files",
     .check = megatron::CheckWord},
    {.name = "optimizer",
     .help = "none for a run without the distributed optimizer; otherwise fully_reshardable, or "
             "dp_reshardable: gradient buckets, the only form of legacy files",
     .check = megatron::CheckWord},
    {.name = "bucket",
     .help = "elements of a gradient bucket (dp_reshardable), 0: no limit",
     .check = megatron::CheckCount<0>},
    {.name = "lr",
     .help = "--lr of the Megatron-LM run that resumes another trainer's checkpoint",
     .check = megatron::CheckRate},
    {.name = "min_lr", .help = "with lr: its --min-lr (default: 0)", .check = megatron::CheckRate},
    {.name = "heads",
     .help = "with lr: its --num-attention-heads (default: from the map or the checkpoint)",
     .check = megatron::CheckCount<1, megatron::kMostSizes>},
    {.name = "samples",
     .help = "with lr: samples consumed so far (default: from the checkpoint)",
     .check = megatron::CheckCount<1, megatron::kMostSizes>},
}};

}  // namespace shardwright::checkpoints
