// SPDX-License-Identifier: Apache-2.0
// Opcodes of a fold that build containers and record calls.

#include <algorithm>
#include <string>
#include <utility>

#include "files/pickle/fold_internal.h"
#include "files/pickle/opcodes_internal.h"
#include "support/base/limits.h"

namespace shardwright::pickle {

Box* Folding::Open(Box::Kind kind) {
  Box* box = pool_.Take(kind);
  box->number = kind == Box::Kind::kDict ? ++dicts_ : 0;
  return box;
}

/// Marks a value that is put into a box. A box inside another
/// one can no longer change, so no box can contain itself.
Status Folding::Hold(Box* holder, const Cell& cell) const {
  Box* box = cell.box();
  if (box == nullptr) return {};
  if (box == holder) return Fail(Errc::kUnsupported, "a container that contains itself");
  box->held = true;
  holder->depth = std::max<std::uint16_t>(holder->depth, box->depth + 1);
  if (holder->depth <= limits::kPickleDepth) return {};
  return Fail(Errc::kLimit, "byte ", op_at_, ": nesting deeper than ", limits::kPickleDepth);
}

Status Folding::MakeTuple(std::size_t first) {
  Box* box = Open(Box::Kind::kTuple);
  Cell tuple = Cell::Of(box);
  for (std::size_t i = first; i < stack_.size(); ++i) {
    SW_TRY(Hold(box, stack_[i]));
    box->items.push_back(std::move(stack_[i]));
  }
  stack_.resize(first);
  return Push(std::move(tuple));
}

Status Folding::MakeSet(std::size_t first) {
  SW_TRY(MakeTuple(first));
  stack_.back().box()->kind = Box::Kind::kSet;
  return {};
}

/// \param ignored  set to true for an object: its items are not kept
Status Folding::Change(const Cell& target, bool* ignored) {
  const Box* box = target.box();
  if (box == nullptr) return Bad("cannot add items to " + Describe(target));
  if (box->held) {
    return Fail(Errc::kUnsupported, "byte ", op_at_, ": ", Describe(target),
                " changes after it was put into another container");
  }
  *ignored = box->kind == Box::Kind::kObject;
  return {};
}

/// Moves the cells of the stack from `first` on into a list or set. They stay on the stack, empty.
Status Folding::TakeItems(Box* box, std::size_t first) {
  for (std::size_t i = first; i < stack_.size(); ++i) {
    SW_TRY(Hold(box, stack_[i]));
    box->items.push_back(std::move(stack_[i]));
  }
  return {};
}

Status Folding::Append(std::size_t first) {
  const Cell target = stack_[first - 1];
  bool ignored = false;
  SW_TRY(Change(target, &ignored));
  if (!ignored) {
    if (target.box()->kind != Box::Kind::kList) return Bad("APPEND to " + Describe(target));
    SW_TRY(TakeItems(target.box(), first));
  }
  stack_.resize(first);
  return {};
}

Status Folding::AddItems(std::size_t first) {
  const Cell target = stack_[first - 1];
  bool ignored = false;
  SW_TRY(Change(target, &ignored));
  if (ignored || target.box()->kind != Box::Kind::kSet) {
    return Bad("ADDITEMS to " + Describe(target));
  }
  SW_TRY(TakeItems(target.box(), first));
  stack_.resize(first);
  return {};
}

Status Folding::SetItems(std::size_t first) {
  if ((stack_.size() - first) % 2 != 0) return Bad("SETITEMS with a key without a value");
  const Cell target = stack_[first - 1];
  bool ignored = false;
  SW_TRY(Change(target, &ignored));
  Box* box = target.box();
  if (!ignored && box->kind != Box::Kind::kDict) return Bad("SETITEM on " + Describe(target));
  for (std::size_t i = first; i < stack_.size() && !ignored; i += 2) {
    SW_TRY(Hold(box, stack_[i]));
    SW_TRY(Hold(box, stack_[i + 1]));
    Result<bool> taken = folder_.Take(box->number, stack_[i], stack_[i + 1]);
    if (!taken) return tl::unexpected<Error>(std::move(taken).error());
    if (*taken) continue;
    box->items.push_back(std::move(stack_[i]));
    box->items.push_back(std::move(stack_[i + 1]));
  }
  stack_.resize(first);
  return {};
}

/// Records the call without running it.
Status Folding::Call(bool reduce) {
  SW_TRY(Need(2));
  Cell args = Pop();
  Cell callable = Pop();
  if (args.box() == nullptr || args.box()->kind != Box::Kind::kTuple) {
    return Bad("a call without a tuple of arguments");
  }
  const bool nested = ClassOf(callable) == "builtins.getattr";
  if (!callable.is_global() && !nested) {
    return Bad("call of something that is not a class: " + Describe(callable));
  }
  if (callable.is_global() && callable.text() == "collections.OrderedDict" &&
      args.box()->items.empty()) {
    return PushBox(Box::Kind::kDict);
  }
  if (!reduce && nested) return Bad("NEWOBJ of " + Describe(callable));
  Box* box = Open(Box::Kind::kObject);
  Cell object = Cell::Of(box);
  SW_TRY(Hold(box, callable));
  SW_TRY(Hold(box, args));
  box->items.push_back(std::move(callable));
  box->items.push_back(std::move(args));
  return Push(std::move(object));
}

Status Folding::NewObjEx() {
  SW_TRY(Need(3));
  const Cell keywords = Pop();
  const Box* box = keywords.box();
  if (box == nullptr || box->kind != Box::Kind::kDict) return Bad("NEWOBJ_EX without a dict");
  return Call(false);
}

Status Folding::Build() {
  SW_TRY(Need(2));
  Cell state = Pop();
  const Cell& target = stack_.back();
  bool object = false;
  SW_TRY(Change(target, &object));
  Box* box = target.box();
  if (box->kind == Box::Kind::kDict) return {};  // attributes of an ordered dict
  if (!object) return Bad("BUILD on " + Describe(target));
  if (box->items.size() > 2) {
    return Fail(Errc::kUnsupported, "byte ", op_at_, ": BUILD twice on ", Describe(target));
  }
  SW_TRY(Hold(box, state));
  box->items.push_back(std::move(state));
  return {};
}

Status Folding::StepContainer(std::uint8_t code) {
  const auto above = [&](Status (Folding::*what)(std::size_t)) -> Status {
    SW_TRY_ASSIGN(const std::size_t first, PopMark());
    const std::size_t floor = marks_.empty() ? 0 : marks_.back();
    if (first <= floor) return Bad("stack underflow");
    return (this->*what)(first);
  };
  switch (code) {
    case op::kTuple: {
      SW_TRY_ASSIGN(const std::size_t first, PopMark());
      return MakeTuple(first);
    }
    case op::kFrozenSet: {
      SW_TRY_ASSIGN(const std::size_t first, PopMark());
      return MakeSet(first);
    }
    case op::kAppends:
      return above(&Folding::Append);
    case op::kSetItems:
      return above(&Folding::SetItems);
    case op::kAddItems:
      return above(&Folding::AddItems);
    case op::kAppend:
      SW_TRY(Need(2));
      return Append(stack_.size() - 1);
    case op::kSetItem:
      SW_TRY(Need(3));
      return SetItems(stack_.size() - 2);
    case op::kReduce:
      return Call(true);
    case op::kNewObj:
      return Call(false);
    case op::kNewObjEx:
      return NewObjEx();
    case op::kBuild:
      return Build();
    default:
      return StepRest(code);
  }
}

}  // namespace shardwright::pickle
