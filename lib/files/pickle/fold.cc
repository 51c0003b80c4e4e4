// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/fold.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "files/pickle/fold_internal.h"
#include "files/pickle/names_internal.h"
#include "files/pickle/opcodes_internal.h"
#include "files/utf8.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

namespace {

/// Memory limit of a fold's open values: the floor, or more for a large pickle.
constexpr std::uint64_t kOpenBytesFloor = std::uint64_t{64} << 20;
constexpr std::uint64_t kOpenBytesPerByte = 16;
constexpr std::uint64_t kBoxBytes = sizeof(Box) + 4 * sizeof(Cell);

}  // namespace

Status Folding::Run() {
  if (pickle_.size() > limits::kPickleBytes) {
    return Fail(Errc::kLimit, "pickle of ", pickle_.size(), " bytes, at most ",
                limits::kPickleBytes, " are read");
  }
  if (pickle_.empty() || static_cast<std::uint8_t>(pickle_[0]) != op::kProto) {
    return Bad("not a pickle of protocol 2 or later");
  }
  SW_TRY_ASSIGN(uses_, MemoUses::In(pickle_));
  memo_.resize(uses_.count());
  written_.resize(uses_.count());
  open_most_ = std::max(kOpenBytesFloor, kOpenBytesPerByte * pickle_.size());
  while (!stopped_) {
    op_at_ = at_;
    if (!Has(1)) return Bad("pickle ends without STOP");
    SW_TRY(Step(static_cast<std::uint8_t>(pickle_[at_++])));
  }
  if (at_ != pickle_.size()) {
    return Bad(std::to_string(pickle_.size() - at_) + " bytes after STOP");
  }
  return folder_.Root(stack_.back());
}

Result<std::uint64_t> Folding::Fixed(unsigned bytes) {
  if (!Has(bytes)) return Bad("pickle ends inside an operand");
  std::uint64_t number = 0;
  for (unsigned i = 0; i < bytes; ++i) {
    number |= std::uint64_t{static_cast<std::uint8_t>(pickle_[at_ + i])} << (8 * i);
  }
  at_ += bytes;
  return number;
}

Result<std::string_view> Folding::Take(unsigned length_bytes) {
  SW_TRY_ASSIGN(const std::uint64_t length, Fixed(length_bytes));
  if (!Has(length)) return Bad("pickle ends inside an operand");
  const std::string_view text = pickle_.substr(at_, length);
  at_ += length;
  return text;
}

Result<std::string_view> Folding::Line() {
  const std::string_view rest = pickle_.substr(at_, limits::kNameBytes + 1);
  const std::size_t end = rest.find('\n');
  if (end == std::string_view::npos) return Bad("unterminated class name");
  at_ += end + 1;
  return rest.substr(0, end);
}

Status Folding::Push(Cell cell) {
  const std::uint64_t open = pool_.open() * kBoxBytes + stack_.size() * sizeof(Cell);
  if (open > open_most_) {
    return Fail(Errc::kLimit, "byte ", op_at_, ": more than ", kOpenBytesPerByte,
                " bytes are open per byte of the pickle");
  }
  stack_.push_back(std::move(cell));
  return {};
}

Status Folding::PushInt(unsigned bytes) {
  SW_TRY_ASSIGN(const std::uint64_t number, Fixed(bytes));
  const auto value = static_cast<std::int64_t>(number);
  return Push(Cell::Int(bytes == 4 ? static_cast<std::int32_t>(number) : value));
}

Status Folding::PushLong(unsigned length_bytes) {
  SW_TRY_ASSIGN(const std::string_view digits, Take(length_bytes));
  // Folders use no larger integers, so these become bytes.
  if (digits.size() > 8) return Push(Cell::Text(digits, Cell::Tag::kBytes));
  const bool negative = !digits.empty() && (static_cast<std::uint8_t>(digits.back()) & 0x80U) != 0;
  std::uint64_t number = negative ? ~std::uint64_t{0} : 0;
  for (std::size_t i = digits.size(); i > 0; --i) {
    number = (number << 8) | static_cast<std::uint8_t>(digits[i - 1]);
  }
  return Push(Cell::Int(static_cast<std::int64_t>(number)));
}

