// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/native/read: reads DeepSpeed's native files.
// ReadDeepSpeed is a list of passes over one Reading, in the order of their declarations below:
// find the files, read model and optimizer documents, find topology, parameters, flat buffers and
// states, and map each of them. Only the documents of ZeRO rank 0 are kept; of every other file a
// few numbers.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoints/deepspeed/common/entries.h"
#include "checkpoints/deepspeed/common/file_name.h"
#include "checkpoints/deepspeed/common/reader_common.h"
#include "checkpoints/deepspeed/common/universal_info.h"
#include "checkpoints/model/source.h"
#include "checkpoints/tp_rules/patterns.h"
#include "engine/layout/shard_map.h"
#include "files/pickle/node.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::reader {

using pickle::Node;
using torch_pt::Document;

/// Files by what they are; values index SourceSet::files.
struct Grid {
  using Ranked = std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint32_t>;
  std::map<std::uint64_t, std::uint32_t> model;  ///< by mp
  Ranked model_zero3;                            ///< by (mp, rank)
  Ranked shard;                                  ///< by (mp, rank)
  std::string shard_prefix;
  std::map<std::uint64_t, std::map<std::string, std::uint32_t>> layers;  ///< by layer, axes
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::map<std::uint64_t, std::uint32_t>>
      experts;  ///< by (MoE layer, expert), mp
  std::map<std::uint64_t, std::uint32_t> expert_optim;

  bool zero3() const { return !model_zero3.empty(); }
};

/// The model states of one mp rank, from the file of its ZeRO rank 0.
struct Model {
  std::uint32_t file = 0;
  Document document;
  const Node* module = nullptr;                 ///< dict, or null in a pipeline
  bool has_shapes = false;                      ///< param_shapes is there
  std::vector<std::vector<NamedShape>> shapes;  ///< by group, or by sub-group at stage 3
  /// Without param_shapes: by group, why its order was worked out and is told by no file; empty
  /// where it is told.
  std::vector<std::string> inferred;
  bool has_buffer_names = false;
  FrozenLists frozen_lists;        ///< \pre ReadParams
  bool lists_frozen = false;       ///< frozen_param_shapes is a dict, not None
  std::vector<NamedShape> frozen;  ///< frozen_param_shapes
  std::unordered_set<std::string> buffers;
  Ties ties;
  std::unordered_set<std::string> trainable;  ///< names of `shapes`, expert ids local
};

/// Where one parameter lies in a rank's partition, as the rank itself says.
struct Slice {
  std::string name;
  std::uint64_t start = 0;
  std::uint64_t elems = 0;
};

/// One group (stage 3: sub-group) of one rank's optimizer shard.
struct ShardGroup {
  Place fp32;
  std::vector<std::pair<std::string, Place>> states;  ///< sorted by name
  std::vector<Scalar> scalars;                        ///< of ZeRO rank 0 only
  std::vector<Slice> slices;                          ///< param_slice_mappings
  /// Names of states and scalars that are not kept: no other number of ranks can use them.
  std::set<std::string> dropped;
};

/// What is kept of an optimizer shard.
struct Shard {
  std::uint32_t file = 0;
  std::uint64_t stage = 0;
  bool bf16_optimizer = false;
  bool elastic = false;
  std::vector<std::uint64_t> partition_count;          ///< one entry: the same for all groups
  std::vector<std::vector<std::uint64_t>> alignments;  ///< param_alignment_paddings, by group
  std::vector<ShardGroup> groups;
};

/// A weight, buffer or frozen tensor in a model, layer or expert file.
struct Weight {
  std::uint64_t stage = 0;
  std::uint64_t tp = 0;
  Place place;
  layout::CutPtr order;  ///< as PlacedPart::order; a tensor of several parts has several weights
};

/// How one group is spread over the ZeRO ranks of a mp rank.
struct Spread {
  std::uint64_t mp = 0;
  std::size_t group = 0;
  std::uint64_t ranks = 1;  ///< that partition it
  std::uint64_t ep = 1;     ///< expert-parallel ranks, each with a buffer of its own
};

/// What the reader knows of a parameter beyond Checkpoint::params, by the same index.
struct ParamInfo {
  std::uint64_t first_stage = 0;
  std::vector<std::uint64_t> stages;  ///< that hold it
  std::vector<Shape> shards;          ///< by tp; empty vector entries are not known yet
  std::vector<bool> known;            ///< by tp
  std::vector<layout::CutPtr> cuts;   ///< by tp
  std::vector<Weight> weights;
  bool has_scalars = false;
  std::map<std::string, std::uint32_t> tensors;  ///< state -> index into map.tensors
};

/// The work on one checkpoint.
struct Reading : EngineReading {
  using EngineReading::EngineReading;

