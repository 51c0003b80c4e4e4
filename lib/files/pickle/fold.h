// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"

namespace shardwright::pickle {

struct Box;

/// A value while a pickle is folded. It is small and freed as soon as nothing
/// refers to it. Texts are views into the pickle or into memory of the fold.
class Cell {
 public:
  enum class Tag : std::uint8_t { kNone, kBool, kInt, kFloat, kText, kBytes, kGlobal, kBox };

  Cell() = default;
  static Cell Int(std::int64_t value, Tag tag = Tag::kInt);
  static Cell Real(double value);
  static Cell Text(std::string_view value, Tag tag = Tag::kText);
  static Cell Of(Box* box);
  Cell(const Cell& other);
  Cell(Cell&& other) noexcept : tag_(other.tag_), value_(other.value_) { other.tag_ = Tag::kNone; }
  Cell& operator=(Cell other) noexcept {
    std::swap(tag_, other.tag_);
    std::swap(value_, other.value_);
    return *this;
  }
  ~Cell();

  Tag tag() const { return tag_; }
  bool is_none() const { return tag_ == Tag::kNone; }
  bool is_int() const { return tag_ == Tag::kInt; }
  bool is_text() const { return tag_ == Tag::kText; }
  bool is_global() const { return tag_ == Tag::kGlobal; }
  /// \pre kInt or kBool
  std::int64_t integer() const { return value_.integer; }
  /// \pre kText, kBytes or kGlobal ("module.name")
  std::string_view text() const { return {value_.text.data, value_.text.size}; }
  /// Returns null for a value that is not a container or object.
  Box* box() const { return tag_ == Tag::kBox ? value_.box : nullptr; }

 private:
  Tag tag_ = Tag::kNone;
  union {
    std::int64_t integer = 0;
    double real;
    struct {
      const char* data;
      std::size_t size;
    } text;
    Box* box;
  } value_;
};

/// A container, or a recorded call.
struct Box {
  enum class Kind : std::uint8_t {
    kTuple,
    kList,
    kSet,
    kDict,    ///< plain or ordered; keys and values alternate
    kObject,  ///< class or function, arguments and optionally state: up to three items
  };
  Kind kind = Kind::kTuple;
  bool held = false;  ///< inside another box: it cannot change any more
  std::uint16_t depth = 1;
  std::uint32_t uses = 0;
  std::uint64_t number = 0;  ///< of a dict: unique within the fold
  std::vector<Cell> items;
  class BoxPool* pool = nullptr;
};

/// Receives the values of a pickle of millions of objects as soon as
/// they are complete, so that they need not be kept as a graph of nodes.
class Folder {
 public:
  Folder() = default;
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  virtual ~Folder() = default;
  /// Receives a new entry of a dict. \returns true to consume it: the dict then does not store it
  virtual Result<bool> Take(std::uint64_t dict, const Cell& key, const Cell& value) = 0;
  /// Receives the value of the whole pickle. Cells are valid until this returns.
  virtual Status Root(const Cell& root) = 0;
};

/// Runs a pickle of protocol 2 to 5 with the names and rules of Load, except
/// that tensors and storages are errors. Frees values that are neither consumed
/// nor part of an open container, so memory use is that of the folder.
/// \error kBadInput  malformed, or names a global that gives access to code;
///        kUnsupported  a storage, or a container that changes after it was put into
///        another one; kLimit  nesting or memory beyond the caps; errors of the folder
/// Pure; messages name the byte offset of the opcode at fault.
Status Fold(std::string_view pickle, Folder& folder);

/// Returns the class of an object, otherwise an empty string.
std::string_view ClassOf(const Cell& cell);

/// Returns an object's state from BUILD, or null.
const Cell* StateOf(const Cell& object);

/// Returns an entry of a dict, or of the dict that is an object's state; null if absent.
const Cell* AttributeOf(const Cell& cell, std::string_view name);

/// Returns "list", "object torch.Size"; for messages.
std::string Describe(const Cell& cell);

}  // namespace shardwright::pickle
