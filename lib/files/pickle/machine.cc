// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "files/pickle/machine_internal.h"
#include "files/pickle/opcodes_internal.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

using Tag = Value::Tag;

Machine::Machine(std::string_view pickle, std::uint64_t most) : pickle_(pickle) {
  graph_.arena = std::make_shared<Arena>();
  budget_ = std::min(most, std::max(kGraphBytesFloor, kGraphBytesPerByte * pickle.size()));
}

Result<Graph> Machine::Run() {
  if (pickle_.size() > limits::kPickleBytes) {
    return Fail(Errc::kLimit, "pickle of ", pickle_.size(), " bytes, at most ",
                limits::kPickleBytes, " are read");
  }
  if (pickle_.empty() || static_cast<std::uint8_t>(pickle_[0]) != op::kProto) {
    return Bad("not a pickle of protocol 2 or later");
  }
  const std::array<Handler, 256>& handlers = Handlers();
  while (!stopped_) {
    op_at_ = at_;
    if (!Has(1)) return Bad("pickle ends without STOP");
    const auto code = static_cast<std::uint8_t>(pickle_[at_++]);
    if (Status done = (this->*handlers[code])(); !done) [[unlikely]] {
      return tl::unexpected<Error>(std::move(done).error());
    }
    if (op_at_ < frame_end_ && at_ > frame_end_) return Bad("operand beyond the end of its frame");
  }
  if (at_ != pickle_.size()) {
    return Bad(std::to_string(pickle_.size() - at_) + " bytes after STOP");
  }
  SW_TRY(CheckGraph(graph_.root));
  return std::move(graph_);
}

tl::unexpected<Error> Machine::Bad(std::string message) const {
  return tl::unexpected<Error>(Located(Error{Errc::kBadInput, std::move(message)}));
}

tl::unexpected<Error> Machine::Unsupported(std::string message) const {
  return tl::unexpected<Error>(Located(Error{Errc::kUnsupported, std::move(message)}));
}

tl::unexpected<Error> Machine::Truncated() const { return Bad("pickle ends inside an operand"); }

Error Machine::Located(Error error) const {
  error.message = "byte " + std::to_string(op_at_) + ": " + error.message;
  return error;
}

std::uint64_t Machine::Fixed(unsigned bytes) {
  std::uint64_t number = 0;
  for (unsigned i = 0; i < bytes; ++i) {
    number |= std::uint64_t{static_cast<std::uint8_t>(pickle_[at_ + i])} << (8 * i);
  }
  at_ += bytes;
  return number;
}

Result<std::string_view> Machine::Take(unsigned length_bytes) {
  if (!Has(length_bytes)) return Truncated();
  const std::uint64_t length = Fixed(length_bytes);
  if (!Has(length)) return Truncated();
  const std::string_view text = pickle_.substr(at_, length);
  at_ += length;
  return text;
}

Result<std::string_view> Machine::Line() {
  const std::string_view rest = pickle_.substr(at_, limits::kNameBytes + 1);
  const std::size_t end = rest.find('\n');
  if (end == std::string_view::npos) return Bad("unterminated class name");
  at_ += end + 1;
  return rest.substr(0, end);
}

Status Machine::Push(Value value) {
  if (stack_.size() == stack_.capacity()) SW_TRY(Charge(stack_.size() * sizeof(Value)));
  stack_.push_back(value);
  return {};
}

Status Machine::PushNode(Node* node) {
  Value value;
  value.tag = Tag::kNode;
  value.node = node;
  return Push(value);
}

Status Machine::Need(std::size_t count) const {
  if (above_mark() < count) return Bad("stack underflow");
  return {};
}

Value Machine::Pop() {
  const Value value = stack_.back();
  stack_.pop_back();
  return value;
}

Result<std::size_t> Machine::PopMark() {
  if (marks_.empty()) return Bad("MARK missing");
  const std::size_t first = marks_.back();
  marks_.pop_back();
  return first;
}

Status Machine::Charge(std::uint64_t bytes) {
  if (bytes > budget_) {
    return tl::unexpected<Error>(Located(
        Error{Errc::kLimit, "object graph takes more than " + std::to_string(kGraphBytesPerByte) +
                                " bytes per byte of its pickle"}));
  }
  budget_ -= bytes;
  return {};
}

Result<Node*> Machine::NewNode(Kind kind) {
  SW_TRY(Charge(sizeof(Node)));
  if (graph_.arena->node_count() >= limits::kPickleNodes) {
    return tl::unexpected<Error>(Located(
        Error{Errc::kLimit, "more than " + std::to_string(limits::kPickleNodes) + " objects"}));
  }
  return graph_.arena->New(kind);
}

