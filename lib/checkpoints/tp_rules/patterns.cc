// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/patterns.h"

#include <algorithm>
#include <numeric>

#include "checkpoints/tp_rules/expression.h"
#include "checkpoints/tp_rules/name_list.h"
#include "checkpoints/tp_rules/patterns_internal.h"
#include "engine/layout/mesh_rule.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints {
namespace {

using layout::Split;
using layout::SplitRule;

const Shape* ShapeOf(const re2::RE2& expression, const std::vector<std::string>& names,
                     const std::vector<Shape>& shapes) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (MatchExpression(expression, names[i])) return &shapes[i];
  }
  return nullptr;
}

bool Holds(const ShapeCondition& condition, const std::vector<std::string>& names,
           const std::vector<Shape>& shapes) {
  const Shape* a = ShapeOf(*condition.match, names, shapes);
  const Shape* b = ShapeOf(*condition.of, names, shapes);
  if (a == nullptr || b == nullptr || condition.dim >= a->size() || condition.of_dim >= b->size()) {
    return false;
  }
  const Result<std::uint64_t> expected = CheckedMul((*b)[condition.of_dim], condition.times);
  return expected && (*a)[condition.dim] == *expected;
}

// Resolves the -1 in a view for a tensor of `elems` elements.
Result<Shape> ResolveView(const std::vector<std::int64_t>& view, std::uint64_t elems) {
  Shape resolved;
  std::uint64_t known = 1;
  for (std::int64_t extent : view) {
    resolved.push_back(extent < 0 ? 0 : static_cast<std::uint64_t>(extent));
    if (extent >= 0) {
      SW_TRY_ASSIGN(known, CheckedMul(known, resolved.back()));
    }
  }
  const auto rest = std::find(view.begin(), view.end(), -1);
  if (rest != view.end() && elems % known == 0) {
    resolved[static_cast<std::size_t>(rest - view.begin())] = elems / known;
    return resolved;
  }
  if (rest != view.end() || known != elems) {
    return Fail(Errc::kBadInput, "a view of ", known, " elements",
                (rest != view.end() ? " and an open dimension" : ""), " does not fit a tensor of ",
                elems, " elements");
  }
  return resolved;
}

Result<Ruled> ApplyDim(const PatternRule& pattern, std::span<const Shape> shards) {
  Ruled ruled{pattern.rule, {}};
  SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(ruled.rule, {shards.begin(), shards.end()}));
  if (shards.size() > 1) {
    ruled.rule.widths.resize(1);
    for (const Shape& shard : shards) ruled.rule.widths[0].push_back(shard[ruled.rule.dim]);
  }
  if (pattern.rows != 0) {
    if (pattern.rows > ruled.whole.front()) {
      return Fail(Errc::kBadInput, "the rule has ", pattern.rows,
                  " real rows, but the tensor stores ", ruled.whole.front());
    }
    ruled.whole.front() = pattern.rows;
  }
  return ruled;
}

/// Returns the sub-tensor sizes of a rule, from their proportions if it has some.
Result<std::vector<std::uint64_t>> SizesOf(const SplitRule& rule,
                                           const std::vector<std::uint64_t>& ratio,
                                           std::uint64_t extent) {
  if (ratio.empty()) return rule.sub_sizes;
  std::uint64_t parts = 0;
  for (const std::uint64_t part : ratio) {
    SW_TRY_ASSIGN(parts, CheckedAdd(parts, part));
  }
  if (extent % parts != 0) {
    return Fail(Errc::kBadInput, "an extent of ", extent, " does not divide into ", parts,
                " parts");
  }
  std::vector<std::uint64_t> sizes;
  sizes.reserve(ratio.size());
  for (const std::uint64_t part : ratio) sizes.push_back(extent / parts * part);
  return sizes;
}

Status CheckShards(const Ruled& ruled, std::span<const Shape> shards) {
  for (std::uint64_t rank = 0; rank < shards.size(); ++rank) {
    SW_TRY_ASSIGN(const Shape shard,
                  layout::ShardShape(ruled.rule, ruled.whole, shards.size(), rank));
    if (shard == shards[rank]) continue;
    return Fail(Errc::kBadInput, "rank ", rank, " should hold a shard ", ToString(shard),
                ", but holds ", ToString(shards[rank]));
  }
  return {};
}

