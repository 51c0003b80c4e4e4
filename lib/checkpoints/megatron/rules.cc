// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/rules.h"

#include <algorithm>
#include <array>
#include <map>

#include "checkpoints/megatron/names.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints::megatron {
namespace {

using layout::Split;
using layout::SplitRule;

constexpr std::string_view kOrigin = "Megatron-Core";

constexpr std::array<std::string_view, 8> kRows = {
    "linear_qkv.", "linear_q.",         "linear_kv.",         "linear_q_proj.",
    "eh_proj.",    "linear_q_up_proj.", "linear_kv_up_proj.", "linear_fc1."};
constexpr std::array<std::string_view, 2> kColumns = {"linear_proj.weight", "linear_fc2.weight"};
constexpr std::array<std::string_view, 13> kReplicated = {"linear_proj.bias",
                                                          "linear_fc2.bias",
                                                          "position_embeddings.weight",
                                                          "tokentype_embeddings.weight",
                                                          "router.weight",
                                                          "router.bias",
                                                          "expert_bias",
                                                          "local_tokens_per_expert",
                                                          "gate_weight",
                                                          "linear_q_down_proj.weight",
                                                          "linear_kv_down_proj.weight",
                                                          "linear_qkv_down_proj.weight",
                                                          "inv_freq"};

bool EndsInComponent(std::string_view name, std::string_view end) {
  return name.ends_with(end) &&
         (name.size() == end.size() || name[name.size() - end.size() - 1] == '.');
}

template <class List>
bool EndsInOne(std::string_view name, const List& ends) {
  return std::any_of(ends.begin(), ends.end(),
                     [&](std::string_view end) { return EndsInComponent(name, end); });
}

/// Returns "linear_qkv." of "a.linear_qkv.weight".
std::string_view ModuleOf(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return "";
  const std::size_t before = name.rfind('.', dot - 1);
  return name.substr(before == std::string_view::npos ? 0 : before + 1,
                     dot + 1 - (before == std::string_view::npos ? 0 : before + 1));
}

bool IsNorm(std::string_view name) {
  return name.find("layernorm") != std::string_view::npos ||
         name.find("layer_norm") != std::string_view::npos ||
         EndsInComponent(name, "norm.weight") || ModuleOf(name) == "enorm." ||
         ModuleOf(name) == "hnorm.";
}

SplitRule RuleOf(Split split, std::uint32_t dim = 0) {
  SplitRule rule;
  rule.split = split;
  rule.dim = dim;
  rule.origin = kOrigin;
  return rule;
}

}  // namespace

Status Rules::CheckHeads(const std::string& name, std::uint64_t rows) const {
  if (args_.heads == 0 || args_.groups == 0 || args_.channels == 0) return {};
  if (args_.heads % args_.groups != 0) {
    return Fail(Errc::kBadInput, "args: ", args_.heads, " attention heads do not divide by ",
                args_.groups, " query groups");
  }
  const std::uint64_t heads = args_.heads * (args_.attention_gate ? 2 : 1) + 2 * args_.groups;
  SW_TRY_ASSIGN(const std::uint64_t wanted, CheckedMul(heads, args_.channels));
  if (wanted == rows) return {};
  return Fail(Errc::kBadInput, "\"", name, "\": ", wanted, " rows expected (", args_.heads,
              " heads, ", args_.groups, " groups, ", args_.channels, " channels), found ", rows);
}

Result<std::optional<Ruled>> Rules::RuleFor(const std::string& name,
                                            std::span<const Shape> shards) const {
  const std::vector<Shape> all(shards.begin(), shards.end());
  Ruled ruled;
  if (IsOfVocabulary(name) || EndsInOne(name, kColumns)) {
    ruled.rule = RuleOf(Split::kDim, IsOfVocabulary(name) ? 0 : 1);
  } else if (IsNorm(name) || EndsInOne(name, kReplicated)) {
    ruled.rule = RuleOf(Split::kReplicated);
  } else if (std::find(kRows.begin(), kRows.end(), ModuleOf(name)) != kRows.end()) {
    ruled.rule = RuleOf(Split::kDim);
  } else {
    return std::optional<Ruled>();
  }
  auto whole = layout::WholeShape(ruled.rule, all);
  if (!whole) return Within("\"" + name + "\"", whole.error());
  ruled.whole = *std::move(whole);
  if (ModuleOf(name) == "linear_fc1." && gated_ && ruled.rule.split == Split::kDim) {
    const std::uint64_t rows = ruled.whole.empty() ? 1 : ruled.whole[0];
    if (rows % 2 != 0) {
      return Fail(Errc::kBadInput, "\"", name,
                  "\": an even number of rows expected for gate and up projection together, found ",
                  rows);
    }
    ruled.rule.split = Split::kSub;
    ruled.rule.sub_sizes = {rows / 2, rows / 2};
  }
  if (ModuleOf(name) == "linear_qkv." && ruled.rule.split == Split::kDim && !ruled.whole.empty()) {
    SW_TRY(CheckHeads(name, ruled.whole[0]));
  }
  return std::optional(std::move(ruled));
}

