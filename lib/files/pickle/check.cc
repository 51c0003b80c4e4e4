// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "files/pickle/reader.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

namespace {

constexpr std::uint16_t kUnseen = 0;
constexpr std::uint16_t kOpen = 0xFFFF;
static_assert(limits::kPickleDepth < kOpen);

struct Frame {
  const Node* node = nullptr;
  std::size_t next = 0;      // index of the next child
  std::uint64_t height = 1;  // levels from here down, including this one
};

// Returns the children of a node, one after another; null for an absent one.
const Node* Child(const Node& node, std::size_t i, bool& end) {
  end = false;
  for (const std::vector<const Node*>* list : {&node.items, &node.list_items, &node.dict_items}) {
    if (i < list->size()) return (*list)[i];
    i -= list->size();
  }
  switch (i) {
    case 0:
      return node.callable;
    case 1:
      return node.args;
    case 2:
      return node.state;
    case 3:
      return node.tensor ? node.tensor->attributes : nullptr;
    default:
      end = true;
      return nullptr;
  }
}

// Returns true for nodes without children. Most nodes are leaves, and skipping them saves time.
bool IsLeaf(const Node& node) {
  return node.kind <= Kind::kByteArray || node.kind == Kind::kGlobal ||
         (node.kind == Kind::kTensor && node.tensor && node.tensor->attributes == nullptr);
}

// Returns the integer that a number equals as a dict key, which includes whole floats.
std::optional<std::int64_t> WholeNumber(const Node* node) {
  if (node->kind == Kind::kInt || node->kind == Kind::kBool) return node->integer;
  constexpr double kBeyond = 9223372036854775808.0;
  const double real = node->real;
  if (node->kind != Kind::kFloat || !(real >= -kBeyond && real < kBeyond) ||
      real != std::floor(real)) {
    return std::nullopt;
  }
  return static_cast<std::int64_t>(real);
}

// Numbers the values that can be keys of a dict: equal keys in Python get the
// same number, mutable values get none. Processes each tuple or long text once,
// however often it occurs. Objects, tensors and NaN are equal only to themselves.
// Ignores that a float beyond 64 bits can equal a long integer. \pre no cycles
class Keys {
 public:
  std::optional<std::size_t> operator()(const Node* node) {
    if (const auto seen = known_.find(node); seen != known_.end()) return seen->second;
    const std::optional<std::string> text = Text(node);
    const std::optional<std::size_t> number =
        text ? std::optional(numbers_.try_emplace(*text, numbers_.size()).first->second)
             : std::nullopt;
    if (!node->items.empty() || node->text.size() > kShort) known_.emplace(node, number);
    return number;
  }

 private:
  static constexpr std::size_t kShort = 32;  // bytes; copying these is cheaper than caching

  // Returns equal texts for equal keys, and only for these.
  std::optional<std::string> Text(const Node* node) {
    if (const auto whole = WholeNumber(node)) return "i" + std::to_string(*whole);
    switch (node->kind) {
      case Kind::kByteArray:
      case Kind::kList:
      case Kind::kSet:
      case Kind::kDict:
        return std::nullopt;
      case Kind::kNone:
        return "n";
      case Kind::kString:
        return "s" + node->text;
      case Kind::kBytes:
        return "b" + node->text;
      case Kind::kLong:
        return "l" + node->text;
      case Kind::kGlobal:
        return "g" + node->text;
      case Kind::kTuple:
      case Kind::kSize:
      case Kind::kFrozenSet:
        return OfItems(*node);
      case Kind::kFloat:
        if (!std::isnan(node->real))
          return "f" + std::to_string(std::bit_cast<std::uint64_t>(node->real));
        [[fallthrough]];
      default:
        return "@" + std::to_string(reinterpret_cast<std::uintptr_t>(node));
    }
  }

  std::optional<std::string> OfItems(const Node& node) {
    std::vector<std::size_t> items;
    for (const Node* item : node.items) {
      const std::optional<std::size_t> number = (*this)(item);
      if (!number) return std::nullopt;
      items.push_back(*number);
    }
    const bool ordered = node.kind != Kind::kFrozenSet;
    if (!ordered) std::sort(items.begin(), items.end());
    std::string text = ordered ? "(" : "{";
    for (const std::size_t item : items) text += std::to_string(item) + ",";
    return text;
  }

