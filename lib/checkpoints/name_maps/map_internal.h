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

/// Values of the captures of a name: {"layer", "3"}.
using Captures = std::map<std::string, std::string>;

/// A name with places for numbers and texts: "model.layers.{layer}.mlp.{*rest}".
class NameForm {
 public:
  /// \error kBadInput  braces that are not closed, a capture without a name or twice
  static Result<NameForm> Parse(std::string_view text);

  std::optional<Captures> Match(const std::string& name) const;
  /// \pre every capture has a value
  std::string Fill(const Captures& captures) const;
  const std::string& text() const { return text_; }
  const std::vector<std::string>& captures() const { return captures_; }
  bool Has(std::string_view capture) const;
  /// True for a form that any name has: "{*rest}".
  bool takes_all() const {
    return parts_.size() == 1 && parts_[0].any && parts_[0].literal.empty();
  }
  /// True if it has the capture and that is a number.
  bool Counts(std::string_view capture) const;
  /// The form up to and including a capture. \pre Has(capture)
  std::string UpTo(std::string_view capture) const;
  /// The name up to and including a capture. \pre as Fill
  std::string FillUpTo(const Captures& captures, std::string_view capture) const;

 private:
  struct Part {
    std::string literal;  // before the capture
    std::string capture;  // empty at the end
    bool any = false;     // a text, not a number
  };
  std::string text_;
  std::vector<Part> parts_;
  std::vector<std::string> captures_;
  std::shared_ptr<const re2::RE2> expression_;
};

/// A factor of a dimension: an axis of the rule, all of it or a part.
struct Factor {
  std::uint32_t axis = 0;
  std::optional<std::uint32_t> segment;  ///< "part.q": one segment of a stack
  bool captured = false;                 ///< "{expert}": the place that the name tells
  bool padded = false;  ///< "vocab+": files may have more of it, which belongs to nobody
};

/// One tensor on one side of a rule.
struct TensorForm {
  NameForm name;
  std::vector<std::vector<Factor>> dims;
  std::string text;  ///< of `dims`, for messages
};

/// What a rule says of one side. A rename says nothing of shapes: one tensor without dims.
struct SideForm {
  bool rename = false;
  std::vector<TensorForm> tensors;
};

/// A size: a number, or an index into Rule::symbols.
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
  std::vector<Segment> segments;  ///< of a stack; else `size`
  SizeOf size;
};

struct MapRule {
  std::string origin;  ///< "patterns/maps/llama.json rule 3"
  std::vector<Axis> axes;
  std::vector<std::string> symbols;  ///< names of sizes
  std::vector<std::optional<SideForm>> sides;
};

/// The product of some sizes is another: "heads = kv_heads query".
struct Relation {
  std::string product;
  std::vector<std::string> factors;
};

/// Values of facts that tell a model of the map: {"model_type", {"llama", "mistral"}}.
using Told = std::map<std::string, std::vector<std::string>>;

struct MapSide {
  std::string name;
  std::vector<NameForm> order;    ///< of parameters in the model; empty: not told
  std::vector<NameForm> derived;  ///< what models of this side compute themselves
};

}  // namespace shardwright::checkpoints::maps

namespace shardwright::checkpoints {

struct ModelMap::Impl {
  std::string origin;
  std::string name;
  std::vector<maps::Told> told_by;                        ///< any of them
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

/// The files patterns/maps/*.json of the source tree, sorted by name.
std::span<const BuiltInMapFile> BuiltInMapFiles();

}  // namespace shardwright::checkpoints

namespace shardwright::checkpoints::maps {

/// Where a name belongs on a side: the first rule that has it.
struct FoundRule {
  std::uint32_t rule = 0;
  std::uint32_t tensor = 0;
  Captures captures;
};

/// Finds the rules of names on one side.
class NameFinder {
 public:
  NameFinder(const ModelMap::Impl& map, std::uint32_t side) : map_(map), side_(side) {}
  std::optional<FoundRule> Find(const std::string& name) const;

 private:
  const ModelMap::Impl& map_;
  std::uint32_t side_;
};

/// A parameter in a rule.
struct Member {
  std::uint32_t param = 0;   ///< into Checkpoint::params
  std::uint32_t tensor = 0;  ///< of the rule's form of the source side
  std::uint64_t place = 0;   ///< of a captured axis
};

/// A rule for one layer: what it is made of.
struct Instance {
  std::uint32_t rule = 0;
  Captures captures;  ///< but the captured axes
  std::vector<Member> members;
  std::vector<std::optional<std::uint64_t>> sizes;  ///< by symbol of the rule
  bool same = false;  ///< both sides have one tensor, of the same shape and order
};

/// Works out the sizes of all instances: from those that are given, from constants and relations,
/// and from the shapes of members. Adds those that the map names to `known`.
/// \error kUsage  sizes that nothing tells; kBadInput  shapes that contradict the rule
Status SolveSizes(const ModelMap::Impl& map, std::uint32_t side, const Checkpoint& source,
                  std::vector<Instance>* instances, ModelSizes* known);

/// Extent of an axis. \pre sizes are known
std::uint64_t ExtentOf(const Axis& axis, const Instance& instance);

/// A stretch of an axis.
struct Range {
  std::uint64_t first = 0;
  std::uint64_t last = 0;
  std::uint64_t size() const { return last - first; }
};

/// The stretch of its axis that a factor has. \param place  of a captured axis \pre sizes are known
Range RangeOf(const MapRule& rule, const Factor& factor, std::uint64_t place,
              const Instance& instance);

/// A part of a new parameter.
struct Piece {
  std::uint32_t param = 0;  ///< old
  layout::CutPtr cut;       ///< from the new tensor (view) to the old one (shard); null: the same
};

/// A parameter of the target side.
struct NewParam {
  std::string name;
  Shape shape;
  std::vector<Piece> pieces;
  std::optional<std::uint64_t> layer;   ///< capture "layer"
  std::optional<std::uint64_t> expert;  ///< capture "expert"
  std::string expert_module;            ///< its name up to that
  bool reshaped = false;                ///< not one old parameter under another name
};

/// The new parameters of an instance.
/// \param cuts  those that are made already, to share them
/// \error kBadInput  members that are missing, more elements than 64 bits count
Result<std::vector<NewParam>> MakeParams(const ModelMap::Impl& map, std::uint32_t from,
                                         std::uint32_t to, const Instance& instance,
                                         const Checkpoint& source,
                                         std::map<std::string, layout::CutPtr>* cuts);

/// Puts the new checkpoint together: tensors, parameters, groups and their order.
Result<Checkpoint> Assemble(const ModelMap::Impl& map, std::uint32_t to, Checkpoint source,
                            std::vector<NewParam> params, const Patterns& patterns);

}  // namespace shardwright::checkpoints::maps
