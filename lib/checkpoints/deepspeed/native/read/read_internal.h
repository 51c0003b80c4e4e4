// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/deepspeed/native/read: reads DeepSpeed's native files. ReadDeepSpeed
// runs a list of passes over one Reading, in the order of their declarations below.
// The passes find the files, read model and optimizer documents, find topology,
// parameters, flat buffers and states, and map each of them. The reader keeps
// the whole documents of ZeRO rank 0 and only a few numbers of every other file.

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

/// Files by role. Values index SourceSet::files.
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

/// The model states of one mp rank, from the file of ZeRO rank 0.
struct Model {
  std::uint32_t file = 0;
  Document document;
  const Node* module = nullptr;                 ///< dict, or null in a pipeline
  bool has_shapes = false;                      ///< param_shapes exists
  std::vector<std::vector<NamedShape>> shapes;  ///< by group, or by sub-group at stage 3
  /// Without param_shapes: by group, the reason why the reader
  /// had to infer its order. Empty where a file records the order.
  std::vector<std::string> inferred;
  bool has_buffer_names = false;
  FrozenLists frozen_lists;        ///< set by ReadParams
  bool lists_frozen = false;       ///< frozen_param_shapes is a dict, not None
  std::vector<NamedShape> frozen;  ///< frozen_param_shapes
  std::unordered_set<std::string> buffers;
  Ties ties;
  std::unordered_set<std::string> trainable;  ///< names of `shapes`, expert ids local
};

/// The position of one parameter in a rank's partition, as recorded by the rank.
struct Slice {
  std::string name;
  std::uint64_t start = 0;
  std::uint64_t elems = 0;
};

/// One group (stage 3: sub-group) of one rank's optimizer shard.
struct ShardGroup {
  Place fp32;
  std::vector<std::pair<std::string, Place>> states;  ///< sorted by name
  std::vector<Scalar> scalars;                        ///< filled for ZeRO rank 0 only
  std::vector<Slice> slices;                          ///< param_slice_mappings
  /// Names of states and scalars that the reader omits: no other number of ranks can use them.
  std::set<std::string> dropped;
};

/// The values that the reader keeps of an optimizer shard.
struct Shard {
  std::uint32_t file = 0;
  std::uint64_t stage = 0;
  bool bf16_optimizer = false;
  bool elastic = false;
  std::vector<std::uint64_t> partition_count;          ///< a single entry applies to all groups
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

/// Distribution of one group over the ZeRO ranks of a mp rank.
struct Spread {
  std::uint64_t mp = 0;
  std::size_t group = 0;    ///< number in the files of the mp rank
  std::uint64_t ranks = 1;  ///< number of ranks that partition it
  std::uint64_t ep = 1;     ///< expert-parallel ranks, each with its own buffer
};

/// Information about a parameter in addition to Checkpoint::params, by the same index.
struct ParamInfo {
  std::uint64_t first_stage = 0;
  std::vector<std::uint64_t> stages;  ///< pipeline stages that have it
  std::vector<Shape> shards;          ///< by tp; empty entries are not known yet
  std::vector<bool> known;            ///< by tp
  std::vector<layout::CutPtr> cuts;   ///< by tp
  std::vector<Weight> weights;
  bool has_scalars = false;
  bool unused_copies = false;  ///< only the first stage trains it and computes with it
  std::map<std::string, std::uint32_t> tensors;  ///< state -> index into map.tensors
};

/// State of reading one checkpoint.
struct Reading : EngineReading {
  using EngineReading::EngineReading;