namespace {

/// Separates the rows of a vocabulary from its padding rows.
Status FindPadding(const std::string& name, std::span<const Shape> shards, const Args& args,
                   Whole* whole) {
  const bool by_rows = whole->rule.split == Split::kDim && whole->rule.dim == 0;
  if (whole->rule.split == Split::kMesh || (shards.size() > 1 && !by_rows)) {
    return Fail(Errc::kUnsupported, "\"", name,
                "\": a vocabulary is sharded by rows, not by: ", layout::Explain(whole->rule));
  }
  for (const Shape& shard : shards) {
    if (shard == shards.front()) continue;
    return Fail(Errc::kBadInput, "\"", name, "\": shapes ", ToString(shards.front()), " and ",
                ToString(shard), " on different ranks");
  }
  whole->rule.padded = true;
  whole->rule.granule = {args.vocab_multiple};
  if (!args.vocab || *args.vocab == 0 || *args.vocab > whole->shape[0]) return {};
  whole->padding = whole->shape[0] - *args.vocab;
  whole->shape[0] = *args.vocab;
  return {};
}

}  // namespace

Result<Whole> WholeOf(const Rules& rules, const Patterns& patterns, const std::string& name,
                      std::span<const Shape> shards, const Args& args) {
  const RuleSource* const own[] = {&rules};
  SW_TRY_ASSIGN(Ruled ruled, DecideRule(own, patterns, name, shards));
  Whole whole;
  whole.shape = std::move(ruled.whole);
  whole.rule = std::move(ruled.rule);
  if (IsOfVocabulary(name) && !whole.shape.empty()) {
    SW_TRY(FindPadding(name, shards, args, &whole));
  }
  return whole;
}

Result<std::vector<Part>> PartsOf(const Whole& whole, std::uint64_t ranks, std::uint64_t rank) {
  std::vector<Part> parts;
  const auto add = [&](layout::Cut cut, std::uint64_t first, bool padding) {
    parts.push_back({std::make_shared<const layout::Cut>(std::move(cut)), first, padding});
  };
  if (!whole.rule.padded) {
    SW_TRY_ASSIGN(layout::Cut cut, layout::MakeCut(whole.rule, whole.shape, ranks, rank));
    add(std::move(cut), 0, false);
    return parts;
  }
  const std::uint64_t real = whole.shape[0];
  const std::uint64_t all = real + whole.padding;
  if (all == 0) return Fail(Errc::kUnsupported, "a vocabulary without rows");
  if (all % ranks != 0) {
    return Fail(Errc::kUnsupported, all,
                " rows of the vocabulary with padding "
                "do not divide by ",
                ranks, " tensor-parallel ranks");
  }
  const std::uint64_t width = all / ranks;
  const std::uint64_t at = rank * width;
  const std::uint64_t mine = at >= real ? 0 : std::min(width, real - at);
  const auto rows = [&](std::uint64_t extent, std::uint64_t first, std::uint64_t count) {
    Shape view = whole.shape;
    view[0] = extent;
    layout::Box box;
    box.at_view.assign(view.size(), 0);
    box.at_shard.assign(view.size(), 0);
    box.at_view[0] = first;
    Shape shard = view;
    shard[0] = count;
    box.sizes = shard;
    return layout::Cut::Make(std::move(view), std::move(shard), {std::move(box)});
  };
  if (mine > 0) {
    SW_TRY_ASSIGN(layout::Cut cut, rows(real, at, mine));
    add(std::move(cut), 0, false);
  }
  if (mine < width) {
    Shape row = whole.shape;
    row[0] = mine;
    SW_TRY_ASSIGN(layout::Cut cut, rows(whole.padding, at + mine - real, width - mine));
    add(std::move(cut), Elems(row), true);
  }
  return parts;
}

Result<bool> IsGated(std::span<const std::string> names, std::span<const Shape> shapes) {
  constexpr std::string_view kFirst = "linear_fc1.weight";
  std::map<std::string_view, const Shape*> by_name;
  for (std::size_t i = 0; i < names.size(); ++i) by_name.emplace(names[i], &shapes[i]);
  std::optional<bool> gated;
  for (const auto& [name, first] : by_name) {
    if (!name.ends_with(kFirst) || first->size() < 2) continue;
    const std::string sibling =
        std::string(name.substr(0, name.size() - kFirst.size())) + "linear_fc2.weight";
    const auto second = by_name.find(sibling);
    if (second == by_name.end() || second->second->size() < 2) continue;
    const std::uint64_t rows = (*first)[first->size() - 2];
    const std::uint64_t columns = second->second->back();
    const bool twice = rows == 2 * columns;
    if ((!twice && rows != columns) || (gated && *gated != twice)) {
      return Fail(Errc::kBadInput, "\"", name, "\": ", ToString(*first), " and ",
                  ToString(*second->second), " of the second layer do not fit together");
    }
    gated = twice;
  }
  return gated.value_or(false);
}

bool HasDecay(const Args& args, std::string_view name, const Shape& shape) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (args.spares_embeddings && has("embedding")) return false;
  if (args.decays_qk_norms && (has("q_layernorm.") || has("k_layernorm."))) return true;
  return !name.ends_with(".bias") && shape.size() != 1;
}

std::uint64_t RanksOf(const Args& args, std::string_view name) {
  return ParseName(name).expert ? args.etp : args.tp;
}

}  // namespace shardwright::checkpoints::megatron
