// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "files/pickle/names_internal.h"
#include "files/pickle/node.h"
#include "files/pickle/reader.h"

namespace shardwright::pickle {

/// Bytes of one entry in a container: a pointer.
inline constexpr std::uint64_t kItemBytes = sizeof(void*);

/// A value on the stack. Most values are arguments of rebuild calls that never appear in
/// a node. Strings, tuples and globals become nodes only when a container takes them.
struct Value {
  enum class Tag : std::uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kTuple,
    kGlobal,
    kStorage,
    kNode,
    kUnset
  };
  Tag tag = Tag::kUnset;
  union {
    std::int64_t integer = 0;
    double real;
    std::uint64_t slot;
    Node* node;
  };
};

inline Value OfNode(Node* node) {
  Value value;
  value.tag = Value::Tag::kNode;
  value.node = node;
  return value;
}

inline bool IsNode(const Value& value, Kind kind) {
  return value.tag == Value::Tag::kNode && value.node->kind == kind;
}

/// Returns true for an inner class, the result of getattr(Outer, "Inner").
inline bool IsInnerClass(const Node* node) {
  return node->kind == Kind::kObject && node->callable->text == "builtins.getattr";
}

/// Runs one pickle. machine_ops.cc has the opcodes, machine_calls.cc the calls.
class Machine {
 public:
  Machine(std::string_view pickle, std::uint64_t most);
  Result<Graph> Run();

 private:
  using Handler = Status (Machine::*)();
  using Args = std::span<const Value>;

  struct StringSlot {
    std::string_view text;
    Node* node = nullptr;
  };
  struct TupleSlot {
    std::uint64_t first = 0;  // in pool_
    std::uint32_t count = 0;
    std::uint32_t depth = 1;
    Node* node = nullptr;
  };
  struct GlobalSlot {
    Meaning meaning;
    Node* node = nullptr;
  };

  static const std::array<Handler, 256>& Handlers();

  // Input.
  bool Has(std::uint64_t bytes) const { return pickle_.size() - at_ >= bytes; }
  std::uint64_t Fixed(unsigned bytes);  // little-endian; 0 past the end, where Take fails
  Result<std::string_view> Take(unsigned length_bytes);
  Result<std::string_view> Line();
  tl::unexpected<Error> Bad(std::string message) const;
  tl::unexpected<Error> Unsupported(std::string message) const;
  tl::unexpected<Error> Truncated() const;
  Error Located(Error error) const;

  // Stack.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  std::size_t above_mark() const { return stack_.size() - floor(); }
  Status Push(Value value);
  Status PushNode(Node* node);
  Status Need(std::size_t count) const;
  Value Pop();
  Result<std::size_t> PopMark();  // index of the first value above the mark

  // Values.
  Status Charge(std::uint64_t bytes);
  Result<Node*> NewNode(Kind kind);
  Result<const Node*> ToNode(const Value& value);
  Status ToNodes(Args values, std::vector<const Node*>& out);
  Result<Value> MakeTuple(std::size_t first_on_stack);
  Args TupleItems(const Value& tuple) const;
  bool IsString(const Value& value) const { return value.tag == Value::Tag::kString; }
  std::string_view Text(const Value& value) const { return strings_[value.slot].text; }
  bool IsKnown(const Value& value, Known known) const;
  std::string Describe(const Value& value) const;
  Status PushString(std::string_view text);
  Status PushText(Kind kind, std::string_view text);
  Status PushInteger(std::string_view digits);  // little-endian
  Status PushGlobal(std::string_view module, std::string_view name);
  Result<Node*> Nested(Value base, std::string_view path);

  // Containers.
  Status TakeTuple(std::size_t count);
  Status AppendTo(const Value& target, Args items);
  Status SetIn(const Value& target, Args entries);
  Status AddTo(const Value& target, Args items);
  Status PutMemo(std::uint64_t index);
  Status GetMemo(std::uint64_t index);