  Grid grid;
  std::uint64_t ranks = 1;     ///< W: ranks that partition a dense group
  std::uint64_t mp_ranks = 1;  ///< model-parallel ranks
  std::vector<Model> models;   ///< by mp
  /// Stage 3: shares of frozen parameters, by mp, name, rank.
  std::vector<std::map<std::string, std::vector<Place>>> frozen_shares;
  std::vector<std::vector<Shard>> shards;  ///< by mp, rank; empty at stage 0
  std::vector<const Node*> shard_roots;    ///< by mp: the whole dict of ZeRO rank 0's shard
  UniversalInfo info;
  const Node* config = nullptr;        ///< ds_config as a dict, or null
  std::set<std::string> named_states;  ///< of which Bind or LeaveOut have spoken
  bool data_first = false;             ///< use_data_before_expert_parallelism
  bool round_robin = false;            ///< ds_config asks for it and the optimizer heeds it
  bool plain_weights = false;          ///< stage 0: the weights in `module` are the masters
  bool only_weights = false;           ///< treat the source as if it had no optimizer shards
  /// Stage 0: by mp, group, in the optimizer's order.
  std::vector<std::vector<std::vector<std::uint32_t>>> plain_order;
  std::vector<ParamInfo> params;
  std::unordered_map<std::string, std::uint32_t> by_name;
  std::map<std::string, std::uint64_t> local_experts;  ///< by "<module>.deepspeed_moe"

  /// Returns true if the trained parameters of a model-parallel rank are known.
  bool knows_trained(const Model& model) const {
    return !shards.empty() || (only_weights && model.has_shapes);
  }
  std::uint64_t tp_of(std::uint64_t mp) const { return mp % topology.tp; }
  std::uint64_t stage_of(std::uint64_t mp) const { return mp / topology.tp; }
  std::uint64_t mp_of(std::uint64_t stage, std::uint64_t tp) const {
    return stage * topology.tp + tp;
  }
};

// --- deepspeed_read_node.cc: reading values --------------------------------------------------

/// As pickle::AsCount, naming file and key. \error kBadInput
Result<std::uint64_t> CountAt(const Reading& reading, std::uint32_t file, const Node* dict,
                              std::string_view key);
/// The name of a rank's file as DeepSpeed writes it.
std::string ShardFileName(const std::string& prefix, std::uint64_t rank, std::uint64_t mp);
/// A number or word of a scalar, for messages.
std::string Show(const Scalar& scalar);
/// The spread of a group. \pre the ranks' partition counts divide W
Spread SpreadOf(const Reading& reading, std::uint64_t mp, std::size_t group);
/// ZeRO rank of the `edp`-th partition of expert rank `ep`'s buffer.
std::uint64_t RankOf(const Reading& reading, const Spread& spread, std::uint64_t ep,
                     std::uint64_t edp);
/// One rank's part of a group.
const ShardGroup& GroupAt(const Reading& reading, const Spread& spread, std::uint64_t rank);
/// "<shard of rank 0>: group 2", for messages.
std::string GroupText(const Reading& reading, const Spread& spread);
/// "<module>.deepspeed_moe.experts" of an expert parameter's name, or nothing.
std::optional<std::string> ExpertsPathOf(const std::string& name);
// --- deepspeed_read_states.cc: states that are no tensor of their parameter's shape --------------

/// States of one parameter or partition by name. This is where keys of a trainer's optimizer become
/// names of states: those of engine/layout/states.h are what PyTorch calls them, and other states
/// keep the name that their optimizer gives them, so that no key is changed. Master weights have no
/// key of this kind. bitsandbytes puts some of its own into a dict of their own, which it need not
/// find when it loads: they are taken out.
/// \error kBadInput if a name is no text
Result<std::vector<std::pair<std::string, const Node*>>> StatesOf(const Node* dict);

/// What becomes of an optimizer state.
enum class StateHandling : std::uint8_t {
  kCut,      ///< a tensor of the parameter's shape, or a number: anybody can share it out
  kBound,    ///< only the ranks that saved it can use it
  kLeftOut,  ///< the optimizer makes it anew
};

/// As its name and the stage tell; kCut for names that tell nothing.
/// \param groups  the optimizer's param_groups, or null
StateHandling HandlingOf(const Reading& reading, std::string_view state, const Node* groups);
/// Returns the reason why a state cannot be written in another layout: it is neither a tensor nor a
/// number, or has the name of a model state. Empty: no such reason.
std::string WhyUnknown(std::string_view state, const Node* value);
/// " (optimizer: what the state is)", as far as its name tells or ds_config names the optimizer.
std::string KnownAs(const Reading& reading, std::string_view state, const Node* groups);
/// Adds a state to Checkpoint::bound, unless it is there. \param found  what is wrong with it
void Bind(Reading* reading, const std::string& where, const std::string& state,
          const std::string& found, const Node* groups);
/// Warns of a state whose fate is kLeftOut, once.
void LeaveOut(Reading* reading, const std::string& where, const std::string& state,
              const Node* groups);
/// Adds to Checkpoint::bound the options of groups that ranks do not share.
/// \param files  for messages: "a and b"
void CompareOptions(Reading* reading, const Node* a, const Node* b, const std::string& files);

// --- the passes ---------------------------------------------------------------------------------

