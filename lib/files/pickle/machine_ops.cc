// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cstdio>

#include "files/pickle/machine_internal.h"
#include "files/pickle/opcodes_internal.h"
#include "files/utf8.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

using Tag = Value::Tag;

const std::array<Machine::Handler, 256>& Machine::Handlers() {
  static constexpr std::array<Handler, 256> kHandlers = [] {
    std::array<Handler, 256> table{};
    table.fill(&Machine::OpRefused);
    table[op::kProto] = &Machine::OpProto;
    table[op::kFrame] = &Machine::OpFrame;
    table[op::kStop] = &Machine::OpStop;
    table[op::kMark] = &Machine::OpMark;
    table[op::kPop] = &Machine::OpPop;
    table[op::kPopMark] = &Machine::OpPopMark;
    table[op::kDup] = &Machine::OpDup;
    table[op::kNone] = &Machine::OpNone;
    table[op::kNewTrue] = &Machine::OpTrue;
    table[op::kNewFalse] = &Machine::OpFalse;
    table[op::kBinInt] = &Machine::OpBinInt;
    table[op::kBinInt1] = &Machine::OpBinInt1;
    table[op::kBinInt2] = &Machine::OpBinInt2;
    table[op::kLong1] = &Machine::OpLong1;
    table[op::kLong4] = &Machine::OpLong4;
    table[op::kBinFloat] = &Machine::OpBinFloat;
    table[op::kShortBinString] = &Machine::OpShortBinString;
    table[op::kBinString] = &Machine::OpBinString;
    table[op::kShortBinUnicode] = &Machine::OpShortBinUnicode;
    table[op::kBinUnicode] = &Machine::OpBinUnicode;
    table[op::kBinUnicode8] = &Machine::OpBinUnicode8;
    table[op::kShortBinBytes] = &Machine::OpShortBinBytes;
    table[op::kBinBytes] = &Machine::OpBinBytes;
    table[op::kBinBytes8] = &Machine::OpBinBytes8;
    table[op::kByteArray8] = &Machine::OpByteArray8;
    table[op::kEmptyTuple] = &Machine::OpEmptyTuple;
    table[op::kTuple] = &Machine::OpTuple;
    table[op::kTuple1] = &Machine::OpTuple1;
    table[op::kTuple2] = &Machine::OpTuple2;
    table[op::kTuple3] = &Machine::OpTuple3;
    table[op::kEmptyList] = &Machine::OpEmptyList;
    table[op::kEmptyDict] = &Machine::OpEmptyDict;
    table[op::kEmptySet] = &Machine::OpEmptySet;
    table[op::kFrozenSet] = &Machine::OpFrozenSet;
    table[op::kAppend] = &Machine::OpAppend;
    table[op::kAppends] = &Machine::OpAppends;
    table[op::kSetItem] = &Machine::OpSetItem;
    table[op::kSetItems] = &Machine::OpSetItems;
    table[op::kAddItems] = &Machine::OpAddItems;
    table[op::kBinPut] = &Machine::OpBinPut;
    table[op::kLongBinPut] = &Machine::OpLongBinPut;
    table[op::kMemoize] = &Machine::OpMemoize;
    table[op::kBinGet] = &Machine::OpBinGet;
    table[op::kLongBinGet] = &Machine::OpLongBinGet;
    table[op::kGlobal] = &Machine::OpGlobal;
    table[op::kStackGlobal] = &Machine::OpStackGlobal;
    table[op::kReduce] = &Machine::OpReduce;
    table[op::kNewObj] = &Machine::OpNewObj;
    table[op::kNewObjEx] = &Machine::OpNewObjEx;
    table[op::kBuild] = &Machine::OpBuild;
    table[op::kBinPersId] = &Machine::OpBinPersId;
    return table;
  }();
  return kHandlers;
}

Status Machine::OpRefused() {
  std::array<char, 8> hex{};
  std::snprintf(hex.data(), hex.size(), "0x%02x", static_cast<std::uint8_t>(pickle_[op_at_]));
  return Bad("unsupported opcode " + std::string(hex.data()));
}

