#include <algorithm>
#include <cmath>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/limits.h"
#include "format/pickle/reader.h"

namespace shardwright::pickle {

namespace {

constexpr std::uint16_t kUnseen = 0;
constexpr std::uint16_t kOpen = 0xFFFF;
static_assert(limits::kPickleDepth < kOpen);

struct Frame {
  const Node* node = nullptr;
  std::size_t next = 0;      // child to look at
  std::uint64_t height = 1;  // levels from here down, itself included
};

// The children of a node, one after another; null where there is none.
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

// Most nodes have nothing below them; what is remembered of every other node costs time.
bool IsLeaf(const Node& node) {
  return node.kind <= Kind::kByteArray || node.kind == Kind::kGlobal ||
         (node.kind == Kind::kTensor && node.tensor && node.tensor->attributes == nullptr);
}

// What a dict takes for a key: nothing that can change, and no tuple of such. A tuple is looked at
// once, however often it is there. \pre no cycles
class Hashable {
 public:
  bool operator()(const Node* node) {
    if (node->kind != Kind::kTuple) {
      return node->kind != Kind::kList && node->kind != Kind::kDict && node->kind != Kind::kSet &&
             node->kind != Kind::kByteArray;
    }
    if (const auto seen = tuples_.find(node); seen != tuples_.end()) return seen->second;
    const bool all = std::all_of(node->items.begin(), node->items.end(),
                                 [&](const Node* item) { return (*this)(item); });
    tuples_.emplace(node, all);
    return all;
  }

 private:
  std::unordered_map<const Node*, bool> tuples_;
};

std::string Shortened(const std::string& text) {
  constexpr std::size_t kShown = 120;
  return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
}

tl::unexpected<Error> TwiceInDict(const Node* key) {
  const std::string name = key->is_string()            ? "\"" + Shortened(key->text) + "\""
                           : key->kind == Kind::kFloat ? std::to_string(key->real)
                           : key->kind == Kind::kBytes ? Describe(key)
                                                       : std::to_string(key->integer);
  return Fail(Errc::kBadInput, "key " + name + " is twice in a dict");
}

// A float that is a whole number is the same key as that number.
std::optional<std::int64_t> WholeNumber(double real) {
  constexpr double kBeyond = 9223372036854775808.0;
  if (!(real >= -kBeyond && real < kBeyond) || real != std::floor(real)) return std::nullopt;
  return static_cast<std::int64_t>(real);
}

Status CheckKeys(const Node& dict, Hashable* hashable) {
  std::unordered_set<std::string_view> texts;
  std::unordered_set<std::string_view> bytes;
  std::unordered_set<std::int64_t> numbers;
  std::unordered_set<double> reals;
  texts.reserve(dict.entry_count());
  for (std::size_t i = 0; i < dict.entry_count(); ++i) {
    const Node* key = dict.key(i);
    if (!(*hashable)(key)) return Fail(Errc::kBadInput, "key of a dict is " + Describe(key));
    std::optional<std::int64_t> number;
    if (key->kind == Kind::kInt || key->kind == Kind::kBool) number = key->integer;
    if (key->kind == Kind::kFloat) number = WholeNumber(key->real);
    const bool fresh = key->is_string()            ? texts.insert(key->text).second
                       : key->kind == Kind::kBytes ? bytes.insert(key->text).second
                       : number                    ? numbers.insert(*number).second
                       : key->kind == Kind::kFloat ? reals.insert(key->real).second
                                                   : true;
    if (!fresh) return TwiceInDict(key);
  }
  return {};
}

Status CheckItems(const Node& node, Hashable* hashable) {
  if (node.kind == Kind::kDict && !node.items.empty()) return CheckKeys(node, hashable);
  if (node.kind == Kind::kSet || node.kind == Kind::kFrozenSet) {
    for (const Node* item : node.items) {
      if (!(*hashable)(item)) return Fail(Errc::kBadInput, "item of a set is " + Describe(item));
    }
  }
  return {};
}

}  // namespace

Status CheckGraph(const Node* root) {
  std::unordered_map<const Node*, std::uint16_t> heights;
  Hashable hashable;
  std::vector<Frame> path = {Frame{root}};
  heights[root] = kOpen;
  while (!path.empty()) {
    Frame& frame = path.back();
    bool end = IsLeaf(*frame.node);
    const Node* child = end ? nullptr : Child(*frame.node, frame.next++, end);
    if (end) {
      SW_TRY(CheckItems(*frame.node, &hashable));
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
      return Fail(Errc::kUnsupported, "object graph contains itself: " + Describe(child));
    }
    if (path.size() + std::max<std::uint64_t>(below, 1) > limits::kPickleDepth) {
      return Fail(Errc::kLimit, "nesting deeper than " + std::to_string(limits::kPickleDepth));
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