Status Folding::PushReal() {
  if (!Has(8)) return Bad("pickle ends inside an operand");
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    bits = (bits << 8) | static_cast<std::uint8_t>(pickle_[at_ + i]);
  }
  at_ += 8;
  return Push(Cell::Real(std::bit_cast<double>(bits)));
}

Status Folding::PushText(unsigned length_bytes, Cell::Tag tag) {
  SW_TRY_ASSIGN(const std::string_view text, Take(length_bytes));
  if (tag == Cell::Tag::kText && !IsUtf8(text, Surrogates::kAllow)) {
    return Bad("string is not UTF-8");
  }
  return Push(Cell::Text(text, tag));
}

Status Folding::PushGlobal(std::string_view module, std::string_view name) {
  std::string key = std::string(module) + "\n" + std::string(name);
  auto found = globals_.find(key);
  if (found == globals_.end()) {
    Result<Meaning> meaning = Interpret(module, name, protocol_);
    if (!meaning) return Bad(meaning.error().message);
    if (meaning->known >= Known::kStorage) {
      return Fail(Errc::kUnsupported, "byte ", op_at_,
                  ": tensors and storages are not supported here: ", meaning->dotted);
    }
    names_.push_back(meaning->nested.empty() ? std::move(meaning->dotted)
                                             : meaning->dotted + "." + meaning->nested);
    found = globals_.emplace(std::move(key), names_.back()).first;
  }
  return Push(Cell::Text(found->second, Cell::Tag::kGlobal));
}

Status Folding::PushStackGlobal() {
  SW_TRY(Need(2));
  const Cell name = Pop();
  const Cell module = Pop();
  if (!module.is_text() || !name.is_text()) return Bad("STACK_GLOBAL without two strings");
  return PushGlobal(module.text(), name.text());
}

Status Folding::PushBox(Box::Kind kind) { return Push(Cell::Of(Open(kind))); }

Status Folding::Need(std::size_t count) const {
  const std::size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() - floor < count) return Bad("stack underflow");
  return {};
}

Cell Folding::Pop() {
  Cell cell = std::move(stack_.back());
  stack_.pop_back();
  return cell;
}

Result<std::size_t> Folding::PopMark() {
  if (marks_.empty()) return Bad("MARK missing");
  const std::size_t first = marks_.back();
  marks_.pop_back();
  return first;
}

Status Folding::Put(std::uint64_t index) {
  SW_TRY(Need(1));
  if (numbered_ && counted_) {
    return Fail(Errc::kUnsupported, "memo entries with and without numbers in one pickle");
  }
  if (const auto rank = uses_.RankOf(index)) {
    memo_[*rank] = stack_.back();
    written_[*rank] = true;
  }
  return {};
}

Status Folding::Get(std::uint64_t index) {
  const auto rank = uses_.RankOf(index);
  if (!rank || !written_[*rank]) {
    return Bad("memo entry " + std::to_string(index) + " is read before it is written");
  }
  return Push(memo_[*rank]);
}