Status Machine::OpProto() {
  if (!Has(1)) return Truncated();
  const std::uint64_t protocol = Fixed(1);
  if (op_at_ != 0) return Bad("PROTO inside a pickle");
  protocol_ = static_cast<unsigned>(protocol);
  if (protocol < 2 || protocol > 5) {
    return Bad("pickle protocol 2 to 5 expected, found " + std::to_string(protocol));
  }
  return {};
}

Status Machine::OpFrame() {
  if (!Has(8)) return Truncated();
  const std::uint64_t bytes = Fixed(8);
  if (op_at_ < frame_end_) return Bad("FRAME inside a frame");
  if (!Has(bytes)) return Truncated();
  frame_end_ = at_ + bytes;
  return {};
}

Status Machine::OpStop() {
  if (!marks_.empty()) return Bad("STOP after an open MARK");
  if (stack_.size() != 1) {
    return Bad("STOP with " + std::to_string(stack_.size()) + " values on the stack");
  }
  SW_TRY_ASSIGN(graph_.root, ToNode(stack_.back()));
  stopped_ = true;
  return {};
}

Status Machine::OpMark() {
  if (marks_.size() == marks_.capacity()) SW_TRY(Charge(marks_.size() * sizeof(std::size_t)));
  marks_.push_back(stack_.size());
  return {};
}

Status Machine::OpPop() {
  if (above_mark() == 0) return OpPopMark();
  const Value value = Pop();
  // A pickle that drops a call's result needs its side effects, which inert records cannot have.
  if (value.tag == Tag::kNode && value.node->kind == Kind::kObject) {
    return Unsupported("the result of a call is dropped: " + Describe(value));
  }
  return {};
}

Status Machine::OpPopMark() {
  SW_TRY_ASSIGN(const std::size_t first, PopMark());
  for (std::size_t i = first; i < stack_.size(); ++i) {
    if (stack_[i].tag == Tag::kNode && stack_[i].node->kind == Kind::kObject) {
      return Unsupported("the result of a call is dropped: " + Describe(stack_[i]));
    }
  }
  stack_.resize(first);
  return {};
}

Status Machine::OpDup() {
  SW_TRY(Need(1));
  return Push(Value(stack_.back()));
}

namespace {

Value Integer(std::int64_t number, Tag tag = Tag::kInt) {
  Value value;
  value.tag = tag;
  value.integer = number;
  return value;
}

}  // namespace

Status Machine::OpNone() { return Push(Integer(0, Tag::kNone)); }
Status Machine::OpTrue() { return Push(Integer(1, Tag::kBool)); }
Status Machine::OpFalse() { return Push(Integer(0, Tag::kBool)); }

Status Machine::OpBinInt() {
  if (!Has(4)) return Truncated();
  return Push(Integer(static_cast<std::int32_t>(Fixed(4))));
}

Status Machine::OpBinInt1() {
  if (!Has(1)) return Truncated();
  return Push(Integer(static_cast<std::int64_t>(Fixed(1))));
}

Status Machine::OpBinInt2() {
  if (!Has(2)) return Truncated();
  return Push(Integer(static_cast<std::int64_t>(Fixed(2))));
}

Status Machine::OpLong1() {
  SW_TRY_ASSIGN(const std::string_view digits, Take(1));
  return PushInteger(digits);
}

Status Machine::OpLong4() {
  SW_TRY_ASSIGN(const std::string_view digits, Take(4));
  return PushInteger(digits);
}

Status Machine::PushInteger(std::string_view digits) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(digits[i]); };
  // The last byte is redundant if it only repeats the sign of the byte before it.
  while (digits.size() > 1) {
    const std::uint8_t fill = (byte(digits.size() - 2) & 0x80U) != 0 ? 0xFF : 0;
    if (byte(digits.size() - 1) != fill) break;
    digits.remove_suffix(1);
  }
  if (digits.size() > 8) return PushText(Kind::kLong, digits);
  std::uint64_t number = 0;
  if (!digits.empty() && (byte(digits.size() - 1) & 0x80U) != 0) number = ~std::uint64_t{0};
  for (std::size_t i = digits.size(); i > 0; --i) number = (number << 8) | byte(i - 1);
  return Push(Integer(static_cast<std::int64_t>(number)));
}

Status Machine::OpBinFloat() {
  if (!Has(8)) return Truncated();
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    bits = (bits << 8) | static_cast<std::uint8_t>(pickle_[at_ + i]);
  }
  at_ += 8;
  Value value;
  value.tag = Tag::kFloat;
  value.real = std::bit_cast<double>(bits);
  return Push(value);
}

