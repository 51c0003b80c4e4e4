// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/native/write: writes DeepSpeed's native files.
// Three steps. Geometry decides which rank holds what. BuildDocument makes the object graph of one
// file from it, twice (once to plan the file, once to write it), so that no graph outlives its use.
// WriteDeepSpeed lays the files out and maps their payloads.

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

// Tensor states by number; those of the optimizer follow.
inline constexpr std::uint32_t kFp32 = 0;
inline constexpr std::uint32_t kWeight = 1;
inline constexpr std::uint32_t kBuffer = 2;
inline constexpr std::uint32_t kFrozen = 3;
inline constexpr std::uint32_t kFirstMoment = 4;

/// One optimizer group of one mp rank: what is flattened together.
struct FlatGroup {
  std::uint32_t source = 0;  ///< index into Geometry::groups, whose options it takes
  bool moe = false;
  std::uint64_t ranks = 1;  ///< that partition it
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

/// Which file of the checkpoint.
struct FileId {
  FileKind kind = FileKind::kModel;
  std::uint32_t mp = 0;
  std::uint32_t rank = 0;    ///< ZeRO rank; kExpertOptimizer: expert-parallel rank
  std::uint32_t layer = 0;   ///< kLayer: layer index; kExpert: MoE layer id
  std::uint32_t expert = 0;  ///< kExpert: global
};

/// What a target's ranks hold. Immutable and self-contained: it outlives the source checkpoint.
struct Geometry {
  Topology to;
  Topology from;
  std::string tag;  ///< of the output
  std::vector<Param> params;
  std::vector<Group> groups;  ///< of the target: MoE groups split again for its expert parallelism
  std::vector<Passed> model_states;
  std::vector<Passed> optimizer;
  std::vector<OpaqueEntry> entries;
  std::shared_ptr<pickle::Arena> arena;  ///< what the nodes of params and groups belong to

  std::vector<std::string> states;  ///< names by number
  /// By parameter and state: element type in the source, nothing where the source has no such
  /// tensor (kFp32 and kWeight: the type to write).
  std::vector<std::vector<std::optional<DType>>> dtypes;
  std::vector<layout::CutPtr> cuts;  ///< [param * tp + tp_rank]
  /// By the same index: the shape of a shard whose cut applies to a view of the parameter.
  std::unordered_map<std::size_t, Shape> viewed;
  std::vector<std::vector<std::uint32_t>> stage_params;  ///< by stage: in module order
  std::vector<std::vector<FlatGroup>> flat;              ///< by mp rank
  std::unordered_map<std::string, std::uint32_t> by_name;
  /// The target's split rules for whoever reads it: made once, for it grows with the square of the
  /// ranks. Null where there is none, or where the source's own still holds (keeps_info).
  const pickle::Node* info = nullptr;
  pickle::Arena info_arena;
  bool keeps_info = false;
  bool expert_data_first = false;
  bool layer_axes = false;   ///< layer files carry "model_NN" also without tensor parallelism
  bool plain_fp32 = false;   ///< stage 0 in fp32: the weights in `module` are the masters
  bool flat_stage0 = false;  ///< stage 0 under FP16_Optimizer: flat groups in the model file
  bool has_experts = false;
  bool frozen_unknown = false;                           ///< as Checkpoint's
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
  /// The first tensor-parallel rank that holds the same elements of a parameter as rank `tp_rank`.
  std::uint32_t FirstWithCut(std::uint32_t param, std::uint32_t tp_rank) const;
  /// True where stage `stage` holds a parameter (tied ones: several do).
  bool StageHolds(std::uint32_t stage, std::uint32_t param) const;
  /// Every stage holds everything without a pipeline; the stage of a layer otherwise.
  std::uint32_t StageOfLayer(std::uint32_t layer) const;
  /// Name of an expert parameter on the ranks that hold it: with its local id.
  std::string LocalName(std::uint32_t param) const;
  ExpertRank PlaceOf(std::uint32_t rank) const {
    return ExpertRankOf(rank, to.dp, to.ep, expert_data_first);
  }
  /// The source mp rank whose client state a target mp rank takes over.
  const Passed& PassedModel(std::uint32_t mp) const;
  const Passed* PassedOptimizer(std::uint32_t mp) const;
  std::uint32_t PassedRank(std::uint32_t mp) const;
  /// Returns the source tensor-parallel rank whose opaque entries a target mp rank gets.
  std::uint32_t EntryRank(std::uint32_t mp) const { return to.tp == from.tp ? tp_rank_of(mp) : 0; }
  /// \error kUnsupported if the parameters of a flat group disagree in element type; names two
  Result<std::optional<DType>> GroupDType(const FlatGroup& group, std::size_t ep, std::size_t first,
                                          std::size_t last, std::uint32_t state) const;
  /// Path of a file below the output folder.
  std::string PathOf(const FileId& id) const;
};

using GeometryPtr = std::shared_ptr<const Geometry>;

/// \error kInfeasible, kUnsupported  what the topology cannot hold; names the parameter
/// \error kBadInput                  the checkpoint contradicts itself
Result<GeometryPtr> MakeGeometry(const Checkpoint& source, const Topology& topology);

/// Every `.pt` file of the target, in the order they are laid out.
std::vector<FileId> ListFiles(const Geometry& geometry);

/// Which elements of which tensors a storage holds.
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

/// One file's object graph. Nodes passed through stay the geometry's.
struct Document : checkpoints::Document {
  std::vector<Cutting> cuttings;  ///< by Fill::tensor

