// SPDX-License-Identifier: Apache-2.0
#include "convert/element_text.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoints/pickled/hyper.h"
#include "engine/layout/states.h"
#include "engine/tensor/convert.h"
#include "support/base/text.h"

namespace shardwright::convert {
namespace {

std::string RealText(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", value);
  char shorter[40];
  std::snprintf(shorter, sizeof shorter, "%.9g", value);
  return std::strtod(shorter, nullptr) == value ? shorter : text;
}

/// Formats bytes as a hexadecimal number, last byte first.
std::string HexText(std::span<const std::byte> bytes) {
  const std::vector<std::byte> number(bytes.rbegin(), bytes.rend());
  return "0x" + Hex(number);
}

constexpr std::size_t kShownBytes = 16;
constexpr std::size_t kShownText = 1000;

/// Appends a value until the text is long enough. Lists can share items, so the text could explode.
void AddValueText(const pickle::Node* node, std::string* text) {
  if (text->size() > kShownText) {
    text->append("...");
    return;
  }
  if (node == nullptr) {
    text->append("nothing");
    return;
  }
  switch (node->kind) {
    case pickle::Kind::kNone:
      text->append("None");
      return;
    case pickle::Kind::kBool:
      text->append(node->integer != 0 ? "True" : "False");
      return;
    case pickle::Kind::kInt:
      text->append(std::to_string(node->integer));
      return;
    case pickle::Kind::kFloat:
      text->append(RealText(node->real));
      return;
    case pickle::Kind::kString:
      text->append("'").append(node->text.substr(0, kShownText)).append("'");
      return;
    case pickle::Kind::kTuple:
    case pickle::Kind::kList:
    case pickle::Kind::kSize:
      text->append("[");
      for (std::size_t i = 0; i < node->items.size(); ++i) {
        if (i > 0) text->append(", ");
        AddValueText(node->items[i], text);
        if (text->ends_with("...")) return;
      }
      text->append("]");
      return;
    default:
      text->append(pickle::Describe(node));
  }
}

std::string ScalarText(const checkpoints::Scalar& scalar) {
  if (!scalar.is_tensor) return ValueText(scalar.value);
  const std::uint64_t item = ItemSize(scalar.dtype);
  const auto bytes = std::as_bytes(std::span(scalar.bytes));
  if (bytes.size() == item) return ElementText(scalar.dtype, bytes);
  return StrCat("tensor ", Name(scalar.dtype), " of ", bytes.size(), " bytes ",
                Hex(bytes.first(std::min<std::size_t>(bytes.size(), kShownBytes))));
}

/// Converts a group's hyper-parameters to the options of a trainer.
const pickle::Node* OptionsOf(const checkpoints::HyperParams& hyper, pickle::Arena* arena) {
  pickle::Node* options = arena->Dict();
  const auto set = [&](std::string_view key, const std::optional<double>& value) {
    if (value) pickle::Set(*arena, options, key, arena->Float(*value));
  };
  set("lr", hyper.lr);
  set("eps", hyper.eps);
  set("weight_decay", hyper.weight_decay);
  set("momentum", hyper.momentum);
  set("step", hyper.step);
  if (hyper.betas) {
    const auto [first, second] = *hyper.betas;
    pickle::Set(*arena, options, "betas",
                arena->Tuple({arena->Float(first), arena->Float(second)}));
  }
  return options;
}

bool IsNumber(const pickle::Node& node) {
  return node.kind == pickle::Kind::kBool || node.kind == pickle::Kind::kInt ||
         node.kind == pickle::Kind::kFloat;
}

bool IsSequence(const pickle::Node& node) {
  return node.kind == pickle::Kind::kTuple || node.kind == pickle::Kind::kList ||
         node.kind == pickle::Kind::kSize;
}

/// Compares values of two object graphs. Nodes can have several parents, so it remembers
/// equal pairs. Without that, a graph of a few hundred nodes could take years.
class Comparison {
 public:
  /// Same as Python's ==, except that a tuple equals a list and NaN equals NaN.
  bool Same(const pickle::Node* a, const pickle::Node* b) {
    if (a == nullptr || b == nullptr) return a == b;
    if (a == b || equal_.contains({a, b})) return true;
    if (!SameNodes(*a, *b)) return false;
    equal_.emplace(a, b);
    return true;
  }

 private:
  using Nodes = std::vector<const pickle::Node*>;

