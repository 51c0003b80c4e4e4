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

/// What number it is; nothing if it is none, or more than one.
std::optional<double> NumberOf(const Scalar& scalar);

enum class ParamKind : std::uint8_t { kTrainable, kFrozen, kBuffer };

struct ExpertId {
  std::uint32_t layer = 0;   ///< MoE layer id as in the file names
  std::uint32_t expert = 0;  ///< global
  std::string module = {};   ///< name of the expert's module: the parameter's up to its number
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
  bool entry = false;  ///< kBuffer: an entry of the state dict that is neither a parameter nor a
                       ///< buffer of the module (quantization state, a tensor of _extra_state)
  bool undecided = false;     ///< kBuffer: no file records whether it is a frozen parameter instead
  bool frozen_later = false;  ///< trainable: frozen after the optimizer was made
  std::optional<std::uint32_t> layer;  ///< pipeline module: layer index; tied: its first layer
  std::vector<std::uint32_t>
      tied_layers;  ///< pipeline module: every layer that shares this tied parameter
  std::optional<ExpertId> expert;
  std::vector<Scalar> scalars;  ///< trainable, optimizer stepped
};

/// Hyper-parameters of a parameter group that every optimizer means the same by; what a source
/// does not say is absent.
struct HyperParams {
  std::optional<double> lr;
  std::optional<std::pair<double, double>> betas;
  std::optional<double> eps;
  std::optional<double> weight_decay;
  std::optional<double> momentum;
  std::optional<double> step;  ///< of optimizers that keep it in the group

  bool operator==(const HyperParams&) const = default;
};

/// An optimizer parameter group.
struct Group {
  HyperParams hyper = {};
  const pickle::Node* options = nullptr;  ///< as the source has them, without "params": also what
                                          ///< `hyper` does not know; null: the source has none
  /// Options that are tensors of one element in the source. The state name is the place in
  /// `options`: "lr", "betas.1". If the reader made the nodes of `options`, they hold the values as
  /// numbers.
  std::vector<Scalar> tensors = {};
  std::vector<std::uint32_t>
      params;        ///< into Checkpoint::params, in the order of the flat buffer at zero = 1
                     ///< without round robin, over all stages and experts
  bool moe = false;  ///< partitioned over expert-data-parallel ranks
};

/// State that only one format, or one family of them, understands: client state, random states,
/// scheduler, loss scaler, arguments. A writer that knows the type writes it back unchanged; others
/// make their own anew from the neutral values and tell what was left behind.
struct OwnState {
  virtual ~OwnState() = default;
  /// Members of the map whose bytes belong to it.
  virtual std::vector<std::uint32_t> Members() const = 0;
  /// What it holds, for whom cannot carry it: "random states", "client state \"note\"".
  virtual std::vector<std::string> Contents() const = 0;
  /// Whether it can be carried on when parameters get other names: its writers make anew all that
  /// names them.
  virtual bool OutlivesNames() const { return false; }
  /// Returns the state without the parts that cannot outlive a change of names, and describes these
  /// parts in `lost`. Null: there are no such parts.
  virtual std::shared_ptr<const OwnState> WithoutNames(std::vector<std::string>* /*lost*/) const {
    return nullptr;
  }
};

/// What a source says of its model as a whole, by the keys of Hugging Face's `config.json`:
/// {"num_attention_heads", "32"}. A format with other words for the same has them under these, and
/// what that file has no word for under its own.
using ModelConfig = std::map<std::string, std::string>;

/// Parameters whose place in the flat buffers no file tells: it follows from sizes and from the
/// order of the model, and is proved by their master weights, which rounded are the weights
/// (convert/compare.h).
struct Inferred {
  std::vector<std::uint32_t> params;  ///< into Checkpoint::params, ascending
  std::string why;                    ///< what the files do not tell; empty without params
};

/// Describes a checkpoint of which only the model's tensors were read, without the optimizer.
struct OnlyWeights {
  Error why;             ///< the error of reading the whole checkpoint
  bool masters = false;  ///< the unread files may hold master weights
};

