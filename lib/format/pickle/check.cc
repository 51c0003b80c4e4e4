#include <algorithm>
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

bool IsHashable(const Node* node) {
  return node->kind != Kind::kList && node->kind != Kind::kDict && node->kind != Kind::kSet &&
         node->kind != Kind::kByteArray;
}

std::string Shortened(const std::string& text) {
  constexpr std::size_t kShown = 120;
  return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
}

tl::unexpected<Error> TwiceInDict(const Node* key) {
  const std::string name =
      key->is_string() ? "\"" + Shortened(key->text) + "\"" : std::to_string(key->integer);
  return Fail(Errc::kBadInput, "key " + name + " is twice in a dict");
}

Status CheckKeys(const Node& dict) {
  std::unordered_set<std::string_view> texts;
  std::unordered_set<std::int64_t> numbers;
  texts.reserve(dict.entry_count());
  for (std::size_t i = 0; i < dict.entry_count(); ++i) {
    const Node* key = dict.key(i);
    if (!IsHashable(key)) return Fail(Errc::kBadInput, "key of a dict is " + Describe(key));
    const bool number = key->kind == Kind::kInt || key->kind == Kind::kBool;
    if (key->is_string() && !texts.insert(key->text).second) return TwiceInDict(key);
    if (number && !numbers.insert(key->integer).second) return TwiceInDict(key);
  }
  return {};
}

Status CheckItems(const Node& node) {
  if (node.kind == Kind::kDict && !node.items.empty()) return CheckKeys(node);
  if (node.kind == Kind::kSet || node.kind == Kind::kFrozenSet) {
    for (const Node* item : node.items) {
      if (!IsHashable(item)) return Fail(Errc::kBadInput, "item of a set is " + Describe(item));
    }
  }
  return {};
}

}  // namespace

Status CheckGraph(const Node* root) {
  std::unordered_map<const Node*, std::uint16_t> heights;
  std::vector<Frame> path = {Frame{root}};
  heights[root] = kOpen;
  while (!path.empty()) {
    Frame& frame = path.back();
    bool end = IsLeaf(*frame.node);
    const Node* child = end ? nullptr : Child(*frame.node, frame.next++, end);
    if (end) {
      SW_TRY(CheckItems(*frame.node));
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