  bool SameNodes(const pickle::Node& a, const pickle::Node& b) {
    if (IsNumber(a) && IsNumber(b)) return SameNumbers(a, b);
    if (IsSequence(a) && IsSequence(b)) return SameLists(a.items, b.items);
    if (a.kind != b.kind || a.text != b.text || a.integer != b.integer) return false;
    if (a.is_tensor()) {  // only the reader of the file can access their elements
      return a.tensor->dtype == b.tensor->dtype && a.tensor->shape == b.tensor->shape;
    }
    if (a.is_dict()) return SameEntries(a, b);
    return SameLists(a.items, b.items) && Same(a.callable, b.callable) && Same(a.args, b.args) &&
           Same(a.state, b.state) && SameLists(a.list_items, b.list_items) &&
           SameLists(a.dict_items, b.dict_items);
  }

  static bool SameNumbers(const pickle::Node& a, const pickle::Node& b) {
    if (a.kind != pickle::Kind::kFloat && b.kind != pickle::Kind::kFloat) {
      return a.integer == b.integer;
    }
    const auto real = [](const pickle::Node& node) {
      return node.kind == pickle::Kind::kFloat ? node.real : static_cast<double>(node.integer);
    };
    return real(a) == real(b) || (std::isnan(real(a)) && std::isnan(real(b)));
  }

  bool SameLists(const Nodes& a, const Nodes& b) {
    return std::equal(
        a.begin(), a.end(), b.begin(), b.end(),
        [this](const pickle::Node* one, const pickle::Node* other) { return Same(one, other); });
  }

  /// Compares dict entries in any order, but those of large dicts, which are unusual, in order.
  bool SameEntries(const pickle::Node& a, const pickle::Node& b) {
    constexpr std::size_t kAnyOrder = 1000;
    if (a.entry_count() != b.entry_count()) return false;
    for (std::size_t i = 0; i < a.entry_count(); ++i) {
      bool found = SameEntry(a, i, b, i);
      for (std::size_t k = 0; k < b.entry_count() && !found; ++k) {
        if (a.entry_count() > kAnyOrder) return false;
        found = k != i && SameEntry(a, i, b, k);
      }
      if (!found) return false;
    }
    return true;
  }

  bool SameEntry(const pickle::Node& a, std::size_t i, const pickle::Node& b, std::size_t k) {
    return Same(a.key(i), b.key(k)) && Same(a.value(i), b.value(k));
  }

