// SPDX-License-Identifier: Apache-2.0
#include "files/pickle/fold_internal.h"

namespace shardwright::pickle {

Cell Cell::Int(std::int64_t value, Tag tag) {
  Cell cell;
  cell.tag_ = tag;
  cell.value_.integer = value;
  return cell;
}

Cell Cell::Real(double value) {
  Cell cell;
  cell.tag_ = Tag::kFloat;
  cell.value_.real = value;
  return cell;
}

Cell Cell::Text(std::string_view value, Tag tag) {
  Cell cell;
  cell.tag_ = tag;
  cell.value_.text = {value.data(), value.size()};
  return cell;
}

Cell Cell::Of(Box* box) {
  Cell cell;
  cell.tag_ = Tag::kBox;
  cell.value_.box = box;
  ++box->uses;
  return cell;
}

Cell::Cell(const Cell& other) : tag_(other.tag_), value_(other.value_) {
  if (tag_ == Tag::kBox) ++value_.box->uses;
}

Cell::~Cell() {
  if (tag_ == Tag::kBox && --value_.box->uses == 0) value_.box->pool->Give(value_.box);
}

namespace {

std::string_view BoxName(Box::Kind kind) {
  switch (kind) {
    case Box::Kind::kTuple:
      return "tuple";
    case Box::Kind::kList:
      return "list";
    case Box::Kind::kSet:
      return "set";
    case Box::Kind::kDict:
      return "dict";
    case Box::Kind::kObject:
      break;
  }
  return "object";
}

}  // namespace

std::string_view ClassOf(const Cell& cell) {
  const Box* box = cell.box();
  if (box == nullptr || box->kind != Box::Kind::kObject) return {};
  return box->items[0].is_global() ? box->items[0].text() : std::string_view();
}

const Cell* StateOf(const Cell& object) {
  const Box* box = object.box();
  if (box == nullptr || box->kind != Box::Kind::kObject || box->items.size() < 3) return nullptr;
  return &box->items[2];
}

const Cell* AttributeOf(const Cell& cell, std::string_view name) {
  const Cell* state = StateOf(cell);
  const Box* box = state != nullptr ? state->box() : cell.box();
  if (box == nullptr || box->kind != Box::Kind::kDict) return nullptr;
  for (std::size_t i = 0; i + 1 < box->items.size(); i += 2) {
    if (box->items[i].is_text() && box->items[i].text() == name) return &box->items[i + 1];
  }
  return nullptr;
}

std::string Describe(const Cell& cell) {
  switch (cell.tag()) {
    case Cell::Tag::kNone:
      return "None";
    case Cell::Tag::kBool:
      return "bool";
    case Cell::Tag::kInt:
      return "integer";
    case Cell::Tag::kFloat:
      return "float";
    case Cell::Tag::kText:
      return "string";
    case Cell::Tag::kBytes:
      return "bytes";
    case Cell::Tag::kGlobal:
      return "class " + std::string(cell.text());
    case Cell::Tag::kBox:
      break;
  }
  const std::string_view name = ClassOf(cell);
  return std::string(BoxName(cell.box()->kind)) + (name.empty() ? "" : " " + std::string(name));
}

}  // namespace shardwright::pickle
