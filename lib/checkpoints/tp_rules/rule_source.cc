// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/tp_rules/rule_source.h"

#include <utility>

#include "engine/layout/rule.h"

namespace shardwright::checkpoints {

using layout::Split;
using layout::SplitRule;

Result<Ruled> DecideRule(std::span<const RuleSource* const> own_rules, const Patterns& patterns,
                         const std::string& name, std::span<const Shape> shards) {
  SW_TRY_ASSIGN(std::optional<Ruled> user, patterns.RuleFor(name, shards, Patterns::From::kUser));
  if (user) return *std::move(user);
  std::optional<Ruled> own;
  for (const RuleSource* source : own_rules) {
    SW_TRY_ASSIGN(own, source->RuleFor(name, shards));
    if (own) break;
  }
  const Result<std::optional<Ruled>> family =
      patterns.RuleFor(name, shards, Patterns::From::kBuiltIn);
  if (own) {
    // The checkpoint has the widths of its own ranks. The family's rule yields those of others.
    SplitRule& rule = own->rule;
    if (family && *family && (*family)->rule.split == rule.split &&
        (*family)->rule.dim == rule.dim && !rule.padded && !(*family)->rule.padded) {
      rule.uneven = (*family)->rule.uneven;
      rule.granule = (*family)->rule.granule;
    }
    return *std::move(own);
  }
  if (!family) return tl::unexpected<Error>(family.error());
  if (*family) return **family;
  if (shards.size() == 1) {
    Ruled unknown;
    unknown.rule.split = Split::kUnknown;
    unknown.whole = shards.front();
    return unknown;
  }
  return Fail(Errc::kUnsupported, "\"", name, "\": no rule specifies how ", shards.size(),
              " tensor-parallel ranks with shards of shape ", ToString(shards.front()),
              " form the whole tensor; pass --patterns a file with ", RuleToAdd(name, shards));
}

Result<layout::Cut> CutOf(const Param& param, std::uint64_t ranks, std::uint64_t rank) {
  if (param.rule.split == Split::kUnknown && ranks > 1) {
    return Fail(Errc::kUnsupported, "\"", param.name, "\": no rule specifies how ", ranks,
                " tensor-parallel ranks shard a tensor of shape ", ToString(param.shape),
                "; pass --patterns a file with ",
                RuleToAdd(param.name, std::span(&param.shape, 1)));
  }
  Result<layout::Cut> cut = layout::MakeCut(param.rule, param.shape, ranks, rank);
  if (!cut) return Within("\"" + param.name + "\"", cut.error());
  return cut;
}

}  // namespace shardwright::checkpoints