  std::set<std::pair<const pickle::Node*, const pickle::Node*>> equal_;
};

bool SameValue(const pickle::Node* a, const pickle::Node* b) { return Comparison().Same(a, b); }

/// Compares by value: optimizers store the same number as a plain one or as a tensor of some type.
bool SameScalar(const checkpoints::Scalar& a, const checkpoints::Scalar& b) {
  const std::optional<double> x = checkpoints::NumberOf(a);
  const std::optional<double> y = checkpoints::NumberOf(b);
  if (x && y && (*x == *y || (std::isnan(*x) && std::isnan(*y)))) return true;
  if (a.is_tensor != b.is_tensor) return false;
  if (!a.is_tensor) return SameValue(a.value, b.value);
  return a.dtype == b.dtype && a.bytes == b.bytes;
}

/// Returns true for a key that defines the training of a parameter in every format.
bool IsNeeded(std::string_view key) {
  return key == "lr" || key == "betas" || key == "eps" || key == "weight_decay";
}

/// Returns true for the value that optimizers and schedulers use if a group lacks
/// the key. Then groups with and without the key are trained in the same way.
bool IsAssumed(const std::string& key, const pickle::Node* value, const pickle::Node* options) {
  if (key == "initial_lr") return SameValue(value, options->Find("lr"));
  if (key == "foreach" || key == "fused") return value->is_none();
  const bool on = key == "bias_correction" || key == "decoupled_weight_decay";  // by AdamW
  const bool off =
      key == "amsgrad" || key == "maximize" || key == "capturable" || key == "differentiable";
  return (on || off) && value->kind == pickle::Kind::kBool && (value->integer != 0) == on;
}

}  // namespace

std::string ElementText(DType dtype, std::span<const std::byte> element) {
  if (CanConvert(dtype, DType::kF64) && dtype != DType::kF64) {
    double value = 0;
    Convert(dtype, element, DType::kF64, std::as_writable_bytes(std::span(&value, 1)));
    return RealText(value) + " (" + HexText(element) + ")";
  }
  if (dtype == DType::kF64) {
    double value = 0;
    std::memcpy(&value, element.data(), sizeof value);
    return RealText(value) + " (" + HexText(element) + ")";
  }
  return HexText(element);
}

std::string ValueText(const pickle::Node* node) {
  std::string text;
  AddValueText(node, &text);
  return text;
}

std::vector<std::string> ScalarDifferences(const std::vector<checkpoints::Scalar>& a,
                                           const std::vector<checkpoints::Scalar>& b) {
  using Pair = std::pair<const checkpoints::Scalar*, const checkpoints::Scalar*>;
  std::map<std::string, Pair> sides;
  for (const checkpoints::Scalar& scalar : a) sides[scalar.state].first = &scalar;
  for (const checkpoints::Scalar& scalar : b) sides[scalar.state].second = &scalar;
  const auto text = [](const checkpoints::Scalar* scalar) {
    return scalar == nullptr ? std::string("nothing") : ScalarText(*scalar);
  };
  std::vector<std::string> lines;
  for (const auto& [state, pair] : sides) {
    const auto& [left, right] = pair;
    if (left != nullptr && right != nullptr && SameScalar(*left, *right)) continue;
    lines.push_back(StrCat(state, ": ", text(left), " and ", text(right)));
  }
  return lines;
}

std::vector<std::string> GroupDifferences(const checkpoints::Group& a, const checkpoints::Group& b,
                                          bool one_format) {
  const bool trainers = a.options != nullptr && b.options != nullptr;
  const bool both = one_format && trainers;
  pickle::Arena arena;
  const auto options_of = [&](const checkpoints::Group& group) -> const pickle::Node* {
    if (group.options == nullptr) return OptionsOf(group.hyper, &arena);
    return checkpoints::PlainOptions(group.options, group.tensors, &arena);
  };
  const pickle::Node* of_a = options_of(a);
  const pickle::Node* of_b = options_of(b);
  std::set<std::string> keys;
  for (const pickle::Node* side : {of_a, of_b}) {
    for (std::size_t i = 0; i < side->entry_count(); ++i) {
      if (side->key(i)->is_string()) keys.insert(side->key(i)->text);
    }
  }
  std::vector<std::string> lines;
  for (const std::string& key : keys) {
    // Marks that separate experts in a layout do not affect their training.
    if (key == "params" || key == "moe" || key == "is_expert_parallel") continue;
    if (a.moe && key == "name") continue;
    const pickle::Node* left = of_a->Find(key);
    const pickle::Node* right = of_b->Find(key);
    // A name is only a label, and some formats drop it.
    const bool needed = trainers && IsNeeded(key);
    // A step stored in the group is compared by parameter.
    const pickle::Node* one = left != nullptr ? left : right;
    const bool step = key == "step" && one != nullptr && IsNumber(*one);
    const bool may_lack = (!both && !needed) || key == "name" || step;
    if (left == nullptr || right == nullptr) {
      if (may_lack ||
          (left == nullptr ? IsAssumed(key, right, of_b) : IsAssumed(key, left, of_a))) {
        continue;
      }
    }
    if (SameValue(left, right)) continue;
    std::string& line = lines.emplace_back(key);
    line.append(": ").append(ValueText(left)).append(" and ").append(ValueText(right));
  }
  return lines;
}

namespace {

using checkpoints::Checkpoint;
using checkpoints::Param;
using checkpoints::ParamKind;
using layout::LogicalTensor;
using layout::ShardMap;

/// Returns a copy of a map without its tensors.
ShardMap WithoutTensors(const ShardMap& map) {
  ShardMap out;
  out.files = map.files;
  out.members = map.members;
  out.arrays = map.arrays;
  return out;
}

class AlikeMaker {
 public:
  AlikeMaker(const Checkpoint& a, const Checkpoint& b)
      : a_(a), b_(b), index_a_(a.map), index_b_(b.map) {}

  Alike Make();

 private:
  using Names = std::map<std::string_view, const Param*>;
  static Names NamesOf(const Checkpoint& checkpoint) {
    Names names;
    for (const Param& param : checkpoint.params) names.emplace(param.name, &param);
    return names;
  }
  void UniteKinds(const Param& of_a, const Param& of_b);
  void UniteTie(bool first_ties, const Param& tied, const Param* other);
  MapPair& Maps() {
    if (!out_.maps) out_.maps = MapPair{a_.map, b_.map};
    return *out_.maps;
  }
  void Note(const std::vector<std::string>& names, const std::string& what);

