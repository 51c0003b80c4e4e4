// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/native/write: writes DeepSpeed's native files. Writing has
// three steps. Geometry assigns parameters to ranks. BuildDocument makes the object
// graph of one file from it, once to plan the file and once to write it, so that graphs
// are freed after use. WriteDeepSpeed lays out the files and maps their payloads.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/engine_state.h"
#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/common/file_name.h"
#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/pickled/document.h"
#include "engine/layout/cut.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"
#include "files/pickle/node.h"
#include "files/torch_pt/writer.h"

namespace shardwright::checkpoints::deepspeed {

// Tensor states by number. The optimizer's states have the numbers after these.
inline constexpr std::uint32_t kFp32 = 0;
inline constexpr std::uint32_t kWeight = 1;
inline constexpr std::uint32_t kBuffer = 2;
inline constexpr std::uint32_t kFrozen = 3;
inline constexpr std::uint32_t kFirstMoment = 4;

/// One optimizer group of one mp rank, which is flattened into one buffer.
struct FlatGroup {
  std::uint32_t source = 0;  ///< index into Geometry::groups, for the options
  bool moe = false;
  std::uint64_t ranks = 1;  ///< number of ranks that partition it
  /// By expert-parallel rank (one entry for a dense group): parameters in flat order. All entries
  /// have the same extents.
  std::vector<std::vector<std::uint32_t>> params;
  std::vector<std::uint64_t> elems;    ///< by position, of this tensor-parallel rank
  std::vector<std::uint64_t> offsets;  ///< by position, in the compact flat buffer
  std::uint64_t total = 0;
  std::uint64_t partition = 0;       ///< ZeRO-1/2: elements per rank
  std::vector<SubGroup> sub_groups;  ///< ZeRO-3
  std::uint32_t sub_group_first = 0;
};

enum class FileKind : std::uint8_t { kModel, kOptimizer, kLayer, kExpert, kExpertOptimizer };

/// Identifies a file of the checkpoint.
struct FileId {
  FileKind kind = FileKind::kModel;
  std::uint32_t mp = 0;
  std::uint32_t rank = 0;    ///< ZeRO rank; kExpertOptimizer: expert-parallel rank
  std::uint32_t layer = 0;   ///< kLayer: layer index; kExpert: MoE layer id
  std::uint32_t expert = 0;  ///< kExpert: global
};

/// Contents of a target's ranks. Immutable and self-contained: it outlives the source checkpoint.
struct Geometry {
  Topology to;
  Topology from;
  std::string tag;  ///< of the output
  std::vector<Param> params;
  std::vector<Group> groups;  ///< of the target: MoE groups split again for its expert parallelism
  std::vector<Passed> model_states;
  std::vector<Passed> optimizer;
  std::size_t options_rank = 0;  ///< as in EngineState
  std::vector<OpaqueEntry> entries;
  std::shared_ptr<pickle::Arena> arena;  ///< owns the nodes of params and groups

  std::vector<std::string> states;  ///< names by number
  /// Element types by parameter and state: the source's type, or nothing if
  /// the source has no such tensor. For kFp32 and kWeight: the type to write.
  std::vector<std::vector<std::optional<DType>>> dtypes;
  std::vector<layout::CutPtr> cuts;  ///< [param * tp + tp_rank]
  /// By the same index: the shard's shape, if the cut applies to a view of the parameter.
  std::unordered_map<std::size_t, Shape> viewed;
  std::vector<std::vector<std::uint32_t>> stage_params;  ///< by stage: in module order
  std::vector<std::vector<FlatGroup>> flat;              ///< by mp rank
  std::unordered_map<std::string, std::uint32_t> by_name;
  /// The target's split rules for later readers. Built once, because their size grows with the
  /// square of the ranks. Null if there are none or if the source's rules still apply (keeps_info).
  const pickle::Node* info = nullptr;
  pickle::Arena info_arena;
  bool keeps_info = false;
  bool expert_data_first = false;
  bool layer_axes = false;   ///< layer files carry "model_NN" even without tensor parallelism
  bool plain_fp32 = false;   ///< stage 0 in fp32: the weights in `module` are the master weights
  bool flat_stage0 = false;  ///< stage 0 under FP16_Optimizer: flat groups in the model file
  bool has_experts = false;
  bool frozen_unknown = false;                           ///< as Checkpoint::frozen_unknown
  bool frozen_experts = false;                           ///< there is a frozen expert parameter
  std::map<std::uint32_t, std::uint64_t> layer_experts;  ///< experts by MoE layer
  /// By MoE layer and global expert: its parameters, in module order.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>> expert_params;

