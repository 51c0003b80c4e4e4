// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/model/layout.h"
#include "engine/layout/rule.h"
#include "engine/layout/shard_map.h"
#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// A single-number value of the optimizer state, unlike states
/// that have the parameter's shape. The usual one is the step.
struct Scalar {
  std::string state;          ///< "step"
  bool is_tensor = false;     ///< a 0-d (or one-element) tensor; false: the plain Python `value`
  DType dtype = DType::kF32;  ///< only if is_tensor
  Shape shape;                ///< only if is_tensor
  std::string bytes;          ///< only if is_tensor: the element
  const pickle::Node* value = nullptr;
};

bool operator==(const Scalar& a, const Scalar& b);

/// Returns the value as a number; nothing if it is not a number or has several elements.
std::optional<double> NumberOf(const Scalar& scalar);

enum class ParamKind : std::uint8_t { kTrainable, kFrozen, kBuffer };

struct ExpertId {
  std::uint32_t layer = 0;   ///< MoE layer id as in the file names
  std::uint32_t expert = 0;  ///< global id of the expert
  std::string module = {};   ///< module name of the expert: the parameter's name up to its number
};

/// One named tensor of the model, independent of the layout.
struct Param {
  std::string name;  ///< contains the global expert id
  ParamKind kind = ParamKind::kTrainable;
  Shape shape;                ///< the full shape (all tensor-parallel ranks, without padding)
  DType dtype = DType::kF32;  ///< of the compute weight, or of the buffer
  layout::SplitRule rule;
  std::string
      alias_of;  ///< tied: the name that stores the data; this parameter has no tensors of its own
  std::string left_out_holder;  ///< frozen and tied: the name that stored the data, if the files
                                ///< omit it (exclude_frozen_parameters) but contain this one
  std::int32_t group = -1;      ///< trainable: index into Checkpoint::groups
  bool entry = false;           ///< kBuffer: a state dict entry that is neither a parameter nor a
                       ///< buffer of the module (quantization state, a tensor of _extra_state)
  bool undecided = false;     ///< kBuffer: may be a frozen parameter instead; no file records which
  bool frozen_later = false;  ///< trainable: frozen after the optimizer was created
  std::optional<std::uint32_t> layer;  ///< layer index in a pipeline module; tied: the first layer
  std::vector<std::uint32_t>
      tied_layers;  ///< pipeline module: all layers that share this tied parameter
  std::optional<ExpertId> expert;
  std::vector<Scalar> scalars;  ///< trainable, after at least one optimizer step
};

/// Hyper-parameters of a parameter group that have the same meaning in
/// every optimizer. A value that the source does not record is absent.
struct HyperParams {
  std::optional<double> lr;
  std::optional<std::pair<double, double>> betas;
  std::optional<double> eps;
  std::optional<double> weight_decay;
  std::optional<double> momentum;
  std::optional<double> step;  ///< for optimizers that store the step in the group

  bool operator==(const HyperParams&) const = default;
};

/// An optimizer parameter group.
struct Group {
  HyperParams hyper = {};
  const pickle::Node* options = nullptr;  ///< the source's options without "params", including
                                          ///< those that `hyper` does not cover; null: no options
  /// Options that are one-element tensors in the source. Scalar::state is
  /// the position in `options`: "lr", "betas.1". If the reader created
  /// the nodes of `options`, these contain the values as numbers.
  std::vector<Scalar> tensors = {};
  std::vector<std::uint32_t>
      params;        ///< indexes into Checkpoint::params, in the order of the flat buffer
                     ///< at zero = 1 without round robin, over all stages and experts
  bool moe = false;  ///< partitioned over expert-data-parallel ranks
};

/// State that only one format or one family of formats understands: client state, random states,
/// scheduler, loss scaler, arguments. A writer that knows the type writes it back unchanged. Other
/// writers create their own state from the neutral values and report the state that they dropped.
struct OwnState {
  virtual ~OwnState() = default;
  /// Returns the members of the map that store bytes of this state.
  virtual std::vector<std::uint32_t> Members() const = 0;
  /// Lists the contents for writers that drop them: "random states", "client state \"note\"".
  virtual std::vector<std::string> Contents() const = 0;
  /// Returns true if this state stays valid after parameters are renamed,
  /// because its writers recreate everything that contains parameter names.
  virtual bool OutlivesNames() const { return false; }
  /// Returns the state without the parts that cannot outlive a change of names, and describes these
  /// parts in `lost`. Null: there are no such parts.
  virtual std::shared_ptr<const OwnState> WithoutNames(std::vector<std::string>* /*lost*/) const {
    return nullptr;
  }
};

/// Properties of the whole model under the keys of Hugging Face's `config.json`,
/// such as {"num_attention_heads", "32"}. Readers translate a format's own keys
/// to these keys and keep keys without a counterpart unchanged.
using ModelConfig = std::map<std::string, std::string>;

/// Parameters without a recorded position in the flat buffers. Readers derive
/// the position from sizes and the order of the model. convert/compare.h then
/// verifies it: the master weights, rounded, must equal the weights.
struct Inferred {
  std::vector<std::uint32_t> params;  ///< indexes into Checkpoint::params, ascending
  std::string why;                    ///< information missing from the files; empty without params
};