  const Checkpoint& a_;
  const Checkpoint& b_;
  layout::TensorIndex index_a_;
  layout::TensorIndex index_b_;
  std::map<std::string, std::size_t> passes_;  // number of pairs by name of the tied parameter
  std::vector<std::string> kinds_;
  std::vector<std::string> tied_;
  std::vector<std::string> untold_;
  Alike out_;
};

/// Finds the parameter's tensor without optimizer state: the first existing one of these states.
std::optional<std::uint32_t> ValueOf(const layout::TensorIndex& index, const std::string& name) {
  for (const std::string_view state :
       {layout::kFrozen, layout::kBuffer, layout::kWeight, layout::kMaster}) {
    if (const auto found = index.Find(name, state)) return found;
  }
  return std::nullopt;
}

/// Gives a tensor with two kinds the same state in both checkpoints.
void AlikeMaker::UniteKinds(const Param& of_a, const Param& of_b) {
  const bool untrained = of_a.kind != ParamKind::kTrainable && of_b.kind != ParamKind::kTrainable;
  const bool unknown = !a_.order_unknown.empty() || !b_.order_unknown.empty();
  if (!untrained && !unknown) return;
  const auto x = ValueOf(index_a_, of_a.name);
  const auto y = ValueOf(index_b_, of_b.name);
  if (!x || !y) return;
  Maps().b.tensors[*y].state = a_.map.tensors[*x].state;
  out_.kinds.insert(of_a.name);
  kinds_.push_back(Quoted(of_a.name));
}

/// Pairs a name that one checkpoint ties to another name with the separate
/// tensor of the other checkpoint, to compare the two.
/// \param other  the parameter with that name in the other checkpoint, or null
void AlikeMaker::UniteTie(bool first_ties, const Param& tied, const Param* other) {
  if (other == nullptr) {
    out_.ties.insert(tied.name);
    untold_.push_back(Quoted(tied.name));
    return;
  }
  const ShardMap& of_holder = first_ties ? a_.map : b_.map;
  const ShardMap& of_other = first_ties ? b_.map : a_.map;
  const layout::TensorIndex& holders = first_ties ? index_a_ : index_b_;
  const auto own = ValueOf(first_ties ? index_b_ : index_a_, tied.name);
  if (!own) return;
  const LogicalTensor& stored = of_other.tensors[*own];
  std::optional<std::uint32_t> holder;
  for (const std::string_view state :
       {layout::kWeight, layout::kMaster, layout::kFrozen, layout::kBuffer}) {
    const auto found = holders.Find(tied.alias_of, state);
    if (found && of_holder.tensors[*found].dtype == stored.dtype) holder = found;
  }
  if (!holder || of_holder.tensors[*holder].shape != stored.shape) return;
  const std::size_t pass = passes_[tied.alias_of]++;
  while (out_.tied.size() <= pass) {
    out_.tied.push_back({WithoutTensors(a_.map), WithoutTensors(b_.map)});
  }
  LogicalTensor left = of_holder.tensors[*holder];
  LogicalTensor right = stored;
  left.name = right.name;
  left.state = right.state;
  if (!first_ties) std::swap(left, right);
  out_.tied[pass].a.tensors.push_back(std::move(left));
  out_.tied[pass].b.tensors.push_back(std::move(right));
  out_.ties.insert(tied.name);
  tied_.push_back(Quoted(tied.name));
}

void AlikeMaker::Note(const std::vector<std::string>& names, const std::string& what) {
  if (names.empty()) return;
  out_.notes.push_back(what + ": " + FirstFew(names));
}

Alike AlikeMaker::Make() {
  const bool alike = a_.origin == b_.origin;  // both record the same properties
  const Names of_a = NamesOf(a_);
  const Names of_b = NamesOf(b_);
  for (const auto& [name, param] : of_a) {
    const auto found = of_b.find(name);
    const Param* other = found == of_b.end() ? nullptr : found->second;
    const bool other_tied = other != nullptr && !other->alias_of.empty();
    if (!alike && !param->alias_of.empty() && !other_tied) {
      UniteTie(true, *param, other);
    } else if (!alike && param->alias_of.empty() && other_tied) {
      UniteTie(false, *other, param);
    } else if (other != nullptr && param->alias_of.empty() && param->kind != other->kind &&
               (!alike || param->undecided || other->undecided)) {
      UniteKinds(*param, *other);
    }
  }
  for (const auto& [name, param] : of_b) {
    if (!alike && !param->alias_of.empty() && !of_a.contains(name)) {
      UniteTie(false, *param, nullptr);
    }
  }
  if (!out_.ties.empty()) {
    for (ShardMap* map : {&Maps().a, &Maps().b}) {
      std::erase_if(map->tensors,
                    [&](const LogicalTensor& one) { return out_.ties.contains(one.name); });
    }
  }
  Note(kinds_,
       StrCat("only one of ", alike ? "the two" : a_.origin + " and " + b_.origin,
              " records whether these are trained, frozen or buffers, so only their elements "
              "are compared"));
  Note(tied_,
       "tied in one checkpoint and stored twice in the other, so only their elements are compared");
  Note(untold_, "tied in one checkpoint and not recorded in the other");
  return std::move(out_);
}

}  // namespace

Alike MakeAlike(const checkpoints::Checkpoint& a, const checkpoints::Checkpoint& b) {
  return AlikeMaker(a, b).Make();
}

}  // namespace shardwright::convert