  std::uint32_t stage_of(std::uint32_t mp) const { return mp / static_cast<std::uint32_t>(to.tp); }
  std::uint32_t tp_rank_of(std::uint32_t mp) const {
    return mp % static_cast<std::uint32_t>(to.tp);
  }
  const layout::CutPtr& cut(std::uint32_t param, std::uint32_t mp) const {
    return cuts[param * to.tp + tp_rank_of(mp)];
  }
  /// Returns the shape of a parameter's shard on a rank, in the parameter's own dimensions. Its cut
  /// may have the dimensions of a view.
  const Shape& ShardShape(std::uint32_t param, std::uint32_t mp) const {
    const auto found = viewed.find(param * to.tp + tp_rank_of(mp));
    return found == viewed.end() ? cut(param, mp)->shard() : found->second;
  }
  /// Returns the first tensor-parallel rank that has the same elements of a parameter as `tp_rank`.
  std::uint32_t FirstWithCut(std::uint32_t param, std::uint32_t tp_rank) const;
  /// Returns true if stage `stage` has a parameter. Several stages have a tied parameter.
  bool StageHolds(std::uint32_t stage, std::uint32_t param) const;
  /// Returns the stage of a layer. Without a pipeline every stage has all layers.
  std::uint32_t StageOfLayer(std::uint32_t layer) const;
  /// Returns the name of an expert parameter, with its local id, on the ranks that have it.
  std::string LocalName(std::uint32_t param) const;
  ExpertRank PlaceOf(std::uint32_t rank) const {
    return ExpertRankOf(rank, to.dp, to.ep, expert_data_first);
  }
  /// Returns the client state for a target mp rank, from the source mp rank PassedRank(mp).
  const Passed& PassedModel(std::uint32_t mp) const;
  const Passed* PassedOptimizer(std::uint32_t mp) const;
  std::uint32_t PassedRank(std::uint32_t mp) const;
  /// Returns the source's tensor-parallel rank that supplies a target mp rank's opaque entries.
  std::uint32_t EntryRank(std::uint32_t mp) const { return to.tp == from.tp ? tp_rank_of(mp) : 0; }
  /// \error kUnsupported if the parameters of a flat group differ in element type; names two
  Result<std::optional<DType>> GroupDType(const FlatGroup& group, std::size_t ep, std::size_t first,
                                          std::size_t last, std::uint32_t state) const;
  /// Returns the path of a file below the output folder.
  std::string PathOf(const FileId& id) const;
};

using GeometryPtr = std::shared_ptr<const Geometry>;

/// \error kInfeasible, kUnsupported  contents that the topology cannot store; names the parameter
/// \error kBadInput                  the checkpoint contradicts itself
Result<GeometryPtr> MakeGeometry(const Checkpoint& source, const Topology& topology);

/// Warns about pipeline stages with different numbers of parameter groups, with which the first
/// training step of DeepSpeed never returns (docs/formats/deepspeed.md, "Pipeline"). Nothing if all
/// stages have the same number, and for optimizers that train such a model.
/// Pure.
std::optional<std::string> StageGroupsWarning(const Geometry& geometry);

/// Returns every `.pt` file of the target, in the order of their layout.
std::vector<FileId> ListFiles(const Geometry& geometry);

/// The elements of tensors that a storage contains.
struct Cutting {
  enum class Kind : std::uint8_t {
    kWhole,  ///< a parameter's cut in one place
    kFlat,   ///< a partition of a ZeRO-1/2 group
    kSub,    ///< a rank's part of a ZeRO-3 sub-group
    kShare,  ///< a rank's part of a frozen ZeRO-3 parameter
  };
  Kind kind = Kind::kWhole;
  std::uint32_t state = 0;
  std::uint32_t param = 0;      ///< kWhole, kShare
  std::uint32_t group = 0;      ///< kFlat, kSub: index into flat[mp]
  std::uint32_t sub_group = 0;  ///< kSub: index into its sub_groups
};

/// One file's object graph. The geometry keeps ownership of nodes copied from the source.
struct Document : checkpoints::Document {
  std::vector<Cutting> cuttings;  ///< by Fill::tensor

  /// Adds a contiguous tensor with its own storage.
  const pickle::Node* Add(const Cutting& cutting, DType dtype, Shape shape,
                          bool requires_grad = false);
};

/// \error kBadInput, kUnsupported  a value of the source cannot be written
Result<std::unique_ptr<Document>> BuildDocument(const Geometry& geometry, const FileId& id);

// Parts of BuildDocument, by kind of file.

/// The loss scaling state of the target.
struct LossScale {
  bool dynamic = false;
  double scale = 1.0;
  std::int64_t iteration = 0;
  std::int64_t last_overflow = -1;
  double factor = 2.0;
  std::int64_t window = 1000;
  const pickle::Node* object = nullptr;  ///< the source's object, if it continues unchanged
};

LossScale LossScaleOf(const Geometry& geometry);
const pickle::Node* LossScalerNode(pickle::Arena& arena, const LossScale& scale);

/// Returns the source's ds_config with the target's stage, precision, sub-groups and the like.
const pickle::Node* ConfigNode(pickle::Arena& arena, const Geometry& geometry,
                               const pickle::Node* config);
const pickle::Node* VersionNode(pickle::Arena& arena, const Geometry& geometry,
                                const pickle::Node* model_root);

/// Returns a group's options for the target's `param_groups`, with the ids of its parameters.
/// \error kBadInput if an option is a tensor that the source does not contain
Result<const pickle::Node*> OptionsNode(Document& document, const Geometry& geometry,
                                        const FlatGroup& group,
                                        std::vector<const pickle::Node*> ids);

/// Returns the optimizer state of one expert-parallel rank at stage 0, in
/// the form of a plain optimizer, FP16_UnfusedOptimizer or FP16_Optimizer.
Result<const pickle::Node*> Stage0Node(Document& document, const Geometry& geometry,
                                       std::uint32_t mp, std::uint32_t ep);

Status BuildModel(Document& document, const Geometry& geometry, const FileId& id);
Status BuildLayer(Document& document, const Geometry& geometry, const FileId& id);
Status BuildExpert(Document& document, const Geometry& geometry, const FileId& id);
Status BuildExpertOptimizer(Document& document, const Geometry& geometry, const FileId& id);
Status BuildZero12(Document& document, const Geometry& geometry, const FileId& id);
Status BuildZero3(Document& document, const Geometry& geometry, const FileId& id);

}  // namespace shardwright::checkpoints::deepspeed