/// Describes a checkpoint from which only the model's tensors were read, without the optimizer.
struct OnlyWeights {
  Error why;             ///< the error of reading the whole checkpoint
  bool masters = false;  ///< the unread files may hold master weights
};

/// Evidence that all files belong to one save, or do not. Evaluated by convert::CheckOneSave.
struct SaveEvidence {
  enum class Steps : std::uint8_t {
    kUnknown,  ///< the optimizer's step or the iteration count is not known
    kAgree,
    kDiffer,  ///< two saves, or a reset optimizer state: only the weights can decide
  };
  Steps steps = Steps::kUnknown;
  std::string difference = {};  ///< kDiffer: both numbers and the files that contain them
  /// The trainer rounds the compute weights from the master weights at
  /// every step, so within one save the two are equal except for rounding.
  bool weights_are_rounded = false;
  /// The reason why compute weights may be newer than the
  /// master weights within one save; empty if they cannot be.
  std::string weights_lead = {};
};

/// A named set of weights in a checkpoint: the model, an average of it, or a copy.
struct WeightSet {
  std::string name;  ///< as --weights-of accepts it
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;
  bool taken = false;  ///< Checkpoint::params are these weights
};

/// A checksum that a checkpoint records for one of its own files.
struct FileDigest {
  std::uint32_t file = 0;  ///< index into SourceSet::files
  std::string sha256;      ///< of the complete file: 64 lower-case hexadecimal digits
};

/// A checkpoint of any format and layout: its logical tensors, the location
/// of their bytes, and everything else that a conversion may preserve.
struct Checkpoint {
  std::string origin;  ///< name of the format of the source
  std::string tag;
  Layout layout;
  layout::ShardMap map;
  bool proved = false;  ///< the map passed layout::Validate and has not changed since
  std::vector<Param>
      params;  ///< all parameters in the order of the module's state dict, stage by stage
  /// Fused projections: the optimizer stores one state for several parameters of
  /// `params`. The map contains their states. torchtitan_fused_qkv.h splits them.
  std::vector<Param> fused;
  /// The model may have frozen parameters that `params` lacks, because no file lists them (stages 0
  /// and 1, exclude_frozen_parameters). Those that `params` has are other names of tied parameters.
  bool frozen_unknown = false;
  std::vector<Group> groups;
  std::vector<std::string>
      states;         ///< names of the optimizer's tensor states, sorted: "exp_avg", "exp_avg_sq"
  ModelConfig facts;  ///< as far as the checkpoint itself records it
  std::string adapter_config = {};  ///< text of adapter_config.json next to the source, or empty
  std::string optimizer;  ///< its kind in lower case ("adamw"); empty if no file records it
  /// The training iteration, or the error that explains why it is unknown.
  Result<std::uint64_t> iteration = Fail(Errc::kBadInput, "no file records the iteration");
  std::optional<std::uint64_t> consumed_samples;
  std::shared_ptr<const OwnState> own;  ///< null: the source has no such state
  /// Why the files record neither the order of `params` in the model nor which are
  /// trained; empty if they do. If set, layouts with unnamed buffers cannot be written.
  std::string order_unknown;
  /// Why weights have other values than under the names of other programs; empty if they do not.
  /// Maps between programs are then refused.
  std::string own_values;
  /// Names of adapter parameters in the running model, by their names here, if they differ: PEFT
  /// leaves the adapter's name out of weights that it saves ("lora_A.default.weight").
  std::map<std::string, std::string> running_names;
  Inferred inferred;
  SaveEvidence save;
  std::vector<WeightSet>
      weight_sets;  ///< for formats that name sets; the set that was read comes first
  std::shared_ptr<pickle::Arena> arena;  ///< owns the nodes that the reader created
  /// Rank-specific optimizer state (scales of 8-bit blocks, factored moments), usable only by
  /// the ranks that saved it and not contained in `map`. One message for each; see CheckUnbound.
  std::vector<std::string> bound;
  /// Set by Format::read_weights: `map` has no tensors of the optimizer, `states` is empty, and
  /// groups have no options.
  std::optional<OnlyWeights> only_weights;
  /// Parts of the source's files that this checkpoint does not contain, so
  /// conversions drop them. One sentence each. Copying the files preserves them.
  std::vector<std::string> left_out;
  std::vector<FileDigest> digests;  ///< checksums of files that have not been read completely yet
  std::vector<std::string> warnings;
  /// Warnings about the optimizer, which do not matter where only weights are needed.
  std::vector<std::string> optimizer_warnings;
};

/// Checks that the whole optimizer state can be written in another layout: `bound` is empty and
/// `only_weights` is not set.
/// \error kUnsupported  rank-specific state; kNotFound, kUnsupported  as only_weights->why
Status CheckUnbound(const Checkpoint& checkpoint);

/// Checks that the kind of every tensor is known (Param::undecided), for targets that store frozen
/// parameters unlike other tensors.
/// \param why  for the message, such as "ZeRO stage 3 partitions frozen parameters separately"
/// \error kUnsupported  names the tensors and prints the pattern file to add for them
Status CheckDecided(const Checkpoint& checkpoint, std::string_view why);

/// Describes the optimizer state of the source that a weights-only format
/// cannot store. Returns one sentence for each reason of CheckUnbound.
std::vector<std::string> OptimizerLeftOut(const Checkpoint& checkpoint);

}  // namespace shardwright::checkpoints
