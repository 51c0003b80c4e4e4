// SPDX-License-Identifier: Apache-2.0
// Parsers take time in proportion to their text.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "builders.h"
#include "files/dcp/index.h"
#include "files/pickle/reader.h"
#include "files/safetensors/header.h"
#include "files/safetensors/index.h"
#include "files/torch_pt/reader.h"
#include "files/zip/reader.h"
#include "legacy_parts.h"
#include "support/json/json.h"
#include "support/os/file.h"
#include "unit/complexity.h"

namespace shardwright {
namespace {

const auto kParseJson = [](const std::string& text) {
  const auto json = json::Parse(text, "x");
  ASSERT_TRUE(json) << json.error().message;
};

TEST(Complexity, Json) {
  const auto numbers = Listed(
      "[", [](std::size_t i) { return std::to_string(i); }, "]");
  ExpectLinear(30'000, numbers, kParseJson);
  const auto keys = UnknownKeys();
  ExpectLinear(10'000, keys, kParseJson);
  const auto backward = Listed(
      "{", [](std::size_t i) { return "\"k" + Digits(99'999'999 - i) + "\":0"; }, "}");
  ExpectLinear(10'000, backward, kParseJson);
  const auto objects = Listed(
      "[", [](std::size_t i) { return R"({"path":"f)" + Digits(i) + R"(","b":1})"; }, "]");
  ExpectLinear(10'000, objects, kParseJson);
  const auto text = [](std::size_t n) { return "[\"" + std::string(n, 'x') + "\\n\"]"; };
  ExpectLinear(500'000, text, kParseJson);
}

TEST(Complexity, JsonThatIsRefused) {
  const auto refused = [](const std::string& text) { EXPECT_FALSE(json::Parse(text, "x")); };
  const auto broken = Listed(
      "[", [](std::size_t i) { return std::to_string(i); }, "");
  ExpectLinear(30'000, broken, refused);
  const auto word = [](std::size_t n) { return std::string(n, 'x'); };
  ExpectLinear(4'000'000, word, refused);
}

TEST(Complexity, MessagePack) {
  const auto make = [](std::size_t n) {
    json::Json value = json::Json::object();
    for (std::size_t i = 0; i < n; ++i) value["k" + Digits(i)] = {i, "text"};
    return json::Json::to_msgpack(value);
  };
  const auto parse = [](const std::vector<std::uint8_t>& bytes) {
    EXPECT_TRUE(json::ParseMessagePack(std::as_bytes(std::span(bytes)), "x"));
  };
  ExpectLinear(5'000, make, parse);
}

TEST(Complexity, SafetensorsHeader) {
  const auto make = Listed(
      "{",
      [](std::size_t i) {
        return "\"t" + Digits(i) + R"(":{"dtype":"U8","shape":[1],"data_offsets":[)" +
               std::to_string(i) + "," + std::to_string(i + 1) + "]}";
      },
      "}");
  const auto parse = [](const std::string& text) {
    const auto tensors = static_cast<std::uint64_t>(std::count(text.begin(), text.end(), '[')) / 2;
    const auto header =
        safetensors::ParseHeader({text, safetensors::kLengthBytes + text.size() + tensors});
    ASSERT_TRUE(header) << header.error().message;
  };
  ExpectLinear(5'000, make, parse);
}

TEST(Complexity, SafetensorsIndex) {
  const auto make =
      Listed(R"({"weight_map":{)",
             [](std::size_t i) { return "\"t" + Digits(i) + R"(":"model.safetensors")"; }, "}}");
  const auto parse = [](const std::string& text) {
    EXPECT_TRUE(safetensors::ParseIndex(text, "x"));
  };
  ExpectLinear(10'000, make, parse);
}

/// A pickle with an object made by `n` times `part`.
template <class Part>
auto Pickle(const std::string& open, Part part, const std::string& close) {
  return Listed("\x80\x02" + open, part, close + ".", "");
}

TEST(Complexity, Pickle) {
  const auto load = [](const std::string& text) {
    const auto graph = pickle::Load(text);
    ASSERT_TRUE(graph) << graph.error().message;
  };
  const auto key = [](std::size_t i) { return "X" + Le(8, 4) + Digits(i); };
  const auto list = Pickle(
      "](", [](std::size_t i) { return "J" + Le(i, 4); }, "e");
  ExpectLinear(20'000, list, load);
  const auto dict = Pickle(
      "}(", [&](std::size_t i) { return key(i) + "K\x01"; }, "u");
  ExpectLinear(5'000, dict, load);
  const auto single = Pickle(
      "}", [&](std::size_t i) { return key(i) + "K\x01s"; }, "");
  ExpectLinear(5'000, single, load);
  const auto memo = Pickle(
      "](", [&](std::size_t i) { return key(i) + "r" + Le(i, 4); }, "e");
  ExpectLinear(10'000, memo, load);
  const auto tuples = Pickle(
      "](", [](std::size_t) { return std::string("K\x01\x85"); }, "e");
  ExpectLinear(20'000, tuples, load);
}

/// An index of DCP of `n` tensors in a chunk each, with the states of an optimizer.
std::string IndexOfTensors(std::size_t n) {
  dcp::Index index;
  index.files = {"__0_0.distcp"};
  index.has_paths = true;
  index.entries.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    dcp::Entry& entry = index.entries[i];
    entry.name = "optim.state." + Digits(i) + ".exp_avg";
    for (const std::size_t end :
         {entry.name.find('.'), entry.name.find(".0"), entry.name.rfind('.'), entry.name.size()}) {
      entry.path.push_back({static_cast<std::uint32_t>(end), false});
    }
    entry.is_tensor = true;
    entry.shape = {1};
    entry.chunks = {{{0}, {1}, {0, 0, 4 * i, 4}}};
  }
  return dcp::DumpIndex(index).value_or("");
}

/// An index of DCP of one tensor in `n` chunks.
std::string IndexOfChunks(std::size_t n) {
  dcp::Index index;
  index.files = {"__0_0.distcp"};
  dcp::Entry& entry = index.entries.emplace_back();
  entry.name = "w";
  entry.is_tensor = true;
  entry.shape = {n};
  entry.chunks.reserve(n);
  for (std::size_t i = 0; i < n; ++i) entry.chunks.push_back({{i}, {1}, {0, 0, 4 * i, 4}});
  return dcp::DumpIndex(index).value_or("");
}

TEST(Complexity, DcpIndex) {
  const auto parse = [](const std::string& bytes) {
    const auto index = dcp::ReadIndex(bytes);
    ASSERT_TRUE(index) << index.error().message;
    EXPECT_TRUE(dcp::CheckVolumes(*index));
    EXPECT_TRUE(dcp::CheckPaths(*index));
  };
  ExpectLinear(500, IndexOfTensors, parse);
  ExpectLinear(500, IndexOfChunks, parse);
}

TEST(Complexity, DcpIndexesOfRanks) {
  const auto unite = [](const std::string& bytes) {
    dcp::IndexUnion all;
    for (const char* name : {"__0.metadata", "__1.metadata"}) {
      const auto index = dcp::ReadIndex(bytes);
      ASSERT_TRUE(index);
      ASSERT_TRUE(all.Add(name, *index));
    }
    const auto made = std::move(all).Finish();
    ASSERT_TRUE(made) << made.error().message;
    EXPECT_FALSE(made->copies.empty());
  };
  ExpectLinear(500, IndexOfTensors, unite);
  ExpectLinear(500, IndexOfChunks, unite);
}

// The measure itself.
TEST(Complexity, QuadraticTimeIsSeen) {
  const auto make = [](std::size_t n) { return std::string(n, 'x'); };
  const auto parse = [](const std::string& text) {
    volatile std::size_t pairs = 0;
    for (std::size_t i = 0; i < text.size() * text.size(); ++i) pairs = pairs + 1;
  };
  EXPECT_GT(GrowthWhenDoubled(200, kMostGrowth, make, parse), kMostGrowth);
}

class ComplexityOfFiles : public FileTest {};

TEST_F(ComplexityOfFiles, ZipDirectory) {
  const auto make = [](std::size_t n) {
    ZipFile file;
    file.members.reserve(n);
    for (std::size_t i = 0; i < n; ++i) file.members.push_back(Plain("a/" + Digits(i), "1"));
    return Build(file);
  };
  const auto parse = [&](const std::string& bytes) {
    Write(bytes);
    const auto file = os::File::OpenRead(path());
    ASSERT_TRUE(file);
    const auto container = zip::ReadContainer(files::Part(*file));
    ASSERT_TRUE(container) << container.error().message;
  };
  ExpectLinear(4'000, make, parse);
}

TEST_F(ComplexityOfFiles, LegacyStream) {
  const auto make = [](std::size_t n) {
    torch_pt::LegacyParts file;
    file.object = Pickle(
        "](", [](std::size_t i) { return torch_pt::LegacyTensor(Digits(i), "FloatStorage", 1); },
        "e")(n);
    file.keys = Pickle(
        "](", [](std::size_t i) { return pickle::Str(Digits(i)); }, "e")(n);
    file.data = Listed(
        "", [](std::size_t i) { return Le(1, 8) + Le(i, 4); }, "", "")(n);
    return file.Bytes();
  };
  const auto parse = [&](const std::string& bytes) {
    Write(bytes);
    const auto file = os::File::OpenRead(path());
    ASSERT_TRUE(file);
    const auto metadata = torch_pt::ReadMetadata(*file);
    ASSERT_TRUE(metadata) << metadata.error().message;
    const auto document = torch_pt::Parse(*metadata);
    ASSERT_TRUE(document) << document.error().message;
    EXPECT_EQ(document->storages.size(), document->root->items.size());
  };
  ExpectLinear(1'000, make, parse);
}

}  // namespace
}  // namespace shardwright
