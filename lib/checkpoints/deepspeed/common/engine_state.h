// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/deepspeed/common/topology.h"
#include "checkpoints/model/checkpoint.h"
#include "files/torch_pt/reader.h"

namespace shardwright::checkpoints {

/// A source file with content that the target receives unchanged:
/// client state, scheduler, loss scaler, random states.
struct Passed {
  torch_pt::Document document;
  std::vector<std::uint32_t> members;  ///< by storage of the document: index into map.members
};

/// An entry of the model's state dict that is not a tensor: the value that get_extra_state() of a
/// module returned, or None. It is read as a graph of inert nodes and written back unchanged.
struct OpaqueEntry {
  struct Value {
    std::shared_ptr<const Passed> from;  ///< the file that contains it
    const pickle::Node* node = nullptr;
  };
  std::string name;                   ///< in the model's state dict
  std::string after;                  ///< the tensor before it in the state dict, or empty
  std::vector<std::uint32_t> layers;  ///< pipeline: layer files that contain it
  std::vector<Value> by_tp;           ///< by tensor-parallel rank; `from` is null where absent
};

/// Engine state other than tensors. Native and universal folders store the same state.
struct EngineState : OwnState {
  std::vector<Passed> model_states;  ///< by mp rank: root is the model-states dict of ZeRO rank 0
  std::vector<Passed> optimizer;  ///< by mp rank: root is the shard's `optimizer_state_dict` dict
                                  ///< of ZeRO rank 0, or the `optimizer` value at stage 0
  std::size_t options_rank = 0;   ///< index into `optimizer`: an mp rank with all groups, the
                                  ///< source of the groups' options
  std::vector<OpaqueEntry> entries;  ///< in the order of the state dict

  std::vector<std::uint32_t> Members() const override;
  std::vector<std::string> Contents() const override;
  bool OutlivesNames() const override { return true; }
  std::shared_ptr<const OwnState> WithoutNames(std::vector<std::string>* lost) const override;
};

/// Compares two tensors of graphs.
using SameTensor = std::function<bool(const pickle::Tensor& a, const pickle::Tensor& b)>;

/// Returns true if two graphs contain the same plain values, and `same` returns
/// true for their tensors. If `same` is null, no two tensors are equal. Pure.
bool SameValues(const pickle::Node* a, const pickle::Node* b, const SameTensor& same = nullptr);

/// Describes opaque entries: "entries of the state dict that are not tensors: x._extra_state
/// (dict)".
std::string DescribeEntries(const std::vector<OpaqueEntry>& entries);

/// Compares the opaque entries of two checkpoints, and tensors in them by checksum. Returns one
/// line for each difference, and none if one of the two has no engine state.
/// Pure.
std::vector<std::string> EntryDifferences(const Checkpoint& a, const Checkpoint& b);

/// Returns the engine's state of a checkpoint, or null if its format has none.
const EngineState* EngineStateOf(const Checkpoint& checkpoint);

/// Returns the command-line arguments that Megatron-DeepSpeed saves in the client state: the
/// attributes of `args`, a dict with "tensor_model_parallel_size". Null for other trainers.
/// \param model_states  a model-states dict
/// Pure. Source: megatron/checkpointing.py of Megatron-DeepSpeed.
const pickle::Node* MegatronArgs(const pickle::Node* model_states);

/// Returns the keys of client state in which two model files of a checkpoint differ, such
/// as "\"rng\"". Tensors always count as different, because their elements are not compared.
/// \param a, b  model-states dicts, which may be the same one
/// Pure.
std::vector<std::string> OwnClientState(const pickle::Node* a, const pickle::Node* b);

/// Describes the client state and opaque entries that are lost if a target has
/// a different number of tensor-parallel or pipeline ranks, because the target
/// takes another rank's state (PassedRank). Returns one sentence for each.
/// Pure.
std::vector<std::string> LostClientState(const EngineState& state, const Topology& from,
                                         const Topology& to);

/// Returns the source's model-parallel rank that supplies the engine state of target rank `mp`.
std::uint64_t PassedRank(const Topology& from, const Topology& to, std::uint64_t mp,
                         std::size_t ranks);

/// Completes a checkpoint read from DeepSpeed's files: sets its layout, the engine's state, and
/// the format-independent values of that state (iteration, samples, optimizer, hyper-parameters).
void TakeEngineState(const Topology& topology, EngineState state, Checkpoint* checkpoint);

/// Key in stage-3 model files that Shardwright writes: a dict of whole
/// frozen parameters by name. It contains the other names of tied
/// parameters, which DeepSpeed's files can store at stages 0 to 2 only.
inline constexpr std::string_view kWholeFrozen = "shardwright_frozen";

/// Key in model files of Shardwright's universal folders: a list of opaque entries (entries.h).
inline constexpr std::string_view kOpaqueEntries = "shardwright_entries";

/// Key in native model files that Shardwright writes: a dict from names of untrained
/// tensors to kinds that DeepSpeed's lists do not record: "frozen", "entry" or "undecided"
/// (Param::undecided). It takes precedence over any of DeepSpeed's lists that contain the name.
inline constexpr std::string_view kKinds = "shardwright_kinds";

/// Keys of a model file that depend on the layout or that the writer creates.
inline constexpr std::array<std::string_view, 16> kModelKeys = {
    "module",
    "model",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_version",
    "universal_checkpoint_info",
    kWholeFrozen,
    kOpaqueEntries,
    kKinds,
};

/// Returns true if a dict's key is one of these texts.
bool IsOneOf(const pickle::Node* key, std::span<const std::string_view> keys);

}  // namespace shardwright::checkpoints
