// SPDX-License-Identifier: Apache-2.0
// lib/files/pickle: object graphs of Python, without Python.
// reader.h runs the opcodes of a pickle with a closed table of names. Other names become
// inert records, and nothing is called. The result is a graph of Nodes in an Arena. writer.h
// writes such a graph as a pickle, with inert records unchanged. Source: docs/formats/pt.md.

#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::pickle {

enum class Kind : std::uint8_t {
  kNone,
  kBool,
  kInt,   ///< fits in 64 bits
  kLong,  ///< larger: little-endian two's complement in `text`
  kFloat,
  kString,  ///< UTF-8 (surrogates passed through)
  kBytes,
  kByteArray,
  kTuple,
  kList,
  kSet,
  kFrozenSet,
  kDict,    ///< plain or ordered; keys and values alternate in `items`
  kSize,    ///< torch.Size; `items` are ints
  kGlobal,  ///< a class or function by its dotted name in `text`; never resolved to code
  kObject,  ///< a recorded call: `callable` applied to `args`, then `state` and items
  kTensor,  ///< see Tensor
};

/// Opcode that built a kObject, so that the writer can reproduce it unchanged.
enum class Build : std::uint8_t { kReduce, kNewObj, kNewObjEx };

struct Node;

/// A strided view of one storage. Offset, shape and strides count elements of `dtype`.
struct Tensor {
  std::uint32_t storage = 0;  ///< index into the document's storages
  DType dtype = DType::kF32;
  std::uint64_t offset = 0;
  Shape shape;
  std::vector<std::uint64_t> strides;
  bool requires_grad = false;
  bool is_parameter = false;         ///< torch.nn.Parameter
  const Node* attributes = nullptr;  ///< dict of Python attributes (_rebuild_from_type_v2), or null
};

/// One value of an object graph. Nodes belong to an Arena; equal pointers mean the same Python
/// object. A graph from the reader has no cycles and at most limits::kPickleDepth levels, but
/// a node may have several parents: a complete traversal needs a set of visited nodes.
struct Node {
  Kind kind = Kind::kNone;
  bool ordered = false;  ///< kDict: collections.OrderedDict
  Build build = Build::kReduce;
  std::int64_t integer = 0;  ///< kInt; kBool as 0 or 1
  double real = 0;           ///< kFloat
  std::string text;          ///< kString, kBytes, kByteArray, kLong; kGlobal as "module.name"
  std::vector<const Node*>
      items;  ///< kTuple, kList, kSet, kFrozenSet, kSize; kDict: key, value, key, value, ...
  const Node* callable = nullptr;       ///< kObject
  const Node* args = nullptr;           ///< kObject: tuple; kNewObjEx: (args, kwargs)
  const Node* state = nullptr;          ///< state from BUILD (of kObject or ordered kDict), or null
  std::vector<const Node*> list_items;  ///< kObject: items from APPENDS
  std::vector<const Node*> dict_items;  ///< kObject: entries from SETITEMS, alternating
  std::unique_ptr<Tensor> tensor;       ///< kTensor

  /// Returns the value under a string key of a dict, null if absent or not a dict.
  const Node* Find(std::string_view key) const;
  bool is_none() const { return kind == Kind::kNone; }
  bool is_string() const { return kind == Kind::kString; }
  bool is_dict() const { return kind == Kind::kDict; }
  bool is_list() const { return kind == Kind::kList; }
  bool is_tensor() const { return kind == Kind::kTensor; }
  /// Count and access the entries of a dict. \pre kDict
  std::size_t entry_count() const { return items.size() / 2; }
  const Node* key(std::size_t i) const { return items[2 * i]; }
  const Node* value(std::size_t i) const { return items[2 * i + 1]; }
};

/// Returns the value under a string key; null if it is absent or `dict` is not a dict.
const Node* FindIn(const Node* dict, std::string_view key);

/// Returns the value under an integer key; null if it is absent or `dict` is not a dict.
const Node* FindInt(const Node* dict, std::int64_t key);

/// Typed access. On failure kBadInput with a message like "integer expected, found list".
Result<std::int64_t> AsInt(const Node* node);     ///< kInt or kBool
Result<std::uint64_t> AsCount(const Node* node);  ///< kInt ≥ 0
Result<double> AsFloat(const Node* node);         ///< kFloat or kInt
Result<std::string_view> AsString(const Node* node);
Result<Shape> AsShape(const Node* node);  ///< kSize, kTuple or kList of non-negative ints

/// Returns "list", "tensor float32 [61, 24]", "object torch.device"; for messages.
std::string Describe(const Node* node);

/// Checks that all elements of a tensor are within a storage of `elems` elements of its dtype.
/// \error kBadInput  sizes and strides differ in number, an overflow, or an element outside
/// Pure.
Status CheckBounds(const Tensor& tensor, std::uint64_t elems);

/// Owns nodes. Their addresses are stable for the lifetime of the arena. Not thread-safe.
class Arena {
 public:
  Node* New(Kind kind);
  const Node* None();
  const Node* Bool(bool value);
  const Node* Int(std::int64_t value);
  const Node* Count(std::uint64_t value) { return Int(static_cast<std::int64_t>(value)); }
  const Node* Float(double value);
  const Node* String(std::string_view value);
  const Node* Global(std::string_view dotted);
  const Node* List(std::vector<const Node*> items);
  const Node* Tuple(std::vector<const Node*> items);
  const Node* SizeOf(const Shape& shape);
  const Node* TensorOf(Tensor tensor);
  /// Makes an empty dict to fill with Set.
  Node* Dict(bool ordered = false);
  /// Makes an object built by NEWOBJ () and BUILD state: "module.Class" with a dict of attributes.
  const Node* Object(std::string_view dotted, const Node* state);

  std::size_t node_count() const { return nodes_.size(); }
  std::deque<Node>& nodes() { return nodes_; }
  const std::deque<Node>& nodes() const { return nodes_; }

 private:
  std::deque<Node> nodes_;
  const Node* none_ = nullptr;
  const Node* true_ = nullptr;
  const Node* false_ = nullptr;
};

/// Sets or replaces an entry with a string key. \pre dict is a kDict of this arena
void Set(Arena& arena, Node* dict, std::string_view key, const Node* value);

/// Makes a shallow copy of a dict (entries shared), to change some of them.
Node* CopyDict(Arena& arena, const Node* dict);

/// Removes an entry. Returns true if it existed.
bool Remove(Node* dict, std::string_view key);

}  // namespace shardwright::pickle
