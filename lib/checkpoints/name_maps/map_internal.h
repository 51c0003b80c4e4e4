// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <re2/re2.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/name_maps/maps.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::maps {

/// Values of the captures in a name: {"layer", "3"}.
using Captures = std::map<std::string, std::string>;

/// A name pattern with captures of numbers and texts: "model.layers.{layer}.mlp.{*rest}".
class NameForm {
 public:
  /// \error kBadInput  unclosed braces, or a capture without a name or with a repeated name
  static Result<NameForm> Parse(std::string_view text);

  std::optional<Captures> Match(const std::string& name) const;
  /// \pre every capture has a value
  std::string Fill(const Captures& captures) const;
  const std::string& text() const { return text_; }
  const std::vector<std::string>& captures() const { return captures_; }
  bool Has(std::string_view capture) const;
  /// Returns true for the form "{*rest}", which matches every name.
  bool takes_all() const {
    return parts_.size() == 1 && parts_[0].any && parts_[0].literal.empty();
  }
  /// Returns true if the form has this capture and it captures a number.
  bool Counts(std::string_view capture) const;
  /// Returns the form up to and including a capture. \pre Has(capture)
  std::string UpTo(std::string_view capture) const;
  /// Returns the name up to and including a capture. \pre as Fill
  std::string FillUpTo(const Captures& captures, std::string_view capture) const;

 private:
  struct Part {
    std::string literal;  // the text before the capture
    std::string capture;  // empty in the last part
    bool any = false;     // captures a text, not a number
  };
  std::string text_;
  std::vector<Part> parts_;
  std::vector<std::string> captures_;
  std::shared_ptr<const re2::RE2> expression_;
};

/// A factor of a dimension: a complete axis of the rule, or a part of one.
struct Factor {
  std::uint32_t axis = 0;
  std::optional<std::uint32_t> segment;  ///< "part.q": one segment of a stack
  bool captured = false;                 ///< "{expert}": one index of the axis, taken from the name
  bool padded = false;                   ///< "vocab+": files may have padding after the axis
};

/// One tensor of a rule in one naming scheme.
struct TensorForm {
  NameForm name;
  std::vector<std::vector<Factor>> dims;
  std::string text;  ///< of `dims`, for messages
};

/// A rule's tensors in one naming scheme. A rename has one tensor without dims, as shapes stay.
struct SideForm {
  bool rename = false;
  std::vector<TensorForm> tensors;
};

/// A size: a number or an index into Rule::symbols.
struct SizeOf {
  std::uint64_t number = 0;
  std::optional<std::uint32_t> symbol;
};

struct Segment {
  std::string name;
  SizeOf size;
};

struct Axis {
  std::string name;
  std::vector<Segment> segments;  ///< of a stack; empty: the axis has the one `size`
  SizeOf size;
};

struct MapRule {
  std::string origin;  ///< the rule's name in messages: "patterns/maps/llama.json rule 3"
  std::vector<Axis> axes;
  std::vector<std::string> symbols;  ///< names of the sizes in the rule
  std::vector<std::optional<SideForm>> sides;
};

/// States that one size is the product of others: "heads = kv_heads query".
struct Relation {
  std::string product;
  std::vector<std::string> factors;
};

/// Config values that identify models of the map: {"model_type", {"llama", "mistral"}}.
using Told = std::map<std::string, std::vector<std::string>>;

struct MapSide {
  std::string name;
  std::vector<NameForm> order;    ///< of parameters in the model; empty: unknown
  std::vector<NameForm> derived;  ///< tensors that models in this scheme compute themselves
};

}  // namespace shardwright::checkpoints::maps

