// SPDX-License-Identifier: Apache-2.0
// Pickles that contain every readable type, with one byte changed, removed or last, or with too
// little memory: the reader fails, or returns an object that can be written again.

#include <gtest/gtest.h>

#include <functional>

#include "files/dcp/index.h"
#include "files/pickle/fold.h"
#include "files/pickle/reader.h"
#include "files/pickle/writer.h"
#include "pickles.h"

namespace shardwright::pickle {
namespace {

using std::string_literals::operator""s;

const std::string kView = "K\0K\x04\x85K\x01\x85"s;  // offset, size, stride
const std::string kGetattr = Glob("builtins", "getattr");

/// Values of every kind, each by every opcode that makes it.
std::vector<std::string> Values() {
  const std::string floats = StorageOf("FloatStorage", "0", 4);
  const std::string raw = StorageOf("UntypedStorage", "1", 16);
  const std::string tensor = TensorOf(4, 0, {4}, {1});
  const std::string state = "}" + Str("ds_id") + Str("0") + "s";
  const std::string v2 = Glob("torch._utils", "_rebuild_tensor_v2");
  const std::string from = Glob("torch._tensor", "_rebuild_from_type_v2") + "(";
  const std::string encode = Glob("_codecs", "encode");
  return {
      "N\x88\x89\x87"s,
      "K\x01M\1\1J\1\0\0\0\x87"s,
      "\x8A\x01\xFF\x8B" + Le(2, 4) + "\1\1G\x3F\xF0\0\0\0\0\0\0\x87"s,
      "\x8A\x09" + Le(0, 8) + "\x01",
      "U\1aT" + Le(1, 4) + "b\x86",
      ShortStr("c") + "\x8D" + Le(1, 8) + "d" + Str("\xC3\xBC") + "\x87",
      "C\1aB" + Le(1, 4) + "b\x8E" + Le(1, 8) + "c\x87",
      "\x96" + Le(2, 8) + "xy",
      encode + Str("a\xC3\xBF") + Str("latin1") + "\x86R",
      Glob("builtins", "bytearray") + "C\1x\x85R",
      Glob("builtins", "bytearray") + Str("x") + Str("latin1") + "\x86R",
      Glob("builtins", "bytes") + ")R",
      "](NNeNa",
      "}(K\1NK\2NuK\3Ns",
      "\x8F(K\1K\2\x90",
      "(K\1K\2\x91",
      Glob("builtins", "set") + "](K\1K\2e\x85R",
      Glob("builtins", "frozenset") + "]K\1a\x85R",
      Glob("collections", "OrderedDict") + "](]K\1aK\2aK\3K\4\x86" + "e\x85R",
      kHooks + Str("k") + "Ns}" + Str("_metadata") + kHooks + "sb",
      Glob("torch", "Size") + "K\2K\3\x86\x85R",
      Glob("torch", "float32"),
      tensor,
      Glob("torch._utils", "_rebuild_tensor") + "(" + floats + kView + "tR",
      v2 + "(" + floats + kView + "\x88" + kHooks + "}" + Str("conj") + "\x89stR",
      Glob("torch._utils", "_rebuild_tensor_v3") + "(" + raw + kView + "\x89" + kHooks +
          Glob("torch", "uint16") + "tR",
      Glob("torch._utils", "_rebuild_parameter") + tensor + "\x88" + kHooks + "\x87R",
      Glob("torch._utils", "_rebuild_parameter_with_state") + "(" + tensor + "\x88" + kHooks +
          state + "tR",
      from + v2 + Glob("torch", "Tensor") + "(" + floats + kView + "\x89" + kHooks + "t" + state +
          "N\x86tR",
      from + Glob("torch._utils", "_rebuild_parameter") + Glob("torch.nn.parameter", "Parameter") +
          tensor + "\x88" + kHooks + "\x87NtR",
      Glob("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") + "(" + tensor +
          Glob("torch", "float32") + Str("xpu:0") + "\x89tR",
      Glob("m", "C") + "K\1\x85R}" + Str("a") + "Nsb",
      Glob("m", "C") + ")\x81(NNe",
      Glob("m", "C") + "K\1\x85}" + Str("b") + "Ns\x92",
      Glob("copyreg", "__newobj__") + Glob("m", "C") + "K\1\x86R",
      Glob("copyreg", "__newobj_ex__") + Glob("m", "C") + ")}\x87R",
      ShortStr("m") + ShortStr("Outer.Mid.Inner") + "\x93)\x81",
      kGetattr + Glob("m", "Outer") + Str("Inner") + "\x86R)\x81",
      Glob("torch.distributed.device_mesh", "DeviceMesh") + ")\x81}(" + Str("_rank") + "K\3" +
          Str("_root_mesh") + "Nub",
      "]\x94(h\0h\0t0"s,
      "]r" + Le(70'000, 4) + "j" + Le(70'000, 4) + "\x86",
      "(NN1N",
      "N2\x86",
      "(0N"s,
      "\x95" + Le(2, 8) + "K\7",
  };
}

class Silent final : public Folder {
 public:
  Result<bool> Take(std::uint64_t /*dict*/, const Cell& key, const Cell& value) override {
    seen += Describe(key) + Describe(value);
    return key.is_int() && key.integer() == 2;
  }
  Status Root(const Cell& root) override {
    seen += Describe(root);
    return {};
  }
  std::string seen;
};

/// Wrong input gets one of these codes, and where it is.
void ExpectRefusal(const Error& error, const std::string& where) {
  EXPECT_TRUE(error.code == Errc::kBadInput || error.code == Errc::kUnsupported ||
              error.code == Errc::kLimit)
      << where << ": " << error.message;
  EXPECT_FALSE(error.message.empty()) << where;
}

/// Expects an error, or a graph that is the same after it was written and read.
void ExpectRefusedOrWritable(const std::string& bytes, const std::string& where) {
  const Result<Graph> graph = Load(bytes);
  if (!graph) return ExpectRefusal(graph.error(), where);
  const Result<Dumped> written = Dump(graph->root, graph->storages);
  if (!written) return ExpectRefusal(written.error(), where);
  const Result<Graph> again = Load(written->bytes);
  ASSERT_TRUE(again) << where << ": " << again.error().message;
  EXPECT_LE(again->storages.size(), graph->storages.size()) << where << ": those in use";
  const Result<Dumped> twice = Dump(again->root, again->storages);
  ASSERT_TRUE(twice) << where << ": " << twice.error().message;
  EXPECT_TRUE(twice->bytes == written->bytes) << where;
}

void ExpectRefusedOrFolded(const std::string& bytes, const std::string& where) {
  Silent folder;
  if (const Status folded = Fold(bytes, folder); !folded) {
    ExpectRefusal(folded.error(), where);
  } else {
    EXPECT_FALSE(folder.seen.empty()) << where;
  }
}

/// Opcodes, and bytes of operands.
const std::string kBytes =
    "().012BGJKMNQRX]ehqrstu}\0\1\2\x7F\x80\x81\x85\x87\x88\x8A\x8C\x8E\x90\x91\x92\x93\x94\x95\xFF"s;

/// Every third change of a byte, in turn, every byte left out, and every beginning.
void ForChanges(const std::string& whole,
                const std::function<void(const std::string&, const std::string&)>& visit) {
  for (std::size_t at = 0; at < whole.size(); ++at) {
    const std::string where = "byte " + std::to_string(at);
    for (std::size_t i = at % 3; i < kBytes.size(); i += 3) {
      std::string changed = whole;
      changed[at] = kBytes[i];
      visit(changed, where);
    }
    visit(whole.substr(0, at) + whole.substr(at + 1), where + " left out");
    visit(whole.substr(0, at), where + " is the end");
  }
}

TEST(PickleChanged, EveryValueIsReadAndWritten) {
  for (const std::string& value : Values()) {
    const std::string whole = Pickle(value, 5);
    const Result<Graph> graph = Load(whole);
    ASSERT_TRUE(graph) << testing::PrintToString(value) << ": " << graph.error().message;
    ExpectRefusedOrWritable(whole, "unchanged");
  }
}

TEST(PickleChanged, EveryChangeIsRefusedOrReadAsSomethingElse) {
  for (const std::string& value : Values()) {
    ForChanges(Pickle(value, 5), [](const std::string& changed, const std::string& where) {
      ExpectRefusedOrWritable(changed, where);
      ExpectRefusedOrFolded(changed, where);
    });
    if (HasFailure()) FAIL() << testing::PrintToString(value);
  }
}

// Increases the memory limit from none until it suffices.
TEST(PickleChanged, EveryShortageOfMemoryIsALimit) {
  for (const std::string& value : Values()) {
    const std::string whole = Pickle(value, 5);
    std::uint64_t enough = 1;
    while (enough < (1 << 20) && !Load(whole, enough)) enough *= 2;
    bool loads = false;
    for (std::uint64_t most = 0; most <= enough; most += 8) {
      const Result<Graph> graph = Load(whole, most);
      EXPECT_FALSE(loads && !graph) << "more is no less: " << most;
      loads = loads || graph;
      if (!graph) {
        EXPECT_EQ(graph.error().code, Errc::kLimit) << graph.error().message;
      }
    }
  }
}

TEST(PickleChanged, AnIndexIsRefusedOrCanBeWrittenAgain) {
  dcp::Index index;
  dcp::Entry tensor;
  tensor.name = "m.0.w";
  tensor.path = {{1, false}, {3, true}, {5, false}};
  tensor.is_tensor = true;
  tensor.dtype = DType::kF32;
  tensor.shape = {3, 4};
  const std::uint32_t file = index.FileNumber("__0_0.distcp");
  tensor.chunks = {{{0, 0}, {2, 4}, {file, 0, 0, 32}}, {{2, 0}, {1, 4}, {file, 0, 32, 16}}};
  dcp::Entry object;
  object.name = "n";
  object.at = {index.FileNumber("__1_0.distcp"), 0, 3, 900};
  index.entries = {tensor, object};
  index.has_paths = true;
  const Result<std::string> whole = dcp::DumpIndex(index);
  ASSERT_TRUE(whole) << whole.error().message;
  int read = 0;
  ForChanges(*whole, [&](const std::string& changed, const std::string& where) {
    const Result<dcp::Index> found = dcp::ReadIndex(changed);
    if (!found) return ExpectRefusal(found.error(), where);
    ++read;
    const Result<std::string> written = dcp::DumpIndex(*found);
    if (!written) return ExpectRefusal(written.error(), where);
    const Result<dcp::Index> again = dcp::ReadIndex(*written);
    ASSERT_TRUE(again) << where << ": " << again.error().message;
    EXPECT_TRUE(*dcp::DumpIndex(*again) == *written) << where;
  });
  EXPECT_GT(read, 0);
}

}  // namespace
}  // namespace shardwright::pickle