Status Folding::StepRest(std::uint8_t code) {
  switch (code) {
    case op::kProto: {
      SW_TRY_ASSIGN(const std::uint64_t protocol, Fixed(1));
      if (op_at_ != 0) return Bad("PROTO inside a pickle");
      protocol_ = static_cast<unsigned>(protocol);
      if (protocol >= 2 && protocol <= 5) return {};
      return Bad("pickle protocol 2 to 5 expected, found " + std::to_string(protocol));
    }
    case op::kFrame: {
      SW_TRY_ASSIGN(const std::uint64_t bytes, Fixed(8));
      if (!Has(bytes)) return Bad("pickle ends inside an operand");
      return {};
    }
    case op::kStop:
      if (!marks_.empty()) return Bad("STOP after an open MARK");
      if (stack_.size() != 1) {
        return Bad("STOP with " + std::to_string(stack_.size()) + " values on the stack");
      }
      stopped_ = true;
      return {};
    case op::kPop:
      if (!marks_.empty() && marks_.back() == stack_.size()) {
        marks_.pop_back();
        return {};
      }
      SW_TRY(Need(1));
      stack_.pop_back();
      return {};
    case op::kPopMark: {
      SW_TRY_ASSIGN(const std::size_t first, PopMark());
      stack_.resize(first);
      return {};
    }
    case op::kDup:
      SW_TRY(Need(1));
      return Push(stack_.back());
    case op::kGlobal: {
      SW_TRY_ASSIGN(const std::string_view module, Line());
      SW_TRY_ASSIGN(const std::string_view name, Line());
      return PushGlobal(module, name);
    }
    default:
      return Bad("unsupported opcode " + std::to_string(code));
  }
}

Status Folding::Step(std::uint8_t code) {
  switch (code) {
    case op::kMark:
      marks_.push_back(stack_.size());
      if (marks_.size() * sizeof(std::size_t) > open_most_) return Bad("too many open MARKs");
      return {};
    case op::kMemoize:
      counted_ = true;
      return Put(memo_next_++);
    case op::kBinPut:
    case op::kLongBinPut: {
      numbered_ = true;
      SW_TRY_ASSIGN(const std::uint64_t index, Fixed(code == op::kBinPut ? 1 : 4));
      return Put(index);
    }
    case op::kBinGet:
    case op::kLongBinGet: {
      SW_TRY_ASSIGN(const std::uint64_t index, Fixed(code == op::kBinGet ? 1 : 4));
      return Get(index);
    }
    case op::kShortBinUnicode:
    case op::kShortBinString:
      return PushText(1, Cell::Tag::kText);
    case op::kBinUnicode:
    case op::kBinString:
      return PushText(4, Cell::Tag::kText);
    case op::kBinUnicode8:
      return PushText(8, Cell::Tag::kText);
    case op::kShortBinBytes:
      return PushText(1, Cell::Tag::kBytes);
    case op::kBinBytes:
      return PushText(4, Cell::Tag::kBytes);
    case op::kBinBytes8:
    case op::kByteArray8:
      return PushText(8, Cell::Tag::kBytes);
    case op::kBinInt1:
      return PushInt(1);
    case op::kBinInt2:
      return PushInt(2);
    case op::kBinInt:
      return PushInt(4);
    case op::kLong1:
      return PushLong(1);
    case op::kLong4:
      return PushLong(4);
    case op::kBinFloat:
      return PushReal();
    case op::kNone:
      return Push(Cell());
    case op::kNewTrue:
      return Push(Cell::Int(1, Cell::Tag::kBool));
    case op::kNewFalse:
      return Push(Cell::Int(0, Cell::Tag::kBool));
    case op::kEmptyTuple:
      return PushBox(Box::Kind::kTuple);
    case op::kEmptyList:
      return PushBox(Box::Kind::kList);
    case op::kEmptyDict:
      return PushBox(Box::Kind::kDict);
    case op::kEmptySet:
      return PushBox(Box::Kind::kSet);
    case op::kTuple1:
    case op::kTuple2:
    case op::kTuple3: {
      const std::size_t count = 1 + code - op::kTuple1;
      SW_TRY(Need(count));
      return MakeTuple(stack_.size() - count);
    }
    case op::kStackGlobal:
      return PushStackGlobal();
    default:
      return StepContainer(code);
  }
}

Status Fold(std::string_view pickle, Folder& folder) { return Folding(pickle, folder).Run(); }

}  // namespace shardwright::pickle