Status Machine::PushString(std::string_view text) {
  if (!IsUtf8(text, Surrogates::kAllow)) return Bad("string is not UTF-8");
  if (strings_.size() == strings_.capacity()) {
    SW_TRY(Charge(strings_.size() * sizeof(StringSlot)));
  }
  Value value;
  value.tag = Tag::kString;
  value.slot = strings_.size();
  strings_.push_back(StringSlot{text, nullptr});
  return Push(value);
}

Status Machine::PushText(Kind kind, std::string_view text) {
  SW_TRY(Charge(text.size()));
  SW_TRY_ASSIGN(Node * node, NewNode(kind));
  node->text = text;
  return PushNode(node);
}

// Reads Python 2 strings as ASCII text. Other bytes have no known encoding.
Status Machine::OpShortBinString() {
  SW_TRY_ASSIGN(const std::string_view text, Take(1));
  for (char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) return Unsupported("Python 2 string is not ASCII");
  }
  return PushString(text);
}

Status Machine::OpBinString() {
  SW_TRY_ASSIGN(const std::string_view text, Take(4));
  for (char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) return Unsupported("Python 2 string is not ASCII");
  }
  return PushString(text);
}

Status Machine::OpShortBinUnicode() {
  SW_TRY_ASSIGN(const std::string_view text, Take(1));
  return PushString(text);
}

Status Machine::OpBinUnicode() {
  SW_TRY_ASSIGN(const std::string_view text, Take(4));
  return PushString(text);
}

Status Machine::OpBinUnicode8() {
  SW_TRY_ASSIGN(const std::string_view text, Take(8));
  return PushString(text);
}

Status Machine::OpShortBinBytes() {
  SW_TRY_ASSIGN(const std::string_view text, Take(1));
  return PushText(Kind::kBytes, text);
}

Status Machine::OpBinBytes() {
  SW_TRY_ASSIGN(const std::string_view text, Take(4));
  return PushText(Kind::kBytes, text);
}

Status Machine::OpBinBytes8() {
  SW_TRY_ASSIGN(const std::string_view text, Take(8));
  return PushText(Kind::kBytes, text);
}

Status Machine::OpByteArray8() {
  SW_TRY_ASSIGN(const std::string_view text, Take(8));
  return PushText(Kind::kByteArray, text);
}

Status Machine::TakeTuple(std::size_t count) {
  SW_TRY(Need(count));
  SW_TRY_ASSIGN(const Value tuple, MakeTuple(stack_.size() - count));
  return Push(tuple);
}

Status Machine::OpEmptyTuple() { return TakeTuple(0); }
Status Machine::OpTuple1() { return TakeTuple(1); }
Status Machine::OpTuple2() { return TakeTuple(2); }
Status Machine::OpTuple3() { return TakeTuple(3); }

Status Machine::OpTuple() {
  SW_TRY_ASSIGN(const std::size_t first, PopMark());
  return TakeTuple(stack_.size() - first);
}

Status Machine::OpEmptyList() {
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kList));
  return PushNode(node);
}

Status Machine::OpEmptyDict() {
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kDict));
  return PushNode(node);
}

Status Machine::OpEmptySet() {
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kSet));
  return PushNode(node);
}

Status Machine::OpFrozenSet() {
  SW_TRY_ASSIGN(const std::size_t first, PopMark());
  SW_TRY_ASSIGN(Node * node, NewNode(Kind::kFrozenSet));
  SW_TRY(ToNodes(Args(stack_).subspan(first), node->items));
  stack_.resize(first);
  return PushNode(node);
}

// Appends items to a list or an object. Appending to a class would change all of its objects.
Status Machine::AppendTo(const Value& target, Args items) {
  Node* node = target.tag == Tag::kNode ? target.node : nullptr;
  if (node != nullptr && node->kind == Kind::kList) return ToNodes(items, node->items);
  if (node != nullptr && node->kind == Kind::kObject && !IsInnerClass(node)) {
    if (node->state != nullptr || !node->dict_items.empty()) {
      return Unsupported("items for an object that already has state: " + Describe(target));
    }
    return ToNodes(items, node->list_items);
  }
  return Bad("APPEND to " + Describe(target));
}

