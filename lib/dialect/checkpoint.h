#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "dialect/source.h"
#include "format/pickle/node.h"
#include "format/torch_pt/reader.h"
#include "layout/rule.h"
#include "layout/shard_map.h"

namespace shardwright::dialect {

/// How training was, or will be, spread over ranks.
struct Topology {
  std::uint64_t zero = 0;  ///< ZeRO stage
  std::uint64_t dp = 1;    ///< ranks over which ZeRO partitions (data times sequence parallel)
  std::uint64_t tp = 1;
  std::uint64_t pp = 1;
  std::uint64_t ep = 1;
  DType dtype = DType::kF32;  ///< of the compute weights
  bool bf16_optimizer =
      false;  ///< BF16_Optimizer shards: partitions saved with padding, no zero_stage
  std::uint64_t sub_group = 1'000'000'000;  ///< ZeRO-3 sub_group_size, elements per rank
  bool round_robin = false;
  bool pipeline = false;  ///< a pipeline module (layer files), also with pp = 1
  std::vector<std::vector<std::uint32_t>>
      stages;  ///< layer indices by pipeline stage (layers with state)

  std::uint64_t mp() const { return tp * pp; }
};

/// A value of the optimizer state that is one number, not a tensor of the parameter's shape: the
/// step.
struct Scalar {
  std::string state;       ///< "step"
  bool is_tensor = false;  ///< a 0-d (or one-element) tensor; else the plain Python value `value`
  DType dtype = DType::kF32;  ///< is_tensor
  Shape shape;                ///< is_tensor
  std::string bytes;          ///< is_tensor: the element
  const pickle::Node* value = nullptr;
};

bool operator==(const Scalar& a, const Scalar& b);

enum class ParamKind : std::uint8_t { kTrainable, kFrozen, kBuffer };

struct ExpertId {
  std::uint32_t layer = 0;   ///< MoE layer id as in the file names
  std::uint32_t expert = 0;  ///< global
};

/// One named tensor of the model, layout-free.
struct Param {
  std::string name;  ///< with the global expert id
  ParamKind kind = ParamKind::kTrainable;
  Shape shape;                ///< whole (all tensor-parallel ranks, no padding)
  DType dtype = DType::kF32;  ///< of the compute weight, or of the buffer
  layout::SplitRule rule;
  std::string
      alias_of;  ///< tied: the name that holds the data; such a param has no tensors of its own
  std::string left_out_holder;  ///< frozen and tied: the name that held the data, where it was left
                                ///< out of the files (exclude_frozen_parameters) and this was not
  std::int32_t group = -1;      ///< trainable: index into Checkpoint::groups
  std::optional<std::uint32_t> layer;  ///< pipeline module: layer index; tied: its first layer
  std::vector<std::uint32_t>
      tied_layers;  ///< pipeline module: every layer that shares this tied parameter
  std::optional<ExpertId> expert;
  std::vector<Scalar> scalars;  ///< trainable, optimizer stepped
};

/// An optimizer parameter group.
struct Group {
  const pickle::Node* options = nullptr;  ///< its dict without "params"
  std::vector<std::uint32_t>
      params;        ///< into Checkpoint::params, in the order of the flat buffer at zero = 1
                     ///< without round robin, over all stages and experts
  bool moe = false;  ///< partitioned over expert-data-parallel ranks
};

/// A source file kept for what is passed through: client state, scheduler, loss scaler, random
/// states.
struct Passed {
  torch_pt::Document document;
  std::vector<std::uint32_t> members;  ///< by storage of the document: index into map.members
};

/// Parameters whose place in the flat buffers no file tells: it follows from sizes and from the
/// order of the model, and is proved by their master weights, which rounded are the weights
/// (ucp/prove.h).
struct Inferred {
  std::vector<std::uint32_t> params;  ///< into Checkpoint::params, ascending
  std::string why;                    ///< what the files do not tell; empty without params
};

/// A checkpoint of any layout: its logical tensors and where they lie, and everything else worth
/// keeping.
struct Checkpoint {
  std::string origin;  ///< "deepspeed" or "universal"
  std::string tag;
  Topology topology;
  layout::ShardMap map;
  bool proved = false;  ///< the map has passed layout::Validate and is as it was then
  std::vector<Param>
      params;  ///< in the order of the module's state dict, stages one after the other
  /// The model may have frozen parameters that are not among `params`: no file lists them (stages 0
  /// and 1, exclude_frozen_parameters), and there are none but other names of tied ones.
  bool frozen_unknown = false;
  std::vector<Group> groups;
  std::vector<std::string>
      states;  ///< tensor states of the optimizer, sorted: "exp_avg", "exp_avg_sq"
  std::vector<Passed> model_states;  ///< by mp rank: root is the model-states dict of ZeRO rank 0
  std::vector<Passed> optimizer;  ///< by mp rank: root is the shard's `optimizer_state_dict` dict
                                  ///< of ZeRO rank 0, or the `optimizer` value at stage 0
  Inferred inferred;
  std::shared_ptr<pickle::Arena> arena;  ///< owns nodes made by the reader
  /// Optimizer state that only the ranks that saved it can use (scales of 8-bit blocks, factored
  /// moments): `map` has nothing of it. One message for each; see CheckUnbound.
  std::vector<std::string> bound;
  std::vector<std::string> warnings;
};

/// A checkpoint whose optimizer state can be cut again whole: `bound` is empty. \error kUnsupported
Status CheckUnbound(const Checkpoint& checkpoint);

}  // namespace shardwright::dialect
