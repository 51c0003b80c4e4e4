// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "files/pickle/reader.h"
#include "pickles.h"
#include "support/base/limits.h"

namespace shardwright::pickle {
namespace {

using std::string_literals::operator""s;

void Refused(const std::string& body, std::string_view words, int protocol = 2) {
  ExpectFails(Load(Pickle(body, protocol)), Errc::kBadInput, words);
}

void Unsupported(const std::string& body, std::string_view words, int protocol = 2) {
  ExpectFails(Load(Pickle(body, protocol)), Errc::kUnsupported, words);
}

// A mesh of ranks knows the mesh that it is a part of, which may be itself.
TEST(PickleHostile, MeshesThatLeadBackToThemselves) {
  const std::string mesh = Glob("torch.distributed.device_mesh", "DeviceMesh") + ")\x81q\x09}(";
  const std::string rest = Str("_rank") + "K\x03ub";
  const auto graph = Load(Pickle(mesh + Str("_root_mesh") + "h\x09" + rest));
  ASSERT_TRUE(graph) << graph.error().message;
  EXPECT_EQ(graph->root->state->Find("_root_mesh"), nullptr);
  EXPECT_EQ(graph->root->state->Find("_rank")->integer, 3);
  Unsupported(mesh + Str("other") + "h\x09" + rest, "contains itself");
}

TEST(PickleHostile, GlobalsThatRunCode) {
  const std::pair<const char*, const char*> globals[] = {
      {"os", "system"},
      {"posix", "system"},
      {"nt", "system"},
      {"subprocess", "Popen"},
      {"sys", "modules"},
      {"builtins", "eval"},
      {"__builtin__", "exec"},
      {"builtins", "__import__"},
      {"builtins", "open"},
      {"importlib", "import_module"},
      {"runpy", "run_path"},
      {"shutil", "rmtree"},
      {"socket", "socket"},
      {"pty", "spawn"},
      {"ctypes", "CDLL"},
      {"code", "interact"},
      {"pickle", "loads"},
      {"_pickle", "Unpickler"},
      {"types", "FunctionType"},
      {"functools", "partial"},
      {"operator", "attrgetter"},
      {"webbrowser", "open"},
      {"commands", "getoutput"},
      {"asyncio", "run"},
      {"multiprocessing", "Process"},
      {"copy_reg", "add_extension"},
      {"_codecs", "lookup"},
      {"io", "open"},
      {"torch", "load"},
      {"torch.hub", "load"},
      {"torch.storage", "_load_from_bytes"},
      {"torch.serialization", "os"},
      {"os.path", "join"},
      {"numpy.testing._private.utils", "runstring"}};
  for (const auto& [module, name] : globals) {
    Refused(Glob(module, name), "refused: pickle names ");
    Refused(Glob(module, name) + Str("touch /tmp/x") + "\x85R", "byte 2: refused");
    Refused(ShortStr(module) + ShortStr(name) + "\x93" + ShortStr("x") + "\x85R", "refused", 4);
  }
  Refused(ShortStr("torch") + ShortStr("os.system") + "\x93", "refused", 4);
  Refused(ShortStr("argparse") + ShortStr("Namespace.__init__.__globals__") + "\x93",
          "refused: pickle names attribute __init__ of class argparse.Namespace", 4);
}

TEST(PickleHostile, NamesThatAreNoNames) {
  for (const std::string& name : {"a b"s, ""s, "a..b"s, ".a"s, "a."s, "a-b"s, "\xFF"s, "a\0"s}) {
    Refused(Glob("module", name), "not a dotted identifier");
    Refused(Glob(name, "Name"), "not a dotted identifier");
  }
  Refused("c" + std::string(limits::kNameBytes + 1, 'a'), "unterminated class name");
}

TEST(PickleHostile, CallsOfWhatIsNoClass) {
  Refused("K\x01)R", "not a class: integer");
  Refused(Glob("m", "C") + ")R)R", "not a class: object m.C");
  Refused(Str("os.system") + ")R", "not a class: string");
  Refused(Glob("m", "C") + "K\x01R", "without a tuple");
  Refused(Glob("m", "C") + "K\x01\x81", "without a tuple");
  Refused(Glob("torch._utils", "_rebuild_tensor_v2") + ")\x81", "NEWOBJ of");
  Refused(Glob("m", "C") + "NN\x92", "NEWOBJ_EX", 4);
  Refused(Glob("__builtin__", "getattr") + Glob("m", "C") + ")R" + Str("system") + "\x86R",
          "refused");
  Refused(Glob("__builtin__", "getattr") + Glob("torch", "Tensor") + Str("__class__") + "\x86R",
          "refused");
  Unsupported(Glob("m", "C") + ")R0N", "dropped");
  Unsupported("(" + Glob("m", "C") + ")R1N", "dropped");
}

TEST(PickleHostile, Malformed) {
  ExpectFails(Load(""), Errc::kBadInput, "not a pickle");
  ExpectFails(Load("(lp0\n."), Errc::kBadInput, "not a pickle");
  ExpectFails(Load("\x80\x02"), Errc::kBadInput, "without STOP");
  Refused("N", "protocol 2 to 5 expected, found 1", 1);
  Refused("N", "found 6", 6);
  Refused("\x80\x02N", "PROTO inside");
  Refused("N.N", "2 bytes after STOP");
  Refused("", "STOP with 0 values");
  Refused("NN", "STOP with 2 values");
  Refused("(N", "open MARK");
  for (char op :
       {'i', 'o', 'P', 'I', 'L', 'F', 'S', 'V', 'p', 'g', 'd', 'l', '\x82', '\x97', '\xFF'}) {
    Refused(std::string(1, op), "unsupported opcode");
  }
}

TEST(PickleHostile, OperandsPastTheEnd) {
  for (const std::string& body : {"\x8A"s,
                                  "\x8A\x05x"s,
                                  "J\1"s,
                                  "K"s,
                                  "M\1"s,
                                  "G1234567"s,
                                  "X\1\0\0"s,
                                  "X\xFF\xFF\xFF\xFF"s + "abc",
                                  "\x8B\xFF\xFF\xFF\x7F"s,
                                  "\x8C\x05"s,
                                  "\x8D" + Le(~0ULL, 8),
                                  "C\x02x"s,
                                  "B\xFF\xFF\xFF\xFF"s,
                                  "\x8E" + Le(~0ULL - 3, 8),
                                  "\x96" + Le(1ULL << 62, 8),
                                  "Nq"s,
                                  "Nr\1\1"s,
                                  "h"s,
                                  "j\1"s,
                                  "\x95" + Le(1000, 8)}) {
    const Result<Graph> graph = Load("\x80\x04" + body);
    ExpectFails(graph, Errc::kBadInput, "ends inside an operand");
  }
}

TEST(PickleHostile, StackAndMarks) {
  for (const std::string& body : {"\x85"s, "N\x86"s, "NN\x87"s, "R"s,    "NR"s,     "b"s,   "Na"s,
                                  "a"s,    "NNs"s,   "2"s,      "\x81"s, "Q"s,      "q\1"s, "\x94"s,
                                  "(e"s,   "(u"s,    "(\x90"s,  "N(R"s,  "N(\x85"s, "\x93"s}) {
    Refused(body, "stack underflow", 4);
  }
  for (const std::string& body : {"t"s, "e"s, "u"s, "\x90"s, "\x91"s, "1"s, "0"s}) {
    Refused(body, "MARK missing", 4);
  }
  Refused("h\1", "memo entry 1 is read before");
  Refused("j\xFF\xFF\xFF\xFF", "memo entry 4294967295 is read before");
  Refused("Nq\5h\4", "memo entry 4");
  Refused("\x95" + Le(10, 8) + "\x95" + Le(0, 8), "FRAME inside a frame", 4);
  Refused("\x95" + Le(1, 8) + "K\x07", "operand beyond the end of its frame", 4);
}

TEST(PickleHostile, WrongTargets) {
  Refused(")Na", "APPEND to tuple");
  Refused("]NNs", "SETITEM on list");
  Refused("}(Nu", "key without a value");
  Refused("](N\x90", "ADDITEMS to list", 4);
  Refused("}Nb", "BUILD on dict");
  Refused("NNb", "BUILD on None");
  Unsupported(Glob("m", "C") + ")RNbNb", "BUILD twice");
  Unsupported(Glob("m", "C") + ")RNbNa", "already has state");
  Unsupported(Glob("m", "C") + ")RNbNNs", "already has state");
}

TEST(PickleHostile, InnerClassesStayAsTheyAre) {
  const std::string inner =
      Glob("builtins", "getattr") + Glob("a", "Outer") + Str("Inner") + "\x86R";
  ASSERT_TRUE(Load(Pickle(inner)));
  Refused(inner + "Na", "APPEND to");
  Refused(inner + "NNs", "SETITEM on");
  Refused(inner + "}b", "BUILD on");
  Refused(Glob("builtins", "getattr") + Glob("a", "Outer") + Str("In.er") + "\x86R",
          "attribute \"In.er\" of a class");
}

TEST(PickleHostile, KeysOfDicts) {
  Refused("}(" + Str("a") + "N" + Str("a") + "Nu", "key \"a\" appears twice");
  Refused("}(K\x01NK\x01Nu", "key 1 appears twice");
  const std::string one = std::string("G\x3F\xF0", 3) + std::string(6, '\0');
  Refused("}(K\x01N" + one + "Nu", "key 1.000000 appears twice");
  Refused("}(G" + std::string(8, '\0') + "NG\x80" + std::string(7, '\0') + "Nu", "appears twice");
  Refused(
      "}(C\x01"
      "bNC\x01"
      "bNu",
      "appears twice", 3);
  Refused("}(K\x01N\x88Nu", "key 1 appears twice");  // True equals 1
  Refused("}(NNNNu", "key None appears twice");
  const std::string large = std::string("\x8A\x09", 2) + std::string(8, '\xFF') + '\x7F';
  Refused("}(" + large + "N" + large + "Nu", "appears twice");
  Refused("}(" + Glob("a", "B") + "N" + Glob("a", "B") + "Nu", "a.B appears twice");
  Refused("}(K\x01N\x86NK\x01N\x86Nu", "key tuple appears twice");  // (1, None)
  Refused("}(K\x01\x85N\x88\x85Nu", "key tuple appears twice");     // (1,) equals (True,)
  Refused("}((K\x01N\x91N(NK\x01\x91Nu", "appears twice", 4);       // frozenset({1, None})
  ASSERT_TRUE(Load(Pickle("}(K\x01N\x86NNK\x01\x86Nu")));           // (1, None) and (None, 1)
  const std::string nan = std::string("G\x7F\xF8", 3) + std::string(6, '\0');
  ASSERT_TRUE(Load(Pickle("}(" + nan + "N" + nan + "Nu")));
  ASSERT_TRUE(Load(Pickle("}(" + Glob("a", "B") + ")RN" + Glob("a", "B") + ")RNu")));
  Refused("\x8F(K\x01\x88\x90", "item 1 appears twice in a set", 4);
  Refused("(NN\x91", "item None appears twice in a set", 4);
  Refused("}]Ns", "key of a dict is list");
  Refused("}K\x01]\x86\x85Ns", "key of a dict is tuple");  // ((1, []),)
  ASSERT_TRUE(Load(Pickle("}K\x01)\x86\x85Ns")));
  Refused("\x8F(]\x90", "item of a set is list", 4);
}

TEST(PickleHostile, ModulesOfPython2AreThoseOfItsProtocols) {
  const std::string set = Glob("__builtin__", "set") + "]K\x01\x61\x85R";
  ASSERT_TRUE(Load(Pickle(set, 2)));
  Refused(set, "Python 2 module __builtin__ in a pickle of protocol 3", 3);
  Refused(Glob("copy_reg", "__newobj__"), "copy_reg", 4);
  Refused(Glob("exceptions", "ValueError"), "exceptions", 5);
}

TEST(PickleHostile, NotText) {
  Refused(Str("\xFF"), "not UTF-8");
  Unsupported("U\1\xE4", "not ASCII");
  Refused(Glob("_codecs", "encode") + Str("\xC4\x80") + Str("latin1") + "\x86R", "over 255");
  Unsupported(Glob("_codecs", "encode") + Str("a") + Str("utf-16") + "\x86R", "encoding utf-16");
}

TEST(PickleHostile, ArgumentsOfKnownCalls) {
  Refused(Glob("collections", "OrderedDict") + "K\x01\x85R", "OrderedDict");
  Refused(Glob("collections", "OrderedDict") + "]Na\x85R", "pairs");
  Refused(Glob("torch", "Size") + ")R", "torch.Size");
  Refused(Glob("torch", "Size") + "N\x85\x85R", "torch.Size: integer expected, found None");
  Refused(Glob("__builtin__", "set") + "N\x85R", "set");
  Refused(Glob("__builtin__", "bytearray") + "N\x85R", "encode");
  Refused(Glob("copy_reg", "__newobj__") + ")R", "__newobj__");
  // Python makes an empty one of these.
  Refused(Glob("__builtin__", "set") +
              "]K\x01"
              "a\x85\x81",
          "which it does not take");
  Refused(Glob("collections", "OrderedDict") + "]\x85\x81", "which it does not take");
}

TEST(PickleHostile, PersistentIds) {
  Refused("NQ", "not a tuple");
  Refused("(NNNNNtQ", "not a storage");
  Refused(")Q", "not a storage");
  Refused("(" + Str("storage") + Glob("m", "C") + Str("0") + Str("cpu") + "K\1tQ",
          "unknown storage: class m.C");
  Refused("(" + Str("storage") + Glob("torch", "FloatStorage") + "K\1" + Str("cpu") + "K\1tQ",
          "key of a storage");
  Refused(StorageOf("FloatStorage", "0", -1), "element count");
  Refused(StorageOf("DoubleStorage", "0", INT64_MAX), "overflows");
  Unsupported(StorageOf("QInt8Storage", "0", 1), "quantized");
  Unsupported("(" + Str("module") + "NNNtQ", "whole module");
  Unsupported(
      "(" + Str("storage") + Glob("torch", "FloatStorage") + Str("0") + Str("cpu") + "K\1)tQ",
      "view of another");
  Unsupported(StorageOf("FloatStorage", "0", 1), "not part of a tensor");
  Refused("](" + TensorOf(4, 0, {1}, {1}) + TensorOf(5, 0, {1}, {1}) + "e",
          "declared twice and differs");
}

TEST(PickleHostile, TensorsOutsideTheirStorage) {
  Refused(TensorOf(5, 0, {2, 3}, {3, 1}), "reaches element 5 of a storage of 5");
  Refused(TensorOf(6, 1, {2, 3}, {3, 1}), "reaches element 6");
  Refused(TensorOf(0, 0, {}, {}), "reaches element 0");
  Refused(TensorOf(6, -1, {1}, {1}), "negative: -1");
  Refused(TensorOf(6, 0, {-1}, {1}), "negative");
  Refused(TensorOf(6, 0, {1}, {-1}), "negative");
  Refused(TensorOf(6, 0, {1, 1}, {1}), "2 sizes but 1 strides");
  Refused(TensorOf(6, 0, {INT64_MAX, 4}, {1, 1}), "overflows");
  Refused(TensorOf(6, 0, {INT64_MAX / 4}, {1 << 20}), "overflows");
  Refused(TensorOf(6, INT64_MAX, {3}, {INT64_MAX}), "overflows");
  Refused(TensorOf(6, 0, std::vector<std::int64_t>(65, 1), std::vector<std::int64_t>(65, 1)),
          "too many dimensions");
  EXPECT_TRUE(Load(Pickle(TensorOf(0, 0, {0, 5}, {5, 1}))).has_value());
  EXPECT_TRUE(Load(Pickle(TensorOf(1, 0, {1000, 1000}, {0, 0}))).has_value());
}

TEST(PickleHostile, ArgumentsOfTensors) {
  const std::string v2 = Glob("torch._utils", "_rebuild_tensor_v2");
  const std::string v3 = Glob("torch._utils", "_rebuild_tensor_v3");
  const std::string floats = StorageOf("FloatStorage", "0", 4);
  const std::string raw = StorageOf("UntypedStorage", "0", 4);
  const std::string rest = "K\0K\1\x85K\1\x85\x89"s + kHooks;
  Refused(v2 + ")R", "0 arguments");
  Refused(v2 + "(N" + rest + "tR", "storage of a tensor is None");
  Refused(v2 + "(" + raw + rest + "tR", "no element type");
  Refused(v3 + "(" + floats + rest + Glob("torch", "uint16") + "tR", "element type of its own");
  Refused(v3 + "(" + raw + rest + "NtR", "dtype of a tensor");
  Unsupported(v3 + "(" + raw + rest + Glob("torch", "bits8") + "tR", "dtype torch.bits8");
  Unsupported(v3 + "(" + raw + rest + Glob("torch", "fp32") + "tR", "dtype torch.fp32");
  Refused(v3 + "(" + raw + "K\0K\3\x85K\1\x85\x89"s + kHooks + Glob("torch", "uint16") + "tR",
          "reaches element 2");
  Unsupported(v2 + "(" + floats + rest + "}" + Str("conj") + "\x88stR", "conj set");
  EXPECT_TRUE(Load(Pickle(v2 + "(" + floats + rest + "}" + Str("conj") + "\x89stR")).has_value());
  Unsupported(v2 + "(" + floats + "K\0K\1\x85K\1\x85\x89"s + kHooks + "K\1NstR", "backward hooks");
  Unsupported(Glob("torch._utils", "_rebuild_sparse_tensor") + ")R", "_rebuild_sparse_tensor");
  Unsupported(Glob("torch._utils", "_rebuild_qtensor") + ")R", "_rebuild_qtensor");
  const std::string from = Glob("torch._tensor", "_rebuild_from_type_v2");
  Unsupported(from + "(" + v2 + Glob("torch.distributed.tensor", "DTensor") + ")NtR", "DTensor");
  Unsupported(from + "(" + Glob("m", "f") + Glob("torch", "Tensor") + ")NtR", "built by class m.f");
}

TEST(PickleHostile, GraphsWithCycles) {
  Unsupported("]q\0h\0a"s, "contains itself");
  Unsupported(
      "]q\0h\0\x85"
      "a"s,
      "contains itself");
  Unsupported("}q\0"s + Str("a") + "](h\0es"s, "contains itself");
  Unsupported(Glob("m", "C") + ")Rq\0h\0b"s, "contains itself");
}

TEST(PickleHostile, Nesting) {
  const std::uint64_t depth = limits::kPickleDepth;
  const auto lists = [](std::uint64_t n) { return std::string(n, ']') + std::string(n - 1, 'a'); };
  const auto tuples = [](std::uint64_t n) { return ")" + std::string(n - 1, '\x85'); };
  EXPECT_TRUE(Load(Pickle(lists(depth))).has_value());
  EXPECT_TRUE(Load(Pickle(tuples(depth))).has_value());
  ExpectFails(Load(Pickle(lists(depth + 1))), Errc::kLimit, "deeper than 1000");
  ExpectFails(Load(Pickle(tuples(depth + 1))), Errc::kLimit, "deeper than 1000");
  ExpectFails(Load(Pickle(std::string(300'000, ']') + std::string(299'999, 'a'))), Errc::kLimit,
              "deeper");
  ExpectFails(Load(Pickle(tuples(2'000'000))), Errc::kLimit, "deeper");
  // Depth that only shows when a shared list is filled after it was put in place.
  std::string body = "]r" + Le(5000, 4);
  for (std::uint64_t i = 0; i < 1500; ++i) body += "]r" + Le(i, 4) + "a";
  for (std::uint64_t i = 0; i < 1499; ++i) body += "j" + Le(i, 4) + "j" + Le(i + 1, 4) + "a0";
  ExpectFails(Load(Pickle(body)), Errc::kLimit, "deeper");
}

TEST(PickleHostile, ExponentialSharingIsCheap) {
  // 900 levels, each holding the one below eight times: 8^900 paths, 901 nodes.
  std::string body =
      "]q\0"
      "0"s;
  for (int i = 0; i < 900; ++i)
    body +=
        "(h\0h\0h\0h\0h\0h\0h\0h\0tq\0"
        "0"s;
  const Result<Graph> graph = Load(Pickle(body + "h\0"s));
  ASSERT_TRUE(graph.has_value()) << graph.error().message;
  EXPECT_EQ(graph->arena->node_count(), 901U);
}

TEST(PickleHostile, MemoryBombs) {
  // 100 million cells from a few bytes each: the budget stops the reader, not the machine.
  const std::string big = Str(std::string(1 << 18, 'A')) + "q\0"s;
  std::string copies = big + "0](";
  for (int i = 0; i < 400; ++i)
    copies += Glob("_codecs", "encode") + "h\0"s + Str("latin1") + "\x86R";
  ExpectFails(Load(Pickle(copies + "e")), Errc::kLimit, "bytes per byte of its pickle");
  std::string lists = "(" + std::string(450'000, ']') + "t";
  ExpectFails(Load(Pickle(lists)), Errc::kLimit, "bytes per byte");
  // A large memo index must not make a table of that size.
  EXPECT_TRUE(Load(Pickle("Nr\xFF\xFF\xFF\xFFj\xFF\xFF\xFF\xFF"
                          "0"))
                  .has_value());
  std::string steps;
  for (std::uint64_t i = 1; i < 200'000; ++i) steps += "r" + Le(i * 1000, 4);
  ExpectFails(Load(Pickle("N" + steps)), Errc::kLimit, "bytes per byte");
  // One long shape, used again and again.
  std::string tensors = Ints(std::vector<std::int64_t>(64, 1)) +
                        "q\1"
                        "0" +
                        StorageOf("FloatStorage", "0", 1) +
                        "q\2"
                        "0](";
  for (int i = 0; i < 10'000; ++i) {
    tensors += Glob("torch._utils", "_rebuild_tensor") + "(h\2K\0h\1h\1tR"s;
  }
  EXPECT_TRUE(Load(Pickle(tensors + "e")).has_value());
}

}  // namespace
}  // namespace shardwright::pickle
