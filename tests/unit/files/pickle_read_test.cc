// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>

#include "files/pickle/reader.h"
#include "pickles.h"

namespace shardwright::pickle {
namespace {

using std::string_literals::operator""s;

class PickleRead : public ::testing::Test {
 protected:
  const Node* Value(const std::string& body, int protocol = 2) {
    Result<Graph> graph = Load(Pickle(body, protocol));
    if (!graph) {
      ADD_FAILURE() << graph.error().message;
      static Arena empty;
      return empty.None();
    }
    graph_ = *std::move(graph);
    return graph_.root;
  }
  Graph graph_;
};

TEST_F(PickleRead, Scalars) {
  EXPECT_TRUE(Value("N")->is_none());
  EXPECT_EQ(Value("\x88")->integer, 1);
  EXPECT_EQ(Value("\x89")->kind, Kind::kBool);
  EXPECT_EQ(Value("K\xFF")->integer, 255);
  EXPECT_EQ(Value("M\x00\xFF"s)->integer, 0xFF00);
  EXPECT_EQ(Value("J\xFE\xFF\xFF\xFF")->integer, -2);
  EXPECT_EQ(Value("G\xBF\xF8\0\0\0\0\0\0"s)->real, -1.5);
  EXPECT_TRUE(std::isnan(Value("G\x7F\xF8\0\0\0\0\0\0"s)->real));
}

TEST_F(PickleRead, LongIntegers) {
  EXPECT_EQ(Value("\x8A\0"s)->integer, 0);
  EXPECT_EQ(Value("\x8A\x01\xFF")->integer, -1);
  EXPECT_EQ(Value("\x8A\x02\xFF\0"s)->integer, 255);
  EXPECT_EQ(Value(Int(INT64_MIN))->integer, INT64_MIN);
  EXPECT_EQ(Value("\x8B" + Le(3, 4) + Le(0x123456, 3))->integer, 0x123456);
  // Redundant sign bytes do not make an integer long.
  EXPECT_EQ(Value("\x8A\x0A" + Le(5, 8) + Le(0, 2))->integer, 5);
  const Node* big = Value("\x8A\x09" + Le(0, 8) + "\x01");
  EXPECT_EQ(big->kind, Kind::kLong);
  EXPECT_EQ(big->text, "\0\0\0\0\0\0\0\0\x01"s);
  EXPECT_EQ(Value("\x8A\x0A" + Le(0, 8) + Le(0x80, 2))->text.size(), 10U);
}

TEST_F(PickleRead, Text) {
  EXPECT_EQ(Value(Str("gr\xC3\xBC\xC3\x9F"))->text, "gr\xC3\xBC\xC3\x9F");
  EXPECT_EQ(Value(Str("\xED\xB2\x80"))->text, "\xED\xB2\x80");  // a lone surrogate
  EXPECT_EQ(Value("\x8C\x01z", 4)->kind, Kind::kString);
  EXPECT_EQ(Value("\x8D" + Le(2, 8) + "ab", 4)->text, "ab");
  EXPECT_EQ(Value("U\x02xy")->kind, Kind::kString);
  EXPECT_EQ(Value("T" + Le(2, 4) + "xy")->text, "xy");
}

TEST_F(PickleRead, Bytes) {
  EXPECT_EQ(Value("C\x02\xFF\0"s, 3)->text, "\xFF\0"s);
  EXPECT_EQ(Value("B" + Le(1, 4) + "a", 3)->kind, Kind::kBytes);
  EXPECT_EQ(Value("\x8E" + Le(1, 8) + "a", 4)->kind, Kind::kBytes);
  EXPECT_EQ(Value("\x96" + Le(1, 8) + "a", 5)->kind, Kind::kByteArray);
  const std::string encode = Glob("_codecs", "encode");
  const Node* bytes = Value(encode + Str("a\xC2\x80\xC3\xBF") + Str("latin1") + "\x86R");
  EXPECT_EQ(bytes->kind, Kind::kBytes);
  EXPECT_EQ(bytes->text, "a\x80\xFF");
  EXPECT_EQ(Value(Glob("__builtin__", "bytes") + ")R")->kind, Kind::kBytes);
  const std::string array = Glob("__builtin__", "bytearray");
  EXPECT_EQ(Value(array + Str("\xC3\xBF") + Str("latin-1") + "\x86R")->text, "\xFF");
  EXPECT_EQ(Value(Glob("builtins", "bytearray") + "C\x01x\x85R", 3)->kind, Kind::kByteArray);
}

TEST_F(PickleRead, Containers) {
  EXPECT_EQ(Value(")")->kind, Kind::kTuple);
  EXPECT_EQ(Value("NN\x86")->items.size(), 2U);
  EXPECT_EQ(Value("(NNNNt")->items.size(), 4U);
  EXPECT_EQ(Value("](NNe")->items.size(), 2U);
  EXPECT_EQ(Value("]Na")->kind, Kind::kList);
  EXPECT_EQ(Value("\x8F(K\x01K\x02\x90", 4)->kind, Kind::kSet);
  EXPECT_EQ(Value("(K\x01\x91", 4)->kind, Kind::kFrozenSet);
  EXPECT_EQ(Value(Glob("__builtin__", "set") + "](K\x01K\x02"
                                               "e\x85R")
                ->items.size(),
            2U);
  EXPECT_EQ(Value(Glob("builtins", "frozenset") + "]\x85R")->kind, Kind::kFrozenSet);
  const Node* dict = Value("}(" + Str("a") + "K\x01" + Str("b") + "K\x02u" + Str("c") + "Ns");
  ASSERT_EQ(dict->entry_count(), 3U);
  EXPECT_EQ(dict->Find("b")->integer, 2);
  EXPECT_EQ(dict->Find("d"), nullptr);
  EXPECT_FALSE(dict->ordered);
}

TEST_F(PickleRead, OrderedDictKeepsItsAttributes) {
  const Node* dict = Value(kHooks + Str("w") + "K\x01s}" + Str("_metadata") + kHooks + "sb");
  EXPECT_TRUE(dict->ordered);
  EXPECT_EQ(dict->Find("w")->integer, 1);
  ASSERT_NE(dict->state, nullptr);
  EXPECT_TRUE(dict->state->Find("_metadata")->ordered);
  const Node* pairs = Value(Glob("collections", "OrderedDict") + "](]" + Str("a") +
                            "aK\x01"
                            "aK\x02K\x03\x86"
                            "e\x85R");
  EXPECT_EQ(pairs->Find("a")->integer, 1);
  EXPECT_EQ(pairs->items[2]->integer, 2);
}

TEST_F(PickleRead, MemoSharesObjects) {
  const Node* list = Value(
      "]q\x07(h\x07"
      "0K\x01q\x08]r\x10\x27\0\0h\x08h\x08j\x10\x27\0\0e"s);
  ASSERT_EQ(list->items.size(), 5U);
  EXPECT_EQ(list->items[1], list->items[4]);
  EXPECT_EQ(list->items[2]->integer, 1);
  // MEMOIZE counts entries.
  const Node* pair = Value(ShortStr("x") +
                               "\x94"
                               "0]\x94(h\x01h\x00"
                               "10h\x00h\x00\x86"s,
                           4);
  EXPECT_EQ(pair->items[0], pair->items[1]);
}

TEST_F(PickleRead, FramesAreTransparent) {
  EXPECT_EQ(Value("\x95" + Le(3, 8) + "K\x07", 4)->integer, 7);
}

TEST_F(PickleRead, TensorsAndSizes) {
  const Node* tensor = Value(TensorOf(12, 2, {2, 3}, {5, 1}));
  ASSERT_TRUE(tensor->is_tensor());
  EXPECT_EQ(tensor->tensor->dtype, DType::kF32);
  EXPECT_EQ(tensor->tensor->offset, 2U);
  EXPECT_EQ(tensor->tensor->shape, (Shape{2, 3}));
  EXPECT_EQ(tensor->tensor->strides, (Shape{5, 1}));
  ASSERT_EQ(graph_.storages.size(), 1U);
  EXPECT_EQ(graph_.storages[0].elems, 12U);
  EXPECT_EQ(Describe(tensor), "tensor float32 [2, 3]");
  const Node* size = Value(Glob("torch", "Size") + "K\x02K\x03\x86\x85R");
  EXPECT_EQ(size->kind, Kind::kSize);
  EXPECT_EQ(*AsShape(size), (Shape{2, 3}));
}

TEST_F(PickleRead, EveryStorageClass) {
  const std::pair<const char*, DType> classes[] = {{"DoubleStorage", DType::kF64},
                                                   {"FloatStorage", DType::kF32},
                                                   {"HalfStorage", DType::kF16},
                                                   {"BFloat16Storage", DType::kBF16},
                                                   {"LongStorage", DType::kI64},
                                                   {"IntStorage", DType::kI32},
                                                   {"ShortStorage", DType::kI16},
                                                   {"CharStorage", DType::kI8},
                                                   {"ByteStorage", DType::kU8},
                                                   {"BoolStorage", DType::kBool},
                                                   {"ComplexDoubleStorage", DType::kC128},
                                                   {"ComplexFloatStorage", DType::kC64}};
  for (const auto& [cls, dtype] : classes) {
    const Node* tensor = Value(Glob("torch._utils", "_rebuild_tensor") + "(" +
                               StorageOf(cls, "k", 3) + "K\0K\x03\x85K\x01\x85tR"s);
    ASSERT_TRUE(tensor->is_tensor()) << cls;
    EXPECT_EQ(tensor->tensor->dtype, dtype) << cls;
  }
  // Files of old releases name the device in the class.
  const Node* cuda =
      Value(Glob("torch._utils", "_rebuild_tensor") + "((" + Str("storage") +
            Glob("torch.cuda", "HalfStorage") + Str("1") + Str("cuda:0") + "K\x02tQK\0))tR"s);
  EXPECT_EQ(cuda->tensor->dtype, DType::kF16);
}

TEST_F(PickleRead, UntypedStorageWithDType) {
  const Node* tensor =
      Value(Glob("torch._utils", "_rebuild_tensor_v3") + "(" + StorageOf("UntypedStorage", "0", 8) +
            "K\x01K\x03\x85K\x01\x85\x88" + kHooks + Glob("torch", "uint16") + "tR");
  EXPECT_EQ(tensor->tensor->dtype, DType::kU16);
  EXPECT_TRUE(tensor->tensor->requires_grad);
  EXPECT_TRUE(graph_.storages[0].untyped);
}

TEST_F(PickleRead, TiedTensorsShareAStorage) {
  const std::string one = TensorOf(4, 0, {4}, {1});
  const Node* list = Value("](" + one + one + "e");
  EXPECT_EQ(graph_.storages.size(), 1U);
  EXPECT_EQ(list->items[0]->tensor->storage, list->items[1]->tensor->storage);
  EXPECT_NE(list->items[0], list->items[1]);
}

TEST_F(PickleRead, ParametersAndAttributes) {
  const std::string tensor = TensorOf(4, 0, {4}, {1});
  const Node* parameter =
      Value(Glob("torch._utils", "_rebuild_parameter") + tensor + "\x88" + kHooks + "\x87R");
  EXPECT_TRUE(parameter->tensor->is_parameter);
  EXPECT_TRUE(parameter->tensor->requires_grad);
  EXPECT_EQ(parameter->tensor->attributes, nullptr);
  const std::string state = "}" + Str("ds_id") + Str("0_3") + "s";
  const Node* marked = Value(Glob("torch._utils", "_rebuild_parameter_with_state") + "(" + tensor +
                             "\x89" + kHooks + state + "tR");
  EXPECT_EQ(marked->tensor->attributes->Find("ds_id")->text, "0_3");
  const std::string args =
      "(" + StorageOf("FloatStorage", "0", 4) + "K\0K\x04\x85K\x01\x85\x89"s + kHooks + "t";
  const Node* typed = Value(Glob("torch._tensor", "_rebuild_from_type_v2") + "(" +
                            Glob("torch._utils", "_rebuild_tensor_v2") + Glob("torch", "Tensor") +
                            args + state + "tR");
  ASSERT_TRUE(typed->is_tensor());
  EXPECT_EQ(typed->tensor->attributes->Find("ds_id")->text, "0_3");
  // The old name of the module.
  const Node* old = Value(Glob("torch.tensor", "_rebuild_from_type_v2") + "(" +
                          Glob("torch._utils", "_rebuild_tensor_v2") + Glob("torch", "Tensor") +
                          args + state + "tR");
  EXPECT_TRUE(old->is_tensor());
}

TEST_F(PickleRead, UnknownClassesStayInert) {
  const Node* scaler = Value(Glob("deepspeed.runtime.fp16.loss_scaler", "LossScaler") + ")\x81}" +
                             Str("cur_scale") + "K\x01sb");
  ASSERT_EQ(scaler->kind, Kind::kObject);
  EXPECT_EQ(scaler->build, Build::kNewObj);
  EXPECT_EQ(scaler->callable->text, "deepspeed.runtime.fp16.loss_scaler.LossScaler");
  EXPECT_EQ(scaler->state->Find("cur_scale")->integer, 1);
  const Node* stage = Value(Glob("m.config", "Stage") + "K\x02\x85R");
  EXPECT_EQ(stage->build, Build::kReduce);
  EXPECT_EQ(stage->args->items[0]->integer, 2);
  EXPECT_EQ(Describe(stage), "object m.config.Stage");
  const Node* table =
      Value(Glob("collections", "defaultdict") + Glob("__builtin__", "list") + "\x85RK\x01Ns");
  EXPECT_EQ(table->dict_items.size(), 2U);
  EXPECT_EQ(table->args->items[0]->text, "builtins.list");
  const Node* deque = Value(Glob("collections", "deque") + ")R(NNe");
  EXPECT_EQ(deque->list_items.size(), 2U);
  const Node* keywords = Value(Glob("m", "C") + "K\x01\x85}" + Str("b") + "Ns\x92", 4);
  EXPECT_EQ(keywords->build, Build::kNewObjEx);
  EXPECT_EQ(keywords->args->items.size(), 2U);
}

TEST_F(PickleRead, NestedClasses) {
  for (const std::string& cls :
       {ShortStr("m") + ShortStr("Outer.Inner") + "\x93",
        Glob("builtins", "getattr") + Glob("m", "Outer") + Str("Inner") + "\x86R"}) {
    const Node* object = Value(cls + ")\x81", 4);
    ASSERT_EQ(object->callable->kind, Kind::kObject);
    EXPECT_EQ(object->callable->callable->text, "builtins.getattr");
    EXPECT_EQ(object->callable->args->items[0]->text, "m.Outer");
    EXPECT_EQ(object->callable->args->items[1]->text, "Inner");
  }
}

TEST_F(PickleRead, Python2Names) {
  EXPECT_EQ(Value(Glob("__builtin__", "xrange"))->text, "builtins.range");
  EXPECT_EQ(Value(Glob("__builtin__", "unicode"))->text, "builtins.str");
  EXPECT_EQ(Value(Glob("copy_reg", "_reconstructor"))->text, "copyreg._reconstructor");
  EXPECT_EQ(Value(Glob("exceptions", "ValueError"))->text, "builtins.ValueError");
}

TEST(PickleViews, SayWhatTheyFound) {
  Arena arena;
  ExpectFails(AsInt(arena.String("x")), Errc::kBadInput, "integer expected, found string");
  ExpectFails(AsCount(arena.Int(-1)), Errc::kBadInput, "count expected, found -1");
  ExpectFails(AsString(nullptr), Errc::kBadInput, "string expected, found nothing");
  ExpectFails(AsShape(arena.Int(1)), Errc::kBadInput, "shape expected, found integer");
  ExpectFails(AsFloat(arena.None()), Errc::kBadInput, "float expected, found None");
  EXPECT_EQ(*AsFloat(arena.Int(2)), 2.0);
  EXPECT_EQ(*AsShape(arena.SizeOf({2, 3})), (Shape{2, 3}));
}

TEST(PickleArena, DictsCanBeEdited) {
  Arena arena;
  Node* dict = arena.Dict();
  Set(arena, dict, "a", arena.Int(1));
  Set(arena, dict, "b", arena.Int(2));
  Set(arena, dict, "a", arena.Int(3));
  Node* copy = CopyDict(arena, dict);
  EXPECT_TRUE(Remove(copy, "b"));
  EXPECT_FALSE(Remove(copy, "b"));
  EXPECT_EQ(dict->entry_count(), 2U);
  EXPECT_EQ(copy->entry_count(), 1U);
  EXPECT_EQ(dict->Find("a")->integer, 3);
  EXPECT_EQ(arena.None(), arena.None());
  EXPECT_NE(arena.Bool(true), arena.Bool(false));
}

TEST(PickleScan, FindsTheEndInPieces) {
  const std::string whole = Pickle("}(" + Str("some text") + Glob("m", "C") + Int(5) + "K\x01u");
  const std::string stream = whole + "rest";
  for (std::size_t step = 1; step < 9; ++step) {
    std::size_t resume = 0;
    std::optional<std::size_t> end;
    for (std::size_t have = 0; !end && have < stream.size() + step; have += step) {
      const Result<std::optional<std::size_t>> found =
          FindEnd(std::string_view(stream).substr(0, std::min(have, stream.size())), resume);
      ASSERT_TRUE(found.has_value());
      end = *found;
    }
    EXPECT_EQ(end, whole.size());
  }
  std::size_t resume = 0;
  ExpectFails(FindEnd("\x80\x02i", resume), Errc::kBadInput, "byte 2: unsupported opcode");
  resume = 0;
  EXPECT_EQ(*FindEnd("\x80\x04\x8D" + Le(~0ULL, 8) + "....", resume), std::nullopt);
}

}  // namespace
}  // namespace shardwright::pickle