Result<Ruled> ApplySub(const PatternRule& pattern, std::span<const Shape> shards) {
  Ruled ruled{pattern.rule, {}};
  SplitRule& rule = ruled.rule;
  std::uint64_t elems = 0;
  for (const Shape& shard : shards) {
    SW_TRY_ASSIGN(const std::uint64_t mine, CountElems(shard));
    SW_TRY_ASSIGN(elems, CheckedAdd(elems, mine));
  }
  std::uint64_t extent = 0;
  if (!pattern.view.empty()) {
    SW_TRY_ASSIGN(rule.view, ResolveView(pattern.view, elems));
    extent = rule.view[rule.dim];
  } else {
    SplitRule along;
    along.split = Split::kDim;
    along.dim = rule.dim;
    SW_TRY_ASSIGN(const Shape whole, layout::WholeShape(along, {shards.begin(), shards.end()}));
    extent = whole[rule.dim];
  }
  SW_TRY_ASSIGN(rule.sub_sizes, SizesOf(rule, pattern.ratio, extent));
  SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(rule, {shards.begin(), shards.end()}));
  SW_TRY(CheckShards(ruled, shards));
  // A parameter that already has the view's shape needs only an ordinary rule.
  if (rule.view == ruled.whole) {
    rule.view.clear();
    if (rule.sub_sizes.size() == 1) {
      rule.split = Split::kDim;
      rule.sub_sizes.clear();
    }
  }
  return ruled;
}

Result<Ruled> ApplyMesh(const PatternRule& pattern, std::span<const Shape> shards) {
  Ruled ruled{pattern.rule, {}};
  SplitRule& rule = ruled.rule;
  SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(rule, {shards.begin(), shards.end()}));
  SW_TRY_ASSIGN(const auto sizes, shards.size() == 1
                                      ? std::vector<std::uint64_t>(rule.axes.size(), 1)
                                      : layout::MeshSizes(rule, shards.size()));
  std::uint64_t stride = shards.size();
  for (std::size_t i = 0; i < rule.axes.size(); ++i) {
    SplitRule& axis = rule.axes[i];
    stride /= sizes[i];
    if (axis.split == Split::kSub) {
      SW_TRY_ASSIGN(axis.sub_sizes, SizesOf(axis, pattern.axis_ratios[i], ruled.whole[axis.dim]));
    } else if (axis.split == Split::kDim && sizes[i] > 1) {
      axis.widths.resize(1);
      for (std::uint64_t at = 0; at < sizes[i]; ++at) {
        axis.widths[0].push_back(shards[at * stride][axis.dim]);
      }
    }
  }
  SW_TRY(CheckShards(ruled, shards));
  return ruled;
}

Result<Ruled> Apply(const PatternRule& pattern, std::span<const Shape> shards) {
  switch (pattern.rule.split) {
    case Split::kDim:
      return ApplyDim(pattern, shards);
    case Split::kSub:
      return ApplySub(pattern, shards);
    case Split::kMesh:
      return ApplyMesh(pattern, shards);
    default: {
      Ruled ruled{pattern.rule, {}};
      SW_TRY_ASSIGN(ruled.whole, layout::WholeShape(ruled.rule, {shards.begin(), shards.end()}));
      return ruled;
    }
  }
}

using BuiltIn = std::vector<std::shared_ptr<const PatternFile>>;

Result<BuiltIn> ParseBuiltIn() {
  BuiltIn files;
  for (const BuiltInPatternFile& one : BuiltInPatternFiles()) {
    SW_TRY_ASSIGN(PatternFile file, ParsePatternFile(one.text, std::string(one.origin)));
    files.push_back(std::make_shared<const PatternFile>(std::move(file)));
  }
  return files;
}

}  // namespace

struct Patterns::Impl {
  struct Entry {
    std::shared_ptr<const PatternFile> file;
    bool user = false;
    bool applies = false;
  };
  std::vector<Entry> files;  // files of the user precede built-in ones
};

Patterns::Patterns() : impl_(std::make_unique<Impl>()) {}
Patterns::~Patterns() = default;
Patterns::Patterns(Patterns&&) noexcept = default;
Patterns& Patterns::operator=(Patterns&&) noexcept = default;

Status Patterns::AddFile(std::string_view text, const std::string& origin) {
  SW_TRY_ASSIGN(PatternFile file, ParsePatternFile(text, origin));
  const auto at = std::find_if(impl_->files.begin(), impl_->files.end(),
                               [](const Impl::Entry& other) { return !other.user; });
  impl_->files.insert(at, {std::make_shared<const PatternFile>(std::move(file)), true, true});
  return {};
}