Status Machine::SetIn(const Value& target, Args entries) {
  Node* node = target.tag == Tag::kNode ? target.node : nullptr;
  if (entries.size() % 2 != 0) return Bad("SETITEMS with a key without a value");
  if (node != nullptr && node->kind == Kind::kDict) return ToNodes(entries, node->items);
  if (node != nullptr && node->kind == Kind::kObject && !IsInnerClass(node)) {
    if (node->state != nullptr) {
      return Unsupported("items for an object that already has state: " + Describe(target));
    }
    return ToNodes(entries, node->dict_items);
  }
  return Bad("SETITEM on " + Describe(target));
}

Status Machine::AddTo(const Value& target, Args items) {
  if (target.tag == Tag::kNode && target.node->kind == Kind::kSet) {
    return ToNodes(items, target.node->items);
  }
  return Bad("ADDITEMS to " + Describe(target));
}

Status Machine::OpAppend() {
  SW_TRY(Need(2));
  const Value item = Pop();
  return AppendTo(stack_.back(), Args(&item, 1));
}

Status Machine::OpSetItem() {
  SW_TRY(Need(3));
  const std::array<Value, 2> entry = {stack_[stack_.size() - 2], stack_.back()};
  stack_.resize(stack_.size() - 2);
  return SetIn(stack_.back(), entry);
}

Status Machine::OpAppends() {
  SW_TRY_ASSIGN(const std::size_t first, PopMark());
  if (first <= floor()) return Bad("stack underflow");
  SW_TRY(AppendTo(stack_[first - 1], Args(stack_).subspan(first)));
  stack_.resize(first);
  return {};
}

Status Machine::OpSetItems() {
  SW_TRY_ASSIGN(const std::size_t first, PopMark());
  if (first <= floor()) return Bad("stack underflow");
  SW_TRY(SetIn(stack_[first - 1], Args(stack_).subspan(first)));
  stack_.resize(first);
  return {};
}

Status Machine::OpAddItems() {
  SW_TRY_ASSIGN(const std::size_t first, PopMark());
  if (first <= floor()) return Bad("stack underflow");
  SW_TRY(AddTo(stack_[first - 1], Args(stack_).subspan(first)));
  stack_.resize(first);
  return {};
}

Status Machine::PutMemo(std::uint64_t index) {
  SW_TRY(Need(1));
  if (memo_count_ >= limits::kPickleMemoEntries) {
    return tl::unexpected<Error>(Located(Error{Errc::kLimit, "too many memo entries"}));
  }
  // Indexes are arbitrary, so large ones go to a map instead of growing the table.
  if (index > memo_.size() + 1024) {
    SW_TRY(Charge(4 * sizeof(Value)));
    if (sparse_memo_.insert_or_assign(index, stack_.back()).second) ++memo_count_;
    return {};
  }
  if (index >= memo_.size()) {
    if (index >= memo_.capacity()) SW_TRY(Charge((index + 1) * sizeof(Value)));
    memo_.resize(index + 1);
  }
  if (memo_[index].tag == Tag::kUnset && sparse_memo_.erase(index) == 0) ++memo_count_;
  memo_[index] = stack_.back();
  return {};
}

Status Machine::GetMemo(std::uint64_t index) {
  Value value;
  if (!sparse_memo_.empty() && sparse_memo_.contains(index)) {
    value = sparse_memo_.at(index);
  } else if (index < memo_.size()) {
    value = memo_[index];
  }
  if (value.tag == Tag::kUnset) {
    return Bad("memo entry " + std::to_string(index) + " is read before it is written");
  }
  return Push(value);
}

Status Machine::OpBinPut() {
  if (!Has(1)) return Truncated();
  return PutMemo(Fixed(1));
}

Status Machine::OpLongBinPut() {
  if (!Has(4)) return Truncated();
  return PutMemo(Fixed(4));
}

// Numbers entries as Python does: the next index is the number of entries so far.
Status Machine::OpMemoize() { return PutMemo(memo_count_); }

Status Machine::OpBinGet() {
  if (!Has(1)) return Truncated();
  return GetMemo(Fixed(1));
}

Status Machine::OpLongBinGet() {
  if (!Has(4)) return Truncated();
  return GetMemo(Fixed(4));
}

}  // namespace shardwright::pickle