Status Machine::ToNodes(Args values, std::vector<const Node*>& out) {
  SW_TRY(Charge(values.size() * kItemBytes));
  const std::size_t needed = out.size() + values.size();
  if (needed > out.capacity()) out.reserve(std::max(needed, 2 * out.capacity()));
  for (const Value& value : values) {
    SW_TRY_ASSIGN(const Node* node, ToNode(value));
    out.push_back(node);
  }
  return {};
}

Result<const Node*> Machine::ToNode(const Value& value) {
  switch (value.tag) {
    case Tag::kNone:
      return graph_.arena->None();
    case Tag::kBool:
      return graph_.arena->Bool(value.integer != 0);
    case Tag::kNode:
      return value.node;
    case Tag::kInt: {
      const bool small = value.integer >= 0 && value.integer < 256;
      if (small && small_ints_[static_cast<std::size_t>(value.integer)] != nullptr) {
        return small_ints_[static_cast<std::size_t>(value.integer)];
      }
      SW_TRY_ASSIGN(Node * node, NewNode(Kind::kInt));
      node->integer = value.integer;
      if (small) small_ints_[static_cast<std::size_t>(value.integer)] = node;
      return node;
    }
    case Tag::kFloat: {
      SW_TRY_ASSIGN(Node * node, NewNode(Kind::kFloat));
      node->real = value.real;
      return node;
    }
    case Tag::kString: {
      StringSlot& slot = strings_[value.slot];
      if (slot.node == nullptr) {
        SW_TRY(Charge(slot.text.size()));
        SW_TRY_ASSIGN(slot.node, NewNode(Kind::kString));
        slot.node->text = slot.text;
      }
      return slot.node;
    }
    case Tag::kGlobal: {
      GlobalSlot& slot = globals_[value.slot];
      if (slot.node == nullptr) {
        SW_TRY_ASSIGN(slot.node, NewNode(Kind::kGlobal));
        slot.node->text = slot.meaning.dotted;
      }
      return slot.node;
    }
    case Tag::kTuple: {
      // The depth of tuples is limited when they are made, so this recursion is limited too.
      TupleSlot& slot = tuples_[value.slot];
      if (slot.node == nullptr) {
        SW_TRY_ASSIGN(Node * node, NewNode(Kind::kTuple));
        SW_TRY(ToNodes(TupleItems(value), node->items));
        slot.node = node;
      }
      return slot.node;
    }
    case Tag::kStorage:
      return Unsupported("a storage that is not part of a tensor");
    case Tag::kUnset:
      break;
  }
  return Bad("memo entry is read before it is written");
}

Machine::Args Machine::TupleItems(const Value& tuple) const {
  const TupleSlot& slot = tuples_[tuple.slot];
  return Args(pool_).subspan(slot.first, slot.count);
}

Result<Value> Machine::MakeTuple(std::size_t first_on_stack) {
  const Args items = Args(stack_).subspan(first_on_stack);
  SW_TRY(Charge(sizeof(TupleSlot) + items.size_bytes()));
  if (items.size() > 0xFFFFFFFFU) return Bad("tuple of more than 2^32 items");
  TupleSlot slot;
  slot.first = pool_.size();
  slot.count = static_cast<std::uint32_t>(items.size());
  for (const Value& item : items) {
    if (item.tag == Tag::kTuple) slot.depth = std::max(slot.depth, tuples_[item.slot].depth + 1);
  }
  if (slot.depth > limits::kPickleDepth) {
    return tl::unexpected<Error>(Located(
        Error{Errc::kLimit, "nesting deeper than " + std::to_string(limits::kPickleDepth)}));
  }
  pool_.insert(pool_.end(), items.begin(), items.end());
  stack_.resize(first_on_stack);
  Value value;
  value.tag = Tag::kTuple;
  value.slot = tuples_.size();
  tuples_.push_back(slot);
  return value;
}

bool Machine::IsKnown(const Value& value, Known known) const {
  return value.tag == Tag::kGlobal && globals_[value.slot].meaning.known == known;
}

std::string Machine::Describe(const Value& value) const {
  switch (value.tag) {
    case Tag::kNone:
      return "None";
    case Tag::kBool:
      return "bool";
    case Tag::kInt:
      return "integer";
    case Tag::kFloat:
      return "float";
    case Tag::kString:
      return "string";
    case Tag::kTuple:
      return "tuple";
    case Tag::kGlobal:
      return "class " + globals_[value.slot].meaning.dotted;
    case Tag::kStorage:
      return "storage";
    case Tag::kNode:
      return pickle::Describe(value.node);
    case Tag::kUnset:
      break;
  }
  return "nothing";
}

Result<Graph> Load(std::string_view pickle, std::uint64_t most) {
  return Machine(pickle, most).Run();
}

}  // namespace shardwright::pickle