Status Patterns::AddBuiltIn() {
  // Parses the files only once, because an agent needs them for every snapshot.
  static const Result<BuiltIn> kBuiltIn = ParseBuiltIn();
  if (!kBuiltIn) return tl::unexpected<Error>(kBuiltIn.error());
  for (const auto& file : *kBuiltIn) impl_->files.push_back({file, false, false});
  return {};
}

Patterns Patterns::ForModel(const std::vector<std::string>& all_names,
                            const std::vector<Shape>& shapes) const {
  SW_CHECK(all_names.size() == shapes.size());
  Patterns chosen;
  for (Impl::Entry entry : impl_->files) {
    const auto occurs = [&](const std::unique_ptr<re2::RE2>& expression) {
      return std::any_of(all_names.begin(), all_names.end(), [&](const std::string& name) {
        return MatchExpression(*expression, name);
      });
    };
    const auto holds = [&](const ShapeCondition& condition) {
      return Holds(condition, all_names, shapes);
    };
    const auto& required = entry.file->required;
    const auto& conditions = entry.file->conditions;
    entry.applies = entry.user || (std::all_of(required.begin(), required.end(), occurs) &&
                                   std::all_of(conditions.begin(), conditions.end(), holds));
    if (entry.applies) chosen.impl_->files.push_back(std::move(entry));
  }
  return chosen;
}

Result<std::optional<Ruled>> Patterns::RuleFor(const std::string& name,
                                               std::span<const Shape> shards, From from) const {
  SW_CHECK(!shards.empty());
  for (const Impl::Entry& entry : impl_->files) {
    if (!entry.applies || (from == From::kUser && !entry.user) ||
        (from == From::kBuiltIn && entry.user)) {
      continue;
    }
    for (const PatternRule& pattern : entry.file->rules) {
      if (!MatchExpression(*pattern.match, name)) continue;
      Result<Ruled> ruled = Apply(pattern, shards);
      if (!ruled) return Within("\"" + name + "\": " + pattern.rule.origin, ruled.error());
      return *std::move(ruled);
    }
  }
  return std::nullopt;
}

std::optional<bool> Patterns::IsFrozenParameter(const std::string& name) const {
  const auto matches = [&](const std::unique_ptr<re2::RE2>& expression) {
    return MatchExpression(*expression, name);
  };
  for (const Impl::Entry& entry : impl_->files) {
    if (!entry.user) continue;
    if (std::ranges::any_of(entry.file->frozen_parameters, matches)) return true;
    if (std::ranges::any_of(entry.file->not_parameters, matches)) return false;
  }
  return std::nullopt;
}

std::optional<SplitRule> Patterns::Find(const std::string& name, const Shape& shape) const {
  const Result<std::optional<Ruled>> ruled = RuleFor(name, std::span(&shape, 1));
  if (!ruled || !*ruled) return std::nullopt;
  return (*ruled)->rule;
}

std::string RuleToAdd(const std::string& name, std::span<const Shape> shards) {
  // The name as an expression for all layers, in a JSON string.
  const std::string literal = AnchoredLiteral(name);
  std::string match;
  for (std::size_t i = 1; i + 1 < literal.size(); ++i) {
    const bool digit = literal[i] >= '0' && literal[i] <= '9';
    if (!digit) {
      match += literal[i] == '\\' || literal[i] == '"' ? std::string("\\") + literal[i]
                                                       : std::string(1, literal[i]);
    } else if (i + 2 >= literal.size() || literal[i + 1] < '0' || literal[i + 1] > '9') {
      match += "\\\\d+";
    }
  }
  const Shape& shard = shards.front();
  std::string text = R"({"match": ")" + match +
                     R"(", "split": "replicated"} if the whole shape is )" + ToString(shard);
  for (std::size_t dim = 0; dim < shard.size(); ++dim) {
    SplitRule rule;
    rule.split = Split::kDim;
    rule.dim = static_cast<std::uint32_t>(dim);
    const Result<Shape> whole = layout::WholeShape(rule, {shards.begin(), shards.end()});
    if (!whole) continue;
    text += R"(, or "split": "dim", "dim": )" + std::to_string(dim);
    if (shards.size() > 1) text += " if it is " + ToString(*whole);
  }
  return text + R"(, or "split": "sub" if it is a stack of tensors)";
}

}  // namespace shardwright::checkpoints