  Grid grid;
  std::uint64_t ranks = 1;     ///< W: ranks that partition a dense group
  std::uint64_t mp_ranks = 1;  ///< model-parallel ranks
  std::vector<Model> models;   ///< by mp
  /// Stage 3: pieces of frozen parameters, by mp, name, rank.
  std::vector<std::map<std::string, std::vector<Place>>> frozen_shares;
  std::vector<std::vector<Shard>> shards;  ///< by mp, rank; empty at stage 0
  /// By mp and group of the checkpoint: the group's number in the files of that rank. Absent if
  /// none of the group's parameters is on the rank. Not used at stage 3.
  std::vector<std::vector<std::optional<std::size_t>>> own_groups;
  std::vector<const Node*> shard_roots;  ///< by mp: the whole dict of ZeRO rank 0's shard
  UniversalInfo info;
  const Node* config = nullptr;        ///< ds_config as a dict, or null
  std::set<std::string> named_states;  ///< states that Bind or LeaveOut have already reported
  bool data_first = false;             ///< use_data_before_expert_parallelism
  bool round_robin = false;            ///< ds_config enables it and the optimizer supports it
  bool plain_weights = false;          ///< stage 0: the weights in `module` are the master weights
  bool only_weights = false;           ///< treat the source as if it had no optimizer shards
  /// Stage 0: parameters by mp and group, in the optimizer's order.
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

// --- pickle_access.cc: reading values --------------------------------------------------------

/// Reads a count like pickle::AsCount. Errors name file and key. \error kBadInput
Result<std::uint64_t> CountAt(const Reading& reading, std::uint32_t file, const Node* dict,
                              std::string_view key);
/// Returns the name of a rank's optimizer shard as DeepSpeed writes it.
std::string ShardFileName(const std::string& prefix, std::uint64_t rank, std::uint64_t mp);
/// Formats the number or word of a scalar for messages.
std::string Show(const Scalar& scalar);
/// Returns the spread of a group. \pre the ranks' partition counts divide W
Spread SpreadOf(const Reading& reading, std::uint64_t mp, std::size_t group);
/// Returns the ZeRO rank of the `edp`-th partition of expert rank `ep`'s buffer.
std::uint64_t RankOf(const Reading& reading, const Spread& spread, std::uint64_t ep,
                     std::uint64_t edp);
/// Returns one rank's part of a group.
const ShardGroup& GroupAt(const Reading& reading, const Spread& spread, std::uint64_t rank);
/// Formats "<shard of rank 0>: group 2" for messages.
std::string GroupText(const Reading& reading, const Spread& spread);
/// Returns "<module>.deepspeed_moe.experts" of an expert parameter's name, or nothing.
std::optional<std::string> ExpertsPathOf(const std::string& name);
// --- states.cc: states other than tensors of their parameter's shape -----------------------------

/// Returns the states of one parameter or partition by name. Maps keys of a trainer's
/// optimizer to state names: engine/layout/states.h uses PyTorch's names, and other
/// states keep the name that their optimizer gives them, so no key changes. Master
/// weights have no such key. bitsandbytes puts some of its states into a nested
/// dict, which it can but need not find when it loads; this function flattens it.
/// \error kBadInput if a name is not a text
Result<std::vector<std::pair<std::string, const Node*>>> StatesOf(const Node* dict);

/// Ways in which the reader handles an optimizer state.
enum class StateHandling : std::uint8_t {
  kCut,      ///< a tensor of the parameter's shape, or a number: works in any layout
  kBound,    ///< rank-specific: only the ranks that saved it can use it
  kLeftOut,  ///< omitted: the optimizer creates it again
};

/// Chooses the handling by the state's name and the ZeRO stage. Returns kCut for unknown names.
/// \param groups  the optimizer's param_groups, or null
StateHandling HandlingOf(const Reading& reading, std::string_view state, const Node* groups);
/// Returns the reason why a state cannot be written in another layout: it is neither a tensor nor
/// a number, or it has the name of a model state. Returns an empty text if there is no such reason.
std::string WhyUnknown(std::string_view state, const Node* value);
/// Returns " (optimizer: description)" if the state's name or the optimizer in ds_config is known.
std::string KnownAs(const Reading& reading, std::string_view state, const Node* groups);
/// Adds a state to Checkpoint::bound unless it is already there. \param found  the problem with it
void Bind(Reading* reading, const std::string& where, const std::string& state,
          const std::string& found, const Node* groups);
/// Warns once about a state with the handling kLeftOut.
void LeaveOut(Reading* reading, const std::string& where, const std::string& state,
              const Node* groups);
/// Returns true if two groups have the same options. Ignores the lists of their parameters.
bool SameOptions(const Node* a, const Node* b);
/// Adds to Checkpoint::bound the group options in which ranks differ.
/// \param files  for messages: "a and b"
void CompareOptions(Reading* reading, const Node* a, const Node* b, const std::string& files);

// --- groups.cc: optimizer groups that some stages do not have -----------------------------------

/// The optimizer groups of one mp rank.
struct GroupList {
  std::uint32_t file = 0;
  std::size_t count = 0;
  const Node* groups = nullptr;  ///< param_groups: list of options, or null
};

/// Sets Reading::own_groups and EngineState::options_rank. The stage with the most groups must have
/// all of them. Finds the groups of a stage with fewer groups by their options and order.
/// \param lists  by mp, at least one
/// \error kUnsupported  a group fits none or several groups; kBadInput  no options to compare
Status MatchGroups(Reading* reading, const std::vector<GroupList>& lists);

// --- the passes ---------------------------------------------------------------------------------

/// Sorts the files by role into Grid.
Status FindFiles(Reading* reading);
/// Finds W and the number of mp ranks. The error lists every missing file.
Status CheckComplete(Reading* reading);
/// Reads the model states of every mp rank. Fails if they disagree or use unsupported features.
Status ReadModels(Reading* reading);
/// Reads the optimizer shards of every rank and fails if they disagree.
Status ReadShards(Reading* reading);
/// Reads the numbers of one shard.
/// \param keep  receives ZeRO rank 0's whole document, or null
/// \param first  the shard of rank 0, with which this one must agree, or null.
///        Records in it the states that cannot be resharded because of this rank.
Result<Shard> ReadShard(Reading* reading, std::uint32_t file, std::optional<Passed>* keep,
                        Shard* first);
/// Reads ds_config and ds_version, from the model states or else from the
/// shards, and takes the order of ranks and parameters from the configuration.
void ReadConfig(Reading* reading);
/// Finds tp, pp, ep, dtype and the pipeline stages.
Status ReadTopology(Reading* reading);
/// Infers names, shapes and buffers of a mp rank if its model states do not list them.
Status NameParams(Reading* reading, std::uint64_t mp);
/// Finds parameters, buffers and the places of their weights in module, layer and expert files.
Status ReadParams(Reading* reading);
/// Reads weights of a pipeline module's layer files, and the pipeline stages.
Status ReadLayers(Reading* reading);
/// Reads weights of native MoE's expert files, and the number of experts per rank.
Status ReadExperts(Reading* reading);
/// Finds the parameters of an optimizer without ZeRO, and their order.
Status OrderWithoutZero(Reading* reading);
/// Returns true if the weights in the model states are the master weights, for a source without
/// shards. A plain torch optimizer has no separate masters.
bool WeightsAreMasters(const Reading& reading);
/// Finds split rules, whole shapes and cuts.
Status DecideRules(Reading* reading);
/// Maps groups in flat order: fragments of master weights and optimizer states.
Status MapFlatGroups(Reading* reading);
Status MapSubGroups(Reading* reading);
Status MapWithoutZero(Reading* reading);
/// only_weights: puts all trained parameters into one group without options.
void MapNoOptimizer(Reading* reading);
/// Maps fragments of compute weights, frozen weights and buffers.
Status MapWeights(Reading* reading);

/// Compares the optimizer's steps with the engine's counters, which are in other files. The
/// optimizer takes one step in every iteration that is not skipped.
/// \pre parameters and groups are complete
SaveEvidence EvidenceOf(const Reading& reading);

// --- functions that several passes use
// -----------------------------------------------------------------------------

/// Adds a parameter, or another stage or rank of it. \error kBadInput if the two disagree
Result<std::uint32_t> AddParam(Reading* reading, const std::string& name, ParamKind kind,
                               std::uint64_t mp, const Shape& shard, DType dtype,
                               std::uint32_t file);
/// Adds a fragment to the tensor (param, state). Creates the tensor on the first call.
/// \param order  as PlacedPart::order
Status AddFragment(Reading* reading, std::uint32_t param, std::string_view state, std::uint64_t mp,
                   const layout::Placement& at, const layout::CutPtr& order = nullptr);
/// Adds the parts of a parameter that a model, layer or expert file contains.
void AddWeight(Reading* reading, std::uint32_t param, std::uint64_t mp,
               std::vector<PlacedPart> parts);
/// Keeps a file, so that the target can receive its content unchanged.
Passed Keep(Reading* reading, std::uint32_t file, const Document& document);
/// Calls EntryNames for a state dict in a file of a model-parallel rank. \pre Model::frozen_lists
std::unordered_set<std::string> EntriesOf(const Reading& reading, std::uint64_t mp,
                                          const Node* dict, const std::string& prefix);
/// Collects entries of a state dict that are not tensors.
class OpaqueReader {
 public:
  /// \param file  the file of `document`, which contains the state dict
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
  std::shared_ptr<const Passed> kept_;  // created for the first entry
};
/// Returns the parameter of a name in param_shapes, in which expert ids are local to `ep`.
Result<std::uint32_t> ParamOf(const Reading& reading, const std::string& local_name,
                              std::uint64_t ep, std::uint32_t file);
/// Sets a parameter's scalars, or compares them with existing ones. \error kBadInput
Status SetScalars(Reading* reading, std::uint32_t param, const std::vector<Scalar>& scalars,
                  std::uint32_t file);
/// \error kUnsupported for a name that Shardwright uses with another meaning ("weight")
Status CheckStateName(const Reading& reading, std::uint32_t file, const std::string& state);
/// Returns a rank's scalars, plus the step that some optimizers keep in the group's options.
std::vector<Scalar> WithGroupStep(const Reading& reading, std::uint64_t mp,
                                  std::vector<Scalar> scalars, const Group& options);
/// Makes a group from its options except "params", and sets `moe`. \param options  may be null
Group MakeGroup(Reading* reading, const Node* options);

}  // namespace shardwright::checkpoints::reader