  // Calls.
  Result<Value> Call(const Value& callable, const Value& args);
  Result<Value> CallKnown(Known known, const Value& callable, const Value& args);
  Result<Value> CallOther(const Value& callable, const Value& args, Build build);
  Result<Value> CallOrderedDict(Args args);
  Result<Value> CallSize(Args args);
  Result<Value> CallSet(Kind kind, Args args);
  Result<Value> CallBytes(Args args);
  Result<Value> CallByteArray(Args args);
  Result<Value> CallEncode(Args args);
  Result<Value> CallGetattr(Args args);
  Result<Value> CallNewObj(Args args);
  Result<Value> CallNewObjEx(Args args);
  Result<Value> CallTensor(Known known, Args args);
  Result<Value> CallParameter(Known known, Args args);
  Result<Value> CallFromType(Args args);
  Result<Value> CallDeviceTensor(Args args);
  Result<Value> CallSharded(Args args);
  Result<const Node*> WithoutMeshes(const Node* attributes);
  Result<Value> MakeObject(const Value& cls, const Value& args, Build build);
  Status CheckHooks(const Value& hooks) const;
  Status CheckMetadata(const Value& metadata) const;
  Status FillTensor(Known known, Args args, Tensor& tensor) const;
  Status CheckTensor(const Tensor& tensor) const;
  Result<Shape> ShapeArg(const Value& value) const;
  Result<std::uint64_t> CountArg(const Value& value) const;
  Result<DType> TensorDType(Known known, Args args, const StorageUse& use) const;
  Result<const Node*> Attributes(const Value& state);
  Result<Value> LoadPersistent(const Value& id);
  Result<Value> UseStorage(StorageUse use);
  Result<std::string> Latin1(std::string_view text) const;

  // Handlers, one per opcode or family.
  Status OpRefused();
  Status OpProto();
  Status OpFrame();
  Status OpStop();
  Status OpMark();
  Status OpPop();
  Status OpPopMark();
  Status OpDup();
  Status OpNone();
  Status OpTrue();
  Status OpFalse();
  Status OpBinInt();
  Status OpBinInt1();
  Status OpBinInt2();
  Status OpLong1();
  Status OpLong4();
  Status OpBinFloat();
  Status OpShortBinString();
  Status OpBinString();
  Status OpShortBinUnicode();
  Status OpBinUnicode();
  Status OpBinUnicode8();
  Status OpShortBinBytes();
  Status OpBinBytes();
  Status OpBinBytes8();
  Status OpByteArray8();
  Status OpEmptyTuple();
  Status OpTuple();
  Status OpTuple1();
  Status OpTuple2();
  Status OpTuple3();
  Status OpEmptyList();
  Status OpEmptyDict();
  Status OpEmptySet();
  Status OpFrozenSet();
  Status OpAppend();
  Status OpAppends();
  Status OpSetItem();
  Status OpSetItems();
  Status OpAddItems();
  Status OpBinPut();
  Status OpLongBinPut();
  Status OpMemoize();
  Status OpBinGet();
  Status OpLongBinGet();
  Status OpGlobal();
  Status OpStackGlobal();
  Status OpReduce();
  Status OpNewObj();
  Status OpNewObjEx();
  Status OpBuild();
  Status OpBinPersId();

  std::string_view pickle_;
  std::size_t at_ = 0;     // next byte
  std::size_t op_at_ = 0;  // opcode being run
  std::size_t frame_end_ = 0;
  unsigned protocol_ = 2;
  bool stopped_ = false;
  std::uint64_t budget_ = 0;  // bytes that may yet be allocated

  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Value> memo_;
  std::unordered_map<std::uint64_t, Value> sparse_memo_;
  std::uint64_t memo_count_ = 0;

  std::vector<StringSlot> strings_;
  std::vector<TupleSlot> tuples_;
  std::vector<Value> pool_;
  std::vector<GlobalSlot> globals_;
  std::unordered_map<std::string, std::uint64_t> global_slots_;
  std::unordered_map<std::string, std::uint32_t> storage_slots_;
  std::array<Node*, 256> small_ints_{};
  Graph graph_;
};

}  // namespace shardwright::pickle
