// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>

#include "files/pickle/writer.h"
#include "pickles.h"
#include "support/base/limits.h"

namespace shardwright::pickle {
namespace {

using std::string_literals::operator""s;

std::string Written(const Node* root, const std::vector<StorageUse>& storages = {}) {
  const Result<Dumped> dumped = Dump(root, storages);
  EXPECT_TRUE(dumped.has_value()) << dumped.error().message;
  return dumped ? dumped->bytes : std::string();
}

const Node* Filled(Arena& arena, bool ordered) {
  Node* dict = arena.Dict(ordered);
  Set(arena, dict, "a", arena.Int(1));
  Set(arena, dict, "b", arena.None());
  return dict;
}

class PickleWrite : public ::testing::Test {
 protected:
  Arena arena_;
};

TEST_F(PickleWrite, Integers) {
  const std::pair<std::int64_t, std::string> golden[] = {
      {0, "K\0"s},
      {255, "K\xFF"s},
      {256, "M\0\x01"s},
      {65535, "M\xFF\xFF"s},
      {65536, "J\0\0\x01\0"s},
      {-1, "J\xFF\xFF\xFF\xFF"s},
      {INT32_MIN, "J\0\0\0\x80"s},
      {INT32_MAX, "J\xFF\xFF\xFF\x7F"s},
      {2147483648, "\x8A\x05\0\0\0\x80\0"s},
      {-2147483649, "\x8A\x05\xFF\xFF\xFF\x7F\xFF"s},
      {0x7FFFFFFFFF, "\x8A\x05\xFF\xFF\xFF\xFF\x7F"s},
      {-0x8000000000, "\x8A\x05\0\0\0\0\x80"s},
      {INT64_MAX, "\x8A\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x7F"s},
      {INT64_MIN, "\x8A\x08\0\0\0\0\0\0\0\x80"s}};
  for (const auto& [number, bytes] : golden) {
    EXPECT_EQ(Written(arena_.Int(number)), Pickle(bytes)) << number;
    EXPECT_EQ(Load(Pickle(bytes))->root->integer, number);
  }
}

TEST_F(PickleWrite, Scalars) {
  EXPECT_EQ(Written(arena_.None()), Pickle("N"));
  EXPECT_EQ(Written(arena_.Bool(true)), Pickle("\x88"));
  EXPECT_EQ(Written(arena_.Bool(false)), Pickle("\x89"));
  EXPECT_EQ(Written(arena_.Float(-1.5)), Pickle("G\xBF\xF8\0\0\0\0\0\0"s));
  EXPECT_EQ(Written(arena_.String("\xC3\xBC")), Pickle(Str("\xC3\xBC")));
  Node* big = arena_.New(Kind::kLong);
  big->text = "\0\0\0\0\0\0\0\0\x01"s;
  EXPECT_EQ(Written(big), Pickle("\x8A\x09\0\0\0\0\0\0\0\0\x01"s));
  EXPECT_EQ(Written(arena_.Global("torch.float16")), Pickle(Glob("torch", "float16") + "q\0"s));
  EXPECT_EQ(Written(arena_.Global("builtins.int")), Pickle(Glob("__builtin__", "long") + "q\0"s));
}

TEST_F(PickleWrite, Containers) {
  EXPECT_EQ(Written(arena_.Tuple({})), Pickle(")"));
  const Node* none = arena_.None();
  EXPECT_EQ(Written(arena_.Tuple({none, none, none})), Pickle("NNN\x87"));
  EXPECT_EQ(Written(arena_.Tuple({none, none, none, none})), Pickle("(NNNNt"));
  EXPECT_EQ(Written(arena_.List({none})), Pickle("]Na"));
  EXPECT_EQ(Written(arena_.List({none, none})), Pickle("](NNe"));
  EXPECT_EQ(Written(Filled(arena_, false)), Pickle("}(" + Str("a") + "K\1" + Str("b") + "Nu"));
  EXPECT_EQ(Written(Filled(arena_, true)), Pickle(Glob("collections", "OrderedDict") + "q\0)R("s +
                                                  Str("a") + "K\1" + Str("b") + "Nu"));
  EXPECT_EQ(Written(arena_.SizeOf({2, 3})), Pickle(Glob("torch", "Size") + "q\0K\2K\3\x86\x85R"s));
  Node* set = arena_.New(Kind::kSet);
  set->items = {arena_.Int(1)};
  EXPECT_EQ(Written(set), Pickle(Glob("__builtin__", "set") + "q\0]K\1a\x85R"s));
}

TEST_F(PickleWrite, Bytes) {
  Node* bytes = arena_.New(Kind::kBytes);
  bytes->text = "a\x80\xFF";
  const std::string golden =
      Glob("_codecs", "encode") + "q\0"s + Str("a\xC2\x80\xC3\xBF") + Str("latin1") + "q\1\x86R";
  EXPECT_EQ(Written(bytes), Pickle(golden));
  EXPECT_EQ(Load(Pickle(golden))->root->text, bytes->text);
}

TEST_F(PickleWrite, BatchesOfAThousand) {
  std::vector<const Node*> items(2001, arena_.None());
  const std::string thousand = "(" + std::string(1000, 'N') + "e";
  EXPECT_EQ(Written(arena_.List(items)), Pickle("]" + thousand + thousand + "Na"));
}

TEST_F(PickleWrite, SharedValuesAreWrittenOnce) {
  const Node* list = arena_.List({});
  EXPECT_EQ(Written(arena_.Tuple({list, list})), Pickle("]q\0h\0\x86"s));
  const Node* text = arena_.String("x");
  const Node* one = arena_.Int(1);
  EXPECT_EQ(Written(arena_.List({text, one, text, one})),
            Pickle("](" + Str("x") + "q\0K\1h\0K\1e"s));
}

TEST_F(PickleWrite, MemoBeyondAByte) {
  std::vector<const Node*> items;
  for (int i = 0; i < 300; ++i) {
    items.push_back(arena_.List({}));
    items.push_back(items.back());
  }
  const Result<Graph> graph = Load(Written(arena_.List(items)));
  ASSERT_TRUE(graph.has_value());
  for (std::size_t i = 0; i < 600; i += 2)
    EXPECT_EQ(graph->root->items[i], graph->root->items[i + 1]);
}

TEST_F(PickleWrite, TensorsByteForByte) {
  Tensor tensor;
  tensor.shape = {2, 3};
  tensor.strides = {3, 1};
  tensor.offset = 1;
  const Node* node = arena_.TensorOf(tensor);
  const std::string golden = Glob("torch._utils", "_rebuild_tensor_v2") + "q\0(("s +
                             Str("storage") + "q\1" + Glob("torch", "FloatStorage") + "q\2" +
                             Str("0") + Str("cpu") + "q\3K\7tQK\1K\2K\3\x86K\3K\1\x86\x89" +
                             Glob("collections", "OrderedDict") + "q\4)RtR";
  EXPECT_EQ(Written(node, {{"", DType::kF32, false, 7}}), Pickle(golden));
}

TEST_F(PickleWrite, KeysFollowFirstUse) {
  std::vector<const Node*> tensors;
  for (std::uint32_t storage : {2U, 0U, 2U}) {
    Tensor tensor;
    tensor.storage = storage;
    tensors.push_back(arena_.TensorOf(tensor));
  }
  const std::vector<StorageUse> storages(4, StorageUse{"", DType::kF32, false, 1});
  const Result<Dumped> dumped = Dump(arena_.List(tensors), storages);
  ASSERT_TRUE(dumped.has_value());
  EXPECT_EQ(dumped->order, (std::vector<std::uint32_t>{2, 0, 1, 3}));
  const Result<Graph> graph = Load(dumped->bytes);
  EXPECT_EQ(graph->root->items[0]->tensor->storage, graph->root->items[2]->tensor->storage);
}

// The writer's output reads the same as its input, and writing that again changes nothing.
TEST_F(PickleWrite, InertObjectsComeBackUnchanged) {
  const std::string state = "}" + Str("cur_scale") + "K\1s";
  const std::string bodies[] = {
      Glob("deepspeed.runtime.fp16.loss_scaler", "LossScaler") + "q\0)\x81"s + state + "b",
      Glob("m.config", "Stage") + "q\0K\2\x85R"s,
      Glob("collections", "deque") + "q\0]K\5\x86R(NNe"s,
      Glob("collections", "defaultdict") + "q\0"s + Glob("__builtin__", "list") + "q\1\x85RK\1Ns",
      Glob("torch", "device") + "q\0"s + Str("cuda") + "K\1\x86R",
      Glob("collections", "OrderedDict") + "q\0)R"s + Str("w") + "K\1s" + state + "b",
      Glob("__builtin__", "getattr") + "q\0"s + Glob("m", "Outer") + "q\1" + Str("Inner") +
          "\x86R)\x81"};
  for (const std::string& body : bodies) {
    const Result<Graph> graph = Load(Pickle(body));
    ASSERT_TRUE(graph.has_value()) << graph.error().message;
    EXPECT_EQ(Written(graph->root), Pickle(body)) << body;
  }
  // NEWOBJ_EX has no opcode in protocol 2: the same call by name.
  const Result<Graph> graph = Load(Pickle(Glob("m", "C") + "K\1\x85}" + Str("b") + "Ns\x92", 4));
  const std::string call = Glob("copy_reg", "__newobj_ex__") + "q\0"s + Glob("m", "C") +
                           "q\1K\1\x85}" + Str("b") + "Ns\x87R";
  EXPECT_EQ(Written(graph->root), Pickle(call));
  const Result<Graph> again = Load(Pickle(call));
  EXPECT_EQ(again->root->build, Build::kNewObjEx);
  EXPECT_EQ(Written(again->root), Pickle(call));
}

TEST_F(PickleWrite, ParametersAndAttributes) {
  Tensor tensor;
  tensor.shape = {3};
  tensor.strides = {1};
  tensor.requires_grad = true;
  for (bool is_parameter : {false, true}) {
    for (bool with_attributes : {false, true}) {
      tensor.is_parameter = is_parameter;
      tensor.attributes = with_attributes ? Filled(arena_, false) : nullptr;
      const Result<Graph> graph =
          Load(Written(arena_.TensorOf(tensor), {{"", DType::kF32, false, 3}}));
      ASSERT_TRUE(graph.has_value()) << graph.error().message;
      const Tensor& read = *graph->root->tensor;
      EXPECT_EQ(read.is_parameter, is_parameter);
      EXPECT_TRUE(read.requires_grad);
      ASSERT_EQ(read.attributes != nullptr, with_attributes);
      if (with_attributes) {
        EXPECT_EQ(read.attributes->Find("a")->integer, 1);
      }
    }
  }
}

TEST_F(PickleWrite, EveryDType) {
  for (int i = 0; i <= static_cast<int>(DType::kF4E2M1x2); ++i) {
    Tensor tensor;
    tensor.dtype = static_cast<DType>(i);
    tensor.shape = {4};
    tensor.strides = {1};
    for (bool untyped : {false, true}) {
      const std::uint64_t elems = untyped ? 4 * ItemSize(tensor.dtype) : 4;
      const StorageUse use{"", untyped ? DType::kU8 : tensor.dtype, untyped, elems};
      const Result<Graph> graph = Load(Written(arena_.TensorOf(tensor), {use}));
      ASSERT_TRUE(graph.has_value()) << graph.error().message;
      EXPECT_EQ(graph->root->tensor->dtype, tensor.dtype);
      const StorageUse& read = graph->storages[0];
      EXPECT_EQ(read.elems * ItemSize(read.dtype), 4 * ItemSize(tensor.dtype));
    }
  }
}

TEST_F(PickleWrite, Refuses) {
  const auto refuse = [&](const Node* root, Errc code, std::string_view words,
                          std::vector<StorageUse> storages = {}) {
    ExpectFails(Dump(root, storages), code, words);
  };
  refuse(arena_.Global("os.system"), Errc::kBadInput, "refused");
  refuse(arena_.Global("nomodule"), Errc::kBadInput, "without a module");
  refuse(arena_.Global("a.b\nR"), Errc::kBadInput, "not a dotted identifier");
  Node* loop = arena_.New(Kind::kList);
  loop->items = {loop};
  refuse(loop, Errc::kUnsupported, "contains itself");
  const Node* deep = arena_.None();
  for (std::uint64_t i = 0; i < limits::kPickleDepth; ++i) deep = arena_.List({deep});
  refuse(deep, Errc::kLimit, "deeper");
  Node* big = arena_.New(Kind::kLong);
  big->text.assign(256, '\x01');
  refuse(big, Errc::kBadInput, "more than 255 bytes");
  Node* dict = arena_.Dict();
  dict->state = arena_.None();
  refuse(dict, Errc::kBadInput, "plain dict");
  refuse(arena_.New(Kind::kObject), Errc::kBadInput, "lacks its class");
  Tensor tensor;
  tensor.shape = {5};
  tensor.strides = {1};
  refuse(arena_.TensorOf(tensor), Errc::kBadInput, "storage 0 of 0");
  refuse(arena_.TensorOf(tensor), Errc::kBadInput, "reaches element 4",
         {{"", DType::kF32, false, 4}});
  refuse(arena_.TensorOf(tensor), Errc::kBadInput, "float32 in a storage of int64",
         {{"", DType::kI64, false, 5}});
}

}  // namespace
}  // namespace shardwright::pickle
