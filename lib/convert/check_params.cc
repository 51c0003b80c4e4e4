// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "convert/check_internal.h"
#include "convert/element_text.h"
#include "support/base/str_cat.h"
#include "support/base/text.h"

namespace shardwright::convert {
namespace {

/// Returns the parameter that another is tied to, for messages.
std::string TieText(const std::string& name) { return name.empty() ? "nothing" : Quoted(name); }

/// Returns the parameters of the model and the fused parameters of the optimizer.
std::vector<const checkpoints::Param*> AllOf(const checkpoints::Checkpoint& checkpoint) {
  std::vector<const checkpoints::Param*> all;
  for (const checkpoints::Param& param : checkpoint.params) all.push_back(&param);
  for (const checkpoints::Param& param : checkpoint.fused) all.push_back(&param);
  return all;
}

}  // namespace

void Checker::CompareParams() {
  std::map<std::string, const checkpoints::Param*> of_b;
  for (const checkpoints::Param* param : AllOf(b_.checkpoint)) of_b[param->name] = param;
  for (const checkpoints::Param* one : AllOf(a_.checkpoint)) {
    const checkpoints::Param& param = *one;
    const auto found = of_b.find(param.name);
    const bool tie_known = !alike_.ties.contains(param.name);
    if (found == of_b.end()) {
      if (tie_known) Differ("\"" + param.name + "\": only in the first");
      continue;
    }
    const checkpoints::Param& other = *found->second;
    if (!tie_known) {  // the elements are compared instead
      of_b.erase(found);
      continue;
    }
    if (param.kind != other.kind && !alike_.kinds.contains(param.name))
      Differ("\"" + param.name + "\": different kinds (trainable, frozen or buffer)");
    if (param.alias_of != other.alias_of) {
      Differ(StrCat(Quoted(param.name), ": tied to ", TieText(param.alias_of), " and to ",
                    TieText(other.alias_of)));
    }
    // If one checkpoint has no state yet, the other one's must be zeros at any step.
    const bool idle = idle_a_.contains(param.name) != idle_b_.contains(param.name);
    for (const std::string& line :
         idle ? std::vector<std::string>() : ScalarDifferences(param.scalars, other.scalars)) {
      Differ("\"" + param.name + "\" " + line);
    }
    of_b.erase(found);
  }
  for (const auto& [name, param] : of_b) {
    if (!alike_.ties.contains(name)) Differ("\"" + name + "\": only in the second");
  }
  const auto& groups_a = a_.checkpoint.groups;
  const auto& groups_b = b_.checkpoint.groups;
  const auto is_moe = [](const checkpoints::Group& group) { return group.moe; };
  const bool experts = std::any_of(groups_a.begin(), groups_a.end(), is_moe) ||
                       std::any_of(groups_b.begin(), groups_b.end(), is_moe);
  const bool parted = experts && groups_a.size() != groups_b.size();
  const bool one_format = a_.checkpoint.origin == b_.checkpoint.origin;
  CompareProgress();
  if (one_format && !parted) return CompareGroups();
  CompareGroupsOfParams(one_format);
}

/// Compares the progress of training. Not every format records it.
void Checker::CompareProgress() {
  const auto compare = [&](const char* what, const auto& a, const auto& b) {
    if (!a || !b || *a == *b) return;
    Differ(StrCat(what, ": ", *a, " and ", *b));
  };
  compare("iteration", a_.checkpoint.iteration, b_.checkpoint.iteration);
  compare("consumed samples", a_.checkpoint.consumed_samples, b_.checkpoint.consumed_samples);
}

void Checker::CompareGroups() {
  const auto& groups_a = a_.checkpoint.groups;
  const auto& groups_b = b_.checkpoint.groups;
  if (groups_a.size() != groups_b.size()) {
    return Differ(StrCat("parameter groups: ", groups_a.size(), " and ", groups_b.size()));
  }
  for (std::size_t g = 0; g < groups_a.size(); ++g) {
    for (const std::string& line : GroupDifferences(groups_a[g], groups_b[g], true)) {
      Differ(StrCat("parameter group ", g, " ", line));
    }
  }
  std::map<std::string, std::int32_t> of_b;
  for (const checkpoints::Param* param : AllOf(b_.checkpoint)) of_b[param->name] = param->group;
  for (const checkpoints::Param* one : AllOf(a_.checkpoint)) {
    const checkpoints::Param& param = *one;
    const auto found = of_b.find(param.name);
    if (found == of_b.end() || !param.alias_of.empty() || found->second == param.group) continue;
    const auto text = [](std::int32_t group) {
      return group < 0 ? std::string("none") : std::to_string(group);
    };
    Differ("\"" + param.name + "\": in parameter group " + text(param.group) + " and " +
           text(found->second));
  }
}

/// Compares the groups of each parameter. Formats order groups differently, and split
/// or merge those of experts, but the options of a parameter are the same in all.
void Checker::CompareGroupsOfParams(bool one_format) {
  std::map<std::string, std::int32_t> of_b;
  for (const checkpoints::Param* param : AllOf(b_.checkpoint)) of_b[param->name] = param->group;
  std::set<std::pair<std::int32_t, std::int32_t>> seen;
  for (const checkpoints::Param* one : AllOf(a_.checkpoint)) {
    const checkpoints::Param& param = *one;
    const auto found = of_b.find(param.name);
    if (found == of_b.end() || !param.alias_of.empty()) continue;
    if (alike_.ties.contains(param.name) || alike_.kinds.contains(param.name)) continue;
    const std::int32_t other = found->second;
    if (param.group < 0 && other < 0) continue;
    if (param.group < 0 || other < 0) {
      Differ("\"" + param.name + "\": in a parameter group in only one of the two");
      continue;
    }
    if (!seen.emplace(param.group, other).second) continue;
    const auto& of_first = a_.checkpoint.groups[static_cast<std::size_t>(param.group)];
    const auto& of_second = b_.checkpoint.groups[static_cast<std::size_t>(other)];
    for (const std::string& line : GroupDifferences(of_first, of_second, one_format)) {
      Differ(StrCat("parameter groups ", param.group, " and ", other, " (\"", param.name, "\") ",
                    line));
    }
  }
}

}  // namespace shardwright::convert