namespace shardwright::checkpoints {

struct ModelMap::Impl {
  std::string origin;
  std::string name;
  std::vector<maps::Told> told_by;                        ///< alternatives: one match suffices
  std::map<std::string, std::vector<std::string>> sizes;  ///< keys of config.json by size
  std::map<std::string, std::uint64_t> constants;
  std::vector<maps::Relation> relations;
  std::vector<maps::MapSide> sides;
  std::vector<maps::MapRule> rules;
};

struct BuiltInMapFile {
  std::string_view origin;
  std::string_view text;
};

/// Returns the files patterns/maps/*.json of the source tree, sorted by name.
std::span<const BuiltInMapFile> BuiltInMapFiles();

}  // namespace shardwright::checkpoints

namespace shardwright::checkpoints::maps {

/// The first rule that matches a name in a naming scheme.
struct FoundRule {
  std::uint32_t rule = 0;
  std::uint32_t tensor = 0;
  Captures captures;
};

/// Finds the rules for names in one naming scheme.
class NameFinder {
 public:
  NameFinder(const ModelMap::Impl& map, std::uint32_t side) : map_(map), side_(side) {}
  std::optional<FoundRule> Find(const std::string& name) const;

 private:
  const ModelMap::Impl& map_;
  std::uint32_t side_;
};

/// A parameter that takes part in a rule.
struct Member {
  std::uint32_t param = 0;   ///< into Checkpoint::params
  std::uint32_t tensor = 0;  ///< index of the tensor in the rule's source scheme
  std::uint64_t place = 0;   ///< index in the captured axis
};

/// A rule applied to one layer, with the parameters that take part.
struct Instance {
  std::uint32_t rule = 0;
  Captures captures;  ///< without those of captured axes
  std::vector<Member> members;
  std::vector<std::optional<std::uint64_t>> sizes;  ///< by index of the symbol in the rule
  bool same = false;  ///< both schemes have one tensor with the same shape and order
};

/// Computes the sizes of all instances from known sizes, from constants and relations,
/// and from the shapes of members. Adds the sizes that have names in the map to `known`.
/// \param given  those of the known sizes that the user gave
/// \error kUsage  a size that cannot be derived, or shapes that contradict the rule with a given
///        size; kBadInput  shapes that contradict the rule
Status SolveSizes(const ModelMap::Impl& map, std::uint32_t side, const Checkpoint& source,
                  const ModelSizes& given, std::vector<Instance>* instances, ModelSizes* known);

/// Returns the extent of an axis. \pre sizes are known
std::uint64_t ExtentOf(const Axis& axis, const Instance& instance);

/// A range of indices of an axis.
struct Range {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  std::uint64_t size() const { return last - first; }
};

/// Returns the index range of a factor. \param place  in a captured axis \pre sizes are known
Range RangeOf(const MapRule& rule, const Factor& factor, std::uint64_t place,
              const Instance& instance);

/// A part of a new parameter that comes from one old parameter.
struct Piece {
  std::uint32_t param = 0;  ///< index of the old parameter
  layout::CutPtr cut;       ///< from the new tensor (view) to the old one (shard); null: identity
};

/// A parameter of the target scheme.
struct NewParam {
  std::string name;
  Shape shape;
  std::vector<Piece> pieces;
  std::optional<std::uint64_t> layer;   ///< capture "layer"
  std::optional<std::uint64_t> expert;  ///< capture "expert"
  std::string expert_module;            ///< the name up to the capture "expert"
  bool reshaped = false;                ///< more than a rename of one old parameter
};

/// Returns the new parameters of an instance.
/// \param cuts  cache of the cuts that were already made, shared by all instances
/// \error kBadInput  missing members, or more elements than 64 bits can count
Result<std::vector<NewParam>> MakeParams(const ModelMap::Impl& map, std::uint32_t from,
                                         std::uint32_t to, const Instance& instance,
                                         const Checkpoint& source,
                                         std::map<std::string, layout::CutPtr>* cuts);

/// Builds the new checkpoint: tensors, parameters, and groups with their order.
Result<Checkpoint> Assemble(const ModelMap::Impl& map, std::uint32_t to, Checkpoint source,
                            std::vector<NewParam> params, const Patterns& patterns);

}  // namespace shardwright::checkpoints::maps