  /// A contiguous tensor with a storage of its own.
  const pickle::Node* Add(const Cutting& cutting, DType dtype, Shape shape,
                          bool requires_grad = false);
};

/// \error kBadInput, kUnsupported  a passed value that cannot be written
Result<std::unique_ptr<Document>> BuildDocument(const Geometry& geometry, const FileId& id);

// Parts of BuildDocument, by file.

/// The loss scaling that goes on in the target.
struct LossScale {
  bool dynamic = false;
  double scale = 1.0;
  std::int64_t iteration = 0;
  std::int64_t last_overflow = -1;
  double factor = 2.0;
  std::int64_t window = 1000;
  const pickle::Node* object = nullptr;  ///< the source's own, when it goes on unchanged
};

LossScale LossScaleOf(const Geometry& geometry);
const pickle::Node* LossScalerNode(pickle::Arena& arena, const LossScale& scale);

/// The source's ds_config with stage, precision, sub-groups and the like as the target has them.
const pickle::Node* ConfigNode(pickle::Arena& arena, const Geometry& geometry,
                               const pickle::Node* config);
const pickle::Node* VersionNode(pickle::Arena& arena, const Geometry& geometry,
                                const pickle::Node* model_root);

/// Options of a group for the target's `param_groups`, with the ids of its parameters.
/// \error kBadInput if an option is a tensor that the source does not hold
Result<const pickle::Node*> OptionsNode(Document& document, const Geometry& geometry,
                                        const FlatGroup& group,
                                        std::vector<const pickle::Node*> ids);

/// The optimizer state at stage 0 (plain, FP16_UnfusedOptimizer or FP16_Optimizer form) of one
/// expert-parallel rank.
Result<const pickle::Node*> Stage0Node(Document& document, const Geometry& geometry,
                                       std::uint32_t mp, std::uint32_t ep);

Status BuildModel(Document& document, const Geometry& geometry, const FileId& id);
Status BuildLayer(Document& document, const Geometry& geometry, const FileId& id);
Status BuildExpert(Document& document, const Geometry& geometry, const FileId& id);
Status BuildExpertOptimizer(Document& document, const Geometry& geometry, const FileId& id);
Status BuildZero12(Document& document, const Geometry& geometry, const FileId& id);
Status BuildZero3(Document& document, const Geometry& geometry, const FileId& id);

}  // namespace shardwright::checkpoints::deepspeed
