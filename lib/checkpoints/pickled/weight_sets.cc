// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/weight_sets.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include "support/base/text.h"

namespace shardwright::checkpoints {
namespace {

// Usual names of the weights that trainers train.
constexpr std::array<std::string_view, 7> kConventional = {"model", "net",     "module", "policy",
                                                           "actor", "student", "unet"};
// Words in names of averages and copies.
constexpr std::array<std::string_view, 18> kCopies = {
    "ema", "target",  "initial", "init",   "ref",    "reference", "base", "teacher", "averaged",
    "avg", "average", "swa",     "shadow", "frozen", "old",       "best", "polyak",  "copy"};

template <std::size_t kCount>
bool IsAmong(std::string_view word, const std::array<std::string_view, kCount>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string_view LastPart(std::string_view root) {
  const std::size_t dot = root.rfind('.');
  return dot == std::string_view::npos || root == kTopLevel ? root : root.substr(dot + 1);
}

bool IsConventional(std::string_view root) { return IsAmong(LastPart(root), kConventional); }

std::string ListedNames(std::span<const WeightCandidate> candidates) {
  std::vector<std::string> names;
  names.reserve(candidates.size());
  for (const WeightCandidate& one : candidates) names.push_back(Quoted(one.name));
  return Joined(names, ", ");
}

/// Formats a set's name and tensor count. For files that were not read the count is unknown.
std::string NameAndCount(const WeightSet& set) {
  if (set.tensors == 0) return Quoted(set.name);
  return Quoted(set.name) + " (" + Plural(set.tensors, "tensor") + ")";
}

}  // namespace

bool NamesCopy(std::string_view root) {
  std::string word;
  bool copy = false;
  for (std::size_t i = 0; i <= root.size(); ++i) {
    const char c = i < root.size() ? root[i] : '.';
    // An upper-case letter begins a word: "modelEma".
    const bool capital = std::isupper(static_cast<unsigned char>(c)) != 0;
    const bool before = i > 0 && std::islower(static_cast<unsigned char>(root[i - 1])) != 0;
    if (std::isalpha(static_cast<unsigned char>(c)) == 0 || (capital && before)) {
      copy = copy || IsAmong(word, kCopies);
      word.clear();
    }
    if (std::isalpha(static_cast<unsigned char>(c)) == 0) continue;
    word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return copy;
}

Result<std::size_t> ChooseWeights(std::span<const WeightCandidate> candidates, bool by_optimizer) {
  if (candidates.size() == 1) return std::size_t{0};
  std::uint64_t most = 0;
  for (const WeightCandidate& one : candidates) most = std::max(most, one.matches);
  std::vector<std::size_t> able;  // with at least half of the largest number of matches
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].matches > 0 && candidates[i].matches * 2 >= most) able.push_back(i);
  }
  if (able.size() == 1) return able.front();
  std::vector<std::size_t> left = able;
  std::erase_if(left, [&](std::size_t i) { return NamesCopy(candidates[i].name); });
  if (left.size() == 1) return left.front();
  if (by_optimizer && left.size() > 1) {
    std::uint64_t best = 0;
    for (const std::size_t i : left) best = std::max(best, candidates[i].matches);
    std::erase_if(left, [&](std::size_t i) { return candidates[i].matches < best; });
    if (left.size() == 1) return left.front();
  }
  const std::vector<std::size_t> equal = left.empty() ? able : left;
  std::erase_if(left, [&](std::size_t i) { return !IsConventional(candidates[i].name); });
  if (left.size() == 1) return left.front();
  std::vector<WeightCandidate> named;
  named.reserve(equal.size());
  for (const std::size_t i : equal) named.push_back(candidates[i]);
  return Fail(Errc::kUnsupported,
              "the checkpoint has several sets of weights with the same names, and does not record "
              "which one is the model: ",
              ListedNames(named), "; choose one with --weights-of NAME");
}

namespace {

/// Returns true if consecutive parts of `root` equal
/// those of `asked`: "ema" is contained in "app.ema.net".
bool HasParts(std::string_view root, std::string_view asked) {
  for (std::size_t at = root.find(asked); !asked.empty() && at != std::string_view::npos;
       at = root.find(asked, at + 1)) {
    const std::size_t end = at + asked.size();
    if ((at == 0 || root[at - 1] == '.') && (end == root.size() || root[end] == '.')) return true;
  }
  return false;
}

}  // namespace

Result<std::size_t> FindWeights(std::span<const WeightCandidate> candidates,
                                std::string_view asked) {
  std::vector<std::size_t> below;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].name == asked) return i;
    if (HasParts(candidates[i].name, asked)) below.push_back(i);
  }
  if (below.size() == 1) return below.front();
  return Fail(Errc::kUsage, "--weights-of ", asked, ": ",
              (below.empty() ? "no set of weights has that name"
                             : "several sets of weights have it in their names"),
              "; the checkpoint has ", ListedNames(candidates));
}

std::vector<WeightSet> WeightSetsOf(std::span<const WeightCandidate> candidates,
                                    std::size_t taken) {
  std::vector<WeightSet> sets;
  const auto add = [&](std::size_t i) {
    const WeightCandidate& one = candidates[i];
    sets.push_back({one.name, one.tensors, one.bytes, i == taken});
  };
  add(taken);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (i != taken) add(i);
  }
  return sets;
}

std::string WeightSetText(const WeightSet& set) { return "the weights of " + NameAndCount(set); }

std::string WeightSetsMessage(std::span<const WeightSet> sets) {
  if (sets.size() < 2) return "";
  std::vector<std::string> others;
  for (const WeightSet& set : sets.subspan(1)) others.push_back(NameAndCount(set));
  return "the checkpoint has several sets of weights: " + NameAndCount(sets.front()) +
         " is taken as the model, not " + FirstFew(others) + "; --weights-of NAME selects another";
}

}  // namespace shardwright::checkpoints