  std::unordered_map<const Node*, std::optional<std::size_t>> known_;  // large ones only
  std::unordered_map<std::string, std::size_t> numbers_;               // by text
};

std::string Shortened(const std::string& text) {
  constexpr std::size_t kShown = 120;
  return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
}

std::string Shown(const Node* key) {
  if (key->is_string()) return "\"" + Shortened(key->text) + "\"";
  if (key->kind == Kind::kFloat) return std::to_string(key->real);
  if (const auto whole = WholeNumber(key)) return std::to_string(*whole);
  return Describe(key);
}

// Checks that all nodes can be keys of a dict and differ. \param every  2 if values follow keys
// \param noun, whole  "key" of a "dict"
Status CheckDistinct(const std::vector<const Node*>& nodes, std::size_t every,
                     std::string_view noun, std::string_view whole, Keys* keys) {
  // Nearly all keys are strings, and some are numbers.
  std::unordered_set<std::string_view> texts;
  std::unordered_set<std::int64_t> wholes;
  std::unordered_set<std::size_t> others;
  texts.reserve(nodes.size() / every);
  for (std::size_t i = 0; i < nodes.size(); i += every) {
    const Node* node = nodes[i];
    bool fresh = true;
    if (node->is_string()) {
      fresh = texts.insert(node->text).second;
    } else if (const auto number = WholeNumber(node)) {
      fresh = wholes.insert(*number).second;
    } else {
      const std::optional<std::size_t> key = (*keys)(node);
      if (!key) {
        return Fail(Errc::kBadInput,
                    std::string(noun).append(" of a ").append(whole).append(" is "),
                    Describe(node));
      }
      fresh = others.insert(*key).second;
    }
    if (!fresh) {
      return Fail(Errc::kBadInput, std::string(noun)
                                       .append(" ")
                                       .append(Shown(node))
                                       .append(" appears twice in a ")
                                       .append(whole));
    }
  }
  return {};
}

Status CheckItems(const Node& node, Keys* keys) {
  if (node.items.empty()) return {};
  if (node.kind == Kind::kDict) return CheckDistinct(node.items, 2, "key", "dict", keys);
  if (node.kind == Kind::kSet || node.kind == Kind::kFrozenSet) {
    return CheckDistinct(node.items, 1, "item", "set", keys);
  }
  return {};
}

}  // namespace

Status CheckGraph(const Node* root) {
  std::unordered_map<const Node*, std::uint16_t> heights;
  Keys keys;
  std::vector<Frame> path = {Frame{root}};
  heights[root] = kOpen;
  while (!path.empty()) {
    Frame& frame = path.back();
    bool end = IsLeaf(*frame.node);
    const Node* child = end ? nullptr : Child(*frame.node, frame.next++, end);
    if (end) {
      SW_TRY(CheckItems(*frame.node, &keys));
      heights[frame.node] = static_cast<std::uint16_t>(frame.height);
      const std::uint64_t height = frame.height;
      path.pop_back();
      if (!path.empty()) path.back().height = std::max(path.back().height, height + 1);
      continue;
    }
    if (child == nullptr) continue;
    std::uint16_t leaf = 1;
    std::uint16_t& below = IsLeaf(*child) ? leaf : heights[child];
    if (below == kOpen) {
      return Fail(Errc::kUnsupported, "object graph contains itself: ", Describe(child));
    }
    if (path.size() + std::max<std::uint64_t>(below, 1) > limits::kPickleDepth) {
      return Fail(Errc::kLimit, "nesting deeper than ", limits::kPickleDepth);
    }
    if (below == kUnseen) {
      below = kOpen;
      path.push_back(Frame{child});
    } else {
      frame.height = std::max<std::uint64_t>(frame.height, below + 1U);
    }
  }
  return {};
}

}  // namespace shardwright::pickle