/// Classifies the files.
Status FindFiles(Reading* reading);
/// Learns W and the number of mp ranks, and names every file that is missing.
Status CheckComplete(Reading* reading);
/// Model states of every mp rank; agreement between them; what is unsupported.
Status ReadModels(Reading* reading);
/// Optimizer shards of every rank; agreement between them.
Status ReadShards(Reading* reading);
/// One shard's numbers.
/// \param keep  where ZeRO rank 0's whole document goes, or null
/// \param first  the shard of rank 0 that this one must agree with, or null; it learns what this
///               one cannot share
Result<Shard> ReadShard(Reading* reading, std::uint32_t file, std::optional<Passed>* keep,
                        Shard* first);
/// ds_config and ds_version, from the model states or the shards where those have none, and what
/// the configuration says of the order of ranks and parameters.
void ReadConfig(Reading* reading);
/// tp, pp, ep, dtype, pipeline stages.
Status ReadTopology(Reading* reading);
/// Names, shapes and buffers of a mp rank whose model states do not list them.
Status NameParams(Reading* reading, std::uint64_t mp);
/// Parameters, buffers and where their weights lie: module, layer and expert files.
Status ReadParams(Reading* reading);
/// Weights of a pipeline module's layer files; pipeline stages.
Status ReadLayers(Reading* reading);
/// Weights of native MoE's expert files; how many experts a rank has.
Status ReadExperts(Reading* reading);
/// Which parameters an optimizer without ZeRO has, and in which order.
Status OrderWithoutZero(Reading* reading);
/// Returns true if the weights in the model states are the master weights, for a source without
/// shards. A plain torch optimizer has no separate masters.
bool WeightsAreMasters(const Reading& reading);
/// Split rules, whole shapes, cuts.
Status DecideRules(Reading* reading);
/// Groups and flat order; fragments of master weights and optimizer states.
Status MapFlatGroups(Reading* reading);
Status MapSubGroups(Reading* reading);
Status MapWithoutZero(Reading* reading);
/// only_weights: puts all trained parameters into one group without options.
void MapNoOptimizer(Reading* reading);
/// Fragments of compute weights, frozen weights and buffers.
Status MapWeights(Reading* reading);

/// Compares the optimizer's steps with the engine's counters, which are in other files. The
/// optimizer takes one step in every iteration that is not skipped.
/// \pre parameters and groups are complete
SaveEvidence EvidenceOf(const Reading& reading);

// --- shared by passes
// -----------------------------------------------------------------------------

/// Adds a parameter, or another stage or rank of it. \error kBadInput if the two disagree
Result<std::uint32_t> AddParam(Reading* reading, const std::string& name, ParamKind kind,
                               std::uint64_t mp, const Shape& shard, DType dtype,
                               std::uint32_t file);
/// Adds a fragment to the tensor (param, state), which is made when it is first asked for.
/// \param order  as PlacedPart::order
Status AddFragment(Reading* reading, std::uint32_t param, std::string_view state, std::uint64_t mp,
                   const layout::Placement& at, const layout::CutPtr& order = nullptr);
/// Adds the parts of a parameter that a model, layer or expert file holds.
void AddWeight(Reading* reading, std::uint32_t param, std::uint64_t mp,
               std::vector<PlacedPart> parts);
/// Keeps a file whose content is passed through.
Passed Keep(Reading* reading, std::uint32_t file, const Document& document);
/// Calls EntryNames for a state dict in a file of a model-parallel rank. \pre Model::frozen_lists
std::unordered_set<std::string> EntriesOf(const Reading& reading, std::uint64_t mp,
                                          const Node* dict, const std::string& prefix);
/// Keeps entries of a state dict that are not tensors.
class OpaqueReader {
 public:
  /// \param file  the file of `document`, which holds the state dict
  OpaqueReader(Reading* reading, std::uint64_t mp, std::uint32_t file, const Document& document)
      : reading_(reading), mp_(mp), file_(file), document_(document) {}
  /// Sets the tensor that precedes the next entries.
  void SetAfter(const std::string& name) { after_ = name; }
  OpaqueEntry& Add(const std::string& name, const Node* value);

 private:
  Reading* reading_;
  std::uint64_t mp_;
  std::uint32_t file_;
  const Document& document_;
  std::string after_;
  std::shared_ptr<const Passed> kept_;  // made for the first entry
};
/// The parameter of a name in param_shapes, expert ids local to `ep`.
Result<std::uint32_t> ParamOf(const Reading& reading, const std::string& local_name,
                              std::uint64_t ep, std::uint32_t file);
/// Sets a parameter's scalars, or checks them against those it has. \error kBadInput
Status SetScalars(Reading* reading, std::uint32_t param, const std::vector<Scalar>& scalars,
                  std::uint32_t file);
/// \error kUnsupported for a name that this program gives another meaning ("weight")
Status CheckStateName(const Reading& reading, std::uint32_t file, const std::string& state);
/// A rank's scalars, and the step that some optimizers keep in the group's options instead.
std::vector<Scalar> WithGroupStep(const Reading& reading, std::uint64_t mp,
                                  std::vector<Scalar> scalars, const Group& options);
/// A group's options without "params", and whether it is a MoE group. \param options  may be null
Group MakeGroup(Reading* reading, const Node* options);

}  // namespace shardwright::checkpoints::reader