/// Evidence for or against all files being of one save. convert::CheckOneSave evaluates it.
struct SaveEvidence {
  enum class Steps : std::uint8_t {
    kUnknown,  ///< no step of the optimizer, or no count of iterations, is known
    kAgree,
    kDiffer,  ///< two saves, or an optimizer whose state was reset: only the weights can decide
  };
  Steps steps = Steps::kUnknown;
  std::string difference = {};  ///< kDiffer: both numbers and the files that hold them
  /// The trainer rounds the compute weights from the master weights at every step, so in one save
  /// the two are equal but for rounding.
  bool weights_are_rounded = false;
  /// The reason why compute weights may be ahead of the master weights in one save; empty: they are
  /// not.
  std::string weights_lead = {};
};

/// A named set of weights in a checkpoint: a model, its average, a copy.
struct WeightSet {
  std::string name;  ///< as --weights-of takes it
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;
  bool taken = false;  ///< Checkpoint::params are these weights
};

/// What a checkpoint tells of one of its own files.
struct FileDigest {
  std::uint32_t file = 0;  ///< into SourceSet::files
  std::string sha256;      ///< of all its bytes: 64 hexadecimal digits in lower case
};

/// A checkpoint of any layout: its logical tensors and where they lie, and everything else worth
/// keeping.
struct Checkpoint {
  std::string origin;  ///< name of the format that read it
  std::string tag;
  Layout layout;
  layout::ShardMap map;
  bool proved = false;  ///< the map has passed layout::Validate and is as it was then
  std::vector<Param>
      params;  ///< in the order of the module's state dict, stages one after the other
  /// What the optimizer has as one and the model in parts, which are among `params`: fused
  /// projections. Their states are in the map; fused.h takes them apart.
  std::vector<Param> fused;
  /// The model may have frozen parameters that are not among `params`: no file lists them (stages 0
  /// and 1, exclude_frozen_parameters), and there are none but other names of tied ones.
  bool frozen_unknown = false;
  std::vector<Group> groups;
  std::vector<std::string>
      states;         ///< tensor states of the optimizer, sorted: "exp_avg", "exp_avg_sq"
  ModelConfig facts;  ///< as far as the checkpoint itself tells
  std::string adapter_config = {};  ///< text of the adapter_config.json beside the source, or empty
  std::string optimizer;  ///< its kind in lower case, "adamw"; empty where no file says it
  /// Of training, or why it is not known.
  Result<std::uint64_t> iteration = Fail(Errc::kBadInput, "no file tells the iteration");
  std::optional<std::uint64_t> consumed_samples;
  std::shared_ptr<const OwnState> own;  ///< null: the source has nothing of the kind
  /// Why nobody knows in which order the model has `params`, nor which of them are trained; empty:
  /// it is known. Layouts whose buffers have no names cannot be written then.
  std::string order_unknown;
  Inferred inferred;
  SaveEvidence save;
  std::vector<WeightSet>
      weight_sets;  ///< for formats that name them; the set that is read is first
  std::shared_ptr<pickle::Arena> arena;  ///< owns nodes made by the reader
  /// Optimizer state that only the ranks that saved it can use (scales of 8-bit blocks, factored
  /// moments): `map` has nothing of it. One message for each; see CheckUnbound.
  std::vector<std::string> bound;
  /// Set by Format::read_weights: `map` has no tensors of the optimizer, `states` is empty, and
  /// groups have no options.
  std::optional<OnlyWeights> only_weights;
  /// What of the source's files is nowhere in this checkpoint, so that no conversion carries it
  /// over; one sentence each. A copy of the files has it.
  std::vector<std::string> left_out;
  std::vector<FileDigest> digests;  ///< of files that were not read whole yet
  std::vector<std::string> warnings;
};

/// Checks that the whole optimizer state can be written in another layout: `bound` is empty and
/// `only_weights` is not set.
/// \error kUnsupported  rank-specific state; kNotFound, kUnsupported  as only_weights->why
Status CheckUnbound(const Checkpoint& checkpoint);

/// Checks that the kind of every tensor is known (Param::undecided), for targets that store frozen
/// parameters unlike other tensors.
/// \param why  "ZeRO stage 3 shares out frozen parameters alone"
/// \error kUnsupported  names the tensors and shows the pattern file that decides
Status CheckDecided(const Checkpoint& checkpoint, std::string_view why);

/// Describes the optimizer state of the source that a format with only weights cannot hold. Returns
/// one sentence for each reason of CheckUnbound.
std::vector<std::string> OptimizerLeftOut(const Checkpoint& checkpoint);

}  // namespace shardwright::checkpoints
