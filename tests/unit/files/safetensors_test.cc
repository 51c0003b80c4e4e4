// SPDX-License-Identifier: Apache-2.0
// `.safetensors`: every rule of docs/formats/safetensors.md, on files that are made byte by byte.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "builders.h"
#include "files/safetensors/header.h"
#include "files/safetensors/index.h"
#include "files/safetensors/layout.h"
#include "support/base/memory.h"
#include "support/os/file.h"

namespace shardwright::safetensors {
namespace {

/// A header text with `data_bytes` behind it.
Result<Header> Parse(const std::string& text, std::uint64_t data_bytes) {
  return ParseHeader({text, kLengthBytes + text.size() + data_bytes});
}

std::string EntryText(std::string_view dtype, std::string_view shape, std::uint64_t first,
                      std::uint64_t last) {
  return R"({"dtype":")" + std::string(dtype) + R"(","shape":)" + std::string(shape) +
         R"(,"data_offsets":[)" + std::to_string(first) + "," + std::to_string(last) + "]}";
}

/// A header of one tensor "a".
Result<Header> ParseOne(std::string_view dtype, std::string_view shape, std::uint64_t bytes) {
  return Parse(R"({"a":)" + EntryText(dtype, shape, 0, bytes) + "}", bytes);
}

class FilesTest : public FileTest {
 protected:
  Result<HeaderText> Open(std::string_view content) const {
    Write(content);
    const auto file = os::File::OpenRead(path());
    if (!file) return tl::unexpected<Error>(file.error());
    return ReadHeaderText(*file);
  }
};

TEST(Header, TensorsComeInTheOrderOfTheirBytes) {
  const auto header =
      Parse(R"({"b":)" + EntryText("F32", "[2,3]", 2, 26) + R"(,"a":)" +
                EntryText("BF16", "[]", 0, 2) + R"(,"__metadata__":{"format":"pt"}})",
            26);
  ASSERT_TRUE(header) << header.error().message;
  ASSERT_EQ(header->entries.size(), 2U);
  EXPECT_EQ(header->entries[0].name, "a");
  EXPECT_EQ(header->entries[0].dtype, DType::kBF16);
  EXPECT_TRUE(header->entries[0].shape.empty());
  EXPECT_EQ(header->entries[1].shape, (Shape{2, 3}));
  EXPECT_EQ(header->entries[1].offset, header->entries[0].offset + 2);
  EXPECT_EQ(header->metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_TRUE(header->warnings.empty());
}

TEST(Header, HasEveryElementType) {
  const std::map<std::string, std::pair<DType, std::uint64_t>> types = {
      {"BOOL", {DType::kBool, 8}},      {"U8", {DType::kU8, 8}},
      {"I8", {DType::kI8, 8}},          {"F8_E4M3", {DType::kF8E4M3, 8}},
      {"F8_E5M2", {DType::kF8E5M2, 8}}, {"F8_E4M3FNUZ", {DType::kF8E4M3Fnuz, 8}},
      {"F8_E8M0", {DType::kF8E8M0, 8}}, {"F8_E5M2FNUZ", {DType::kF8E5M2Fnuz, 8}},
      {"I16", {DType::kI16, 16}},       {"U16", {DType::kU16, 16}},
      {"F16", {DType::kF16, 16}},       {"BF16", {DType::kBF16, 16}},
      {"I32", {DType::kI32, 32}},       {"U32", {DType::kU32, 32}},
      {"F32", {DType::kF32, 32}},       {"I64", {DType::kI64, 64}},
      {"U64", {DType::kU64, 64}},       {"F64", {DType::kF64, 64}},
      {"C64", {DType::kC64, 64}},       {"F4", {DType::kF4E2M1x2, 4}},
      {"F6_E2M3", {DType::kF6E2M3, 6}}, {"F6_E3M2", {DType::kF6E3M2, 6}},
  };
  for (const auto& [word, type] : types) {
    const auto header = ParseOne(word, "[2,4]", type.second);
    ASSERT_TRUE(header) << word << ": " << header.error().message;
    EXPECT_EQ(header->entries[0].dtype, type.first) << word;
    EXPECT_EQ(Word(type.first), word);
    const auto shape = ElemShape(header->entries[0]);
    ASSERT_TRUE(shape) << shape.error().message;
    EXPECT_EQ(Elems(*shape) * ItemSize(type.first), type.second) << word;
  }
  ExpectFails(ParseOne("F5", "[8]", 5), Errc::kUnsupported, "tensor \"a\": unknown dtype \"F5\"");
  EXPECT_EQ(Word(DType::kC128), "");
}

TEST(Header, PackedTypesFillWholeBytes) {
  ExpectFails(ParseOne("F4", "[]", 0), Errc::kBadInput, "4 bits are not a whole number of bytes");
  ExpectFails(ParseOne("F6_E2M3", "[2]", 1), Errc::kBadInput, "12 bits");
  const auto header = ParseOne("F4", "[2,3]", 3);
  ASSERT_TRUE(header) << header.error().message;
  ExpectFails(ElemShape(header->entries[0]), Errc::kUnsupported, "rows of F4");
  const auto six = ParseOne("F6_E3M2", "[3,8]", 18);
  ASSERT_TRUE(six);
  const auto shape = ElemShape(six->entries[0]);
  ASSERT_TRUE(shape);
  EXPECT_EQ(*shape, (Shape{3, 6}));
}

TEST(Header, CountsTheMemoryOfItsTensors) {
  const std::uint64_t before = TextMemory();
  LimitTextMemory(0);  // the least
  const auto parsed = [](std::size_t tensors) {
    std::string text = "{";
    for (std::size_t i = 0; i < tensors; ++i) {
      text += (i == 0 ? "\"" : ",\"") + std::to_string(i) + "\":" + EntryText("U8", "[0]", 0, 0);
    }
    return Parse(text + "}", 0);
  };
  EXPECT_TRUE(parsed(10'000));
  ExpectFails(parsed(20'000), Errc::kLimit, "header: ");
  ExpectFails(parsed(20'000), Errc::kLimit, "raise --memory");
  std::string metadata = R"({"__metadata__":{)";
  for (int i = 0; i < 500'000; ++i) metadata += "\"" + std::to_string(i) + "\":\"\",";
  ExpectFails(Parse(metadata + "\"\":\"\"}}", 0), Errc::kLimit, "raise --memory");
  LimitTextMemory(before);
}

TEST(Header, EmptyFilesAndEmptyTensors) {
  EXPECT_TRUE(Parse("{}", 0));
  ExpectFails(Parse("{}", 4), Errc::kBadInput, "4 bytes follow the last tensor");
  const std::string whole = EntryText("U8", "[4]", 0, 4);
  for (const int at : {0, 4}) {
    const auto header = Parse(R"({"a":)" + whole + R"(,"e":)" +
                                  EntryText("F32", "[3,0]", static_cast<std::uint64_t>(at),
                                            static_cast<std::uint64_t>(at)) +
                                  "}",
                              4);
    EXPECT_TRUE(header) << at;
  }
  ExpectFails(Parse(R"({"a":)" + whole + R"(,"e":)" + EntryText("F32", "[0]", 2, 2) + "}", 4),
              Errc::kBadInput, "tensor \"e\": overlaps");
}

TEST(Header, CoversTheDataExactlyOnce) {
  const auto two = [](std::uint64_t first, std::uint64_t last, std::uint64_t bytes) {
    return Parse(R"({"a":)" + EntryText("U8", "[4]", 0, 4) + R"(,"b":)" +
                     EntryText("U8", "[" + std::to_string(last - first) + "]", first, last) + "}",
                 bytes);
  };
  EXPECT_TRUE(two(4, 8, 8));
  ExpectFails(two(5, 8, 8), Errc::kBadInput,
              "tensor \"b\": a hole of 1 bytes precedes it, after tensor \"a\"");
  ExpectFails(two(3, 8, 8), Errc::kBadInput,
              "tensor \"b\": overlaps the data before it, after tensor \"a\"");
  ExpectFails(two(0, 4, 4), Errc::kBadInput, "overlaps");
  ExpectFails(two(4, 8, 9), Errc::kBadInput, "1 bytes follow the last tensor");
  ExpectFails(two(4, 8, 7), Errc::kBadInput,
              "truncated: 8 bytes of tensors expected from the header, found 7");
}

TEST(Header, BytesAreThoseOfTheShape) {
  ExpectFails(ParseOne("F32", "[3]", 8), Errc::kBadInput,
              "tensor \"a\": 12 bytes expected from shape [3] of F32, found data_offsets [0, 8]");
  ExpectFails(Parse(R"({"a":)" + EntryText("U8", "[0]", 4, 0) + "}", 4), Errc::kBadInput, "\"a\"");
  ExpectFails(ParseOne("F32", "[4294967296,4294967296]", 0), Errc::kBadInput, "overflows");
  // A zero among the extents does not make the rest of them sane.
  ExpectFails(ParseOne("F32", "[0,4294967296,4294967296]", 0), Errc::kBadInput, "overflows");
  ExpectFails(ParseOne("U8", "[0,4611686018427387905]", 0), Errc::kBadInput, "above 2^62");
  ExpectFails(ParseOne("U8", "[9223372036854775808]", 0), Errc::kBadInput, "above 2^63 - 1");
  ExpectFails(ParseOne("U8", "[99999999999999999999999]", 0), Errc::kBadInput, "whole number");
  std::string many = "[1";
  for (int i = 0; i < 64; ++i) many += ",1";
  ExpectFails(ParseOne("U8", many + "]", 1), Errc::kBadInput, "more than 64 dimensions");
}

TEST(Header, NumbersAreWholeAndNotNegative) {
  for (const char* shape : {"[1.0]", "[1e0]", "[-1]", "[\"1\"]", "[null]", "[true]", "[[1]]", "1",
                            "\"1\"", "null", "{}"}) {
    const auto header = ParseOne("U8", shape, 1);
    ASSERT_FALSE(header) << shape;
    EXPECT_EQ(header.error().code, Errc::kBadInput) << shape;
    EXPECT_NE(header.error().message.find("tensor \"a\""), std::string::npos)
        << header.error().message;
  }
}

TEST(Header, NothingComesTwice) {
  const std::string one = EntryText("U8", "[1]", 0, 1);
  // Readers disagree about which of the two counts.
  ExpectFails(Parse(R"({"a":)" + one + R"(,"a":)" + one + "}", 1), Errc::kBadInput,
              "tensor \"a\": appears twice in the header");
  ExpectFails(Parse(R"({"\u0061":)" + one + R"(,"a":)" + EntryText("I8", "[1]", 1, 2) + "}", 2),
              Errc::kBadInput, "twice in the header");
  ExpectFails(Parse(R"({"__metadata__":{},"__metadata__":{}})", 0), Errc::kBadInput,
              "__metadata__: appears twice");
  ExpectFails(Parse(R"({"__metadata__":{"k":"1","k":"2"}})", 0), Errc::kBadInput,
              "key \"k\" appears twice");
  ExpectFails(Parse(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
              Errc::kBadInput, "field dtype appears twice");
}

TEST(Header, EntriesHaveTheirFields) {
  ExpectFails(Parse(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1), Errc::kBadInput,
              "tensor \"a\": dtype is missing");
  ExpectFails(Parse(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1), Errc::kBadInput,
              "shape is missing");
  ExpectFails(Parse(R"({"a":{"dtype":"U8","shape":[1]}})", 1), Errc::kBadInput,
              "data_offsets is missing");
  ExpectFails(Parse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1), Errc::kBadInput,
              "two data_offsets");
  ExpectFails(Parse(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,1]}})", 1),
              Errc::kBadInput, "two data_offsets");
  ExpectFails(Parse(R"({"a":["U8",[1],[0,1]]})", 1), Errc::kBadInput, "an object expected");
  ExpectFails(Parse(R"({"a":null})", 0), Errc::kBadInput, "an object expected");
  ExpectFails(Parse(R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1), Errc::kBadInput,
              "a text expected for dtype");
}

TEST(Header, UnknownFieldsAreTold) {
  const auto header = Parse(
      R"({"a":{"x":{"y":[1,{"dtype":3}]},"dtype":"U8","z":-1,"shape":[1],"data_offsets":[0,1]}})",
      1);
  ASSERT_TRUE(header) << header.error().message;
  ASSERT_EQ(header->warnings.size(), 1U);
  EXPECT_NE(header->warnings[0].find("\"x\""), std::string::npos);
  EXPECT_EQ(header->entries[0].dtype, DType::kU8);
  const std::string deep = std::string(70, '[') + std::string(70, ']');
  ExpectFails(Parse(R"({"a":{"x":)" + deep + "}}", 0), Errc::kBadInput, "more than 64 levels");
}

TEST(Header, MetadataIsTextByText) {
  const auto null = Parse(R"({"__metadata__":null})", 0);
  ASSERT_TRUE(null) << null.error().message;
  EXPECT_TRUE(null->metadata.empty());
  for (const char* value : {"1", "null", "true", "[]", "{}", "-1", "1.5"}) {
    const auto header = Parse(R"({"__metadata__":{"k":)" + std::string(value) + "}}", 0);
    ASSERT_FALSE(header) << value;
    EXPECT_NE(header.error().message.find("__metadata__"), std::string::npos)
        << header.error().message;
  }
  ExpectFails(Parse(R"({"__metadata__":"text"})", 0), Errc::kBadInput, "an object expected");
}

TEST(Header, IsOneObjectOfUtf8) {
  const std::string end = EntryText("U8", "[1]", 0, 1) + "}";
  ExpectFails(Parse("[]", 0), Errc::kBadInput, "does not begin with {");
  ExpectFails(Parse("    ", 0), Errc::kBadInput, "does not begin with {");
  ExpectFails(Parse("\xEF\xBB\xBF{}", 0), Errc::kBadInput, "does not begin with {");
  ExpectFails(Parse("{} {}", 0), Errc::kBadInput, "invalid JSON at byte");
  ExpectFails(Parse(std::string("{}\0", 3), 0), Errc::kBadInput, "invalid JSON at byte");
  ExpectFails(Parse("{\"\xFF\":" + end, 1), Errc::kBadInput, "invalid JSON at byte");
  ExpectFails(Parse("{\"\\ud800\":" + end, 1), Errc::kBadInput, "invalid JSON at byte");
  ExpectFails(Parse("{\"a\":", 1), Errc::kBadInput, "invalid JSON at byte");
  ExpectFails(Parse("{\"" + std::string(70'000, 'n') + "\":" + end, 1), Errc::kLimit, "a name of");
}

TEST(Header, WhiteSpaceAroundItIsTolerated) {
  const auto spaces = Parse("{}   ", 0);
  ASSERT_TRUE(spaces);
  EXPECT_TRUE(spaces->warnings.empty());
  const auto before = Parse(" \n{}", 0);
  ASSERT_TRUE(before) << before.error().message;
  EXPECT_EQ(before->warnings.size(), 1U);
  const auto after = Parse("{}\n", 0);
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->warnings.size(), 1U);
}

TEST_F(FilesTest, WhatIsOftenFoundUnderTheNameIsNamed) {
  ExpectFails(Open("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"),
              Errc::kBadInput, "a pointer of Git LFS");
  ExpectFails(Open(std::string("PK\x03\x04", 4) + std::string(40, '\0')), Errc::kBadInput,
              "a zip archive");
  ExpectFails(Open("\x80\x02}q.................."), Errc::kBadInput, "a pickle");
  ExpectFails(Open("<!DOCTYPE html><html></html>"), Errc::kBadInput, "a web page");
  ExpectFails(Open(""), Errc::kBadInput, "0 bytes long");
  ExpectFails(Open("short"), Errc::kBadInput, "5 bytes long");
}

TEST_F(FilesTest, LengthsThatLookLikeOtherFiles) {
  // The first bytes of pickles of protocols 2 to 5.
  for (const std::size_t bytes : {0x280U, 0x380U, 0x480U, 0x580U, 0x10280U}) {
    const std::string text = "{}" + std::string(bytes - 2, ' ');
    const auto file = Open(Le(bytes, 8) + text);
    ASSERT_TRUE(file) << file.error().message;
    EXPECT_EQ(file->text, text);
  }
}

TEST_F(FilesTest, LengthsThatCannotBe) {
  ExpectFails(Open(Le(0, 8) + "{}"), Errc::kBadInput, "a header of 0 bytes");
  ExpectFails(Open(Le(1, 8) + "{}"), Errc::kBadInput, "a header of 1 bytes");
  ExpectFails(Open(Le(3, 8) + "{}"), Errc::kBadInput, "truncated");
  ExpectFails(Open(Le(~0ULL, 8) + "{}"), Errc::kBadInput, "not a safetensors file");
  ExpectFails(Open(Le(100'000'001, 8) + "{}"), Errc::kBadInput, "at most 100000000");
  const auto file = Open(Le(2, 8) + "{}data");
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(file->text, "{}");
  EXPECT_EQ(file->file_bytes, 14U);
}

std::vector<TensorSpec> Specs() {
  return {{"b", DType::kU8, {3}},       {"z", DType::kI64, {1}},   {"a", DType::kBF16, {2, 2}},
          {"f", DType::kF32, {1}},      {"e", DType::kF32, {0}},   {"p", DType::kF4E2M1x2, {2, 3}},
          {"\n\"\\", DType::kBool, {}}, {"s", DType::kF6E2M3, {6}}};
}

TEST(Layout, WidestTypesFirstAndNamesAmongThem) {
  const auto layout = Layout::Make(Specs(), {{"format", "pt"}, {"a", "b"}});
  ASSERT_TRUE(layout) << layout.error().message;
  std::string names;
  for (const std::uint32_t index : layout->order()) names += Specs()[index].name.substr(0, 1);
  EXPECT_EQ(names, "zefabsp\n");
  EXPECT_EQ(layout->head().size() % Layout::kAlignBytes, 0U);
  EXPECT_EQ(layout->head().substr(8, 48), R"({"__metadata__":{"a":"b","format":"pt"},"z":{"dt)");
  const auto again = ParseHeader({layout->head().substr(8), layout->file_bytes()});
  ASSERT_TRUE(again) << again.error().message;
  ASSERT_EQ(again->entries.size(), Specs().size());
  for (const Entry& entry : again->entries) {
    const auto specs = Specs();
    const auto at = std::find_if(specs.begin(), specs.end(),
                                 [&](const TensorSpec& spec) { return spec.name == entry.name; });
    ASSERT_NE(at, specs.end()) << entry.name;
    const auto index = static_cast<std::size_t>(at - specs.begin());
    EXPECT_EQ(entry.dtype, at->dtype);
    EXPECT_EQ(entry.offset, layout->offset(index));
    EXPECT_EQ(entry.bytes, layout->bytes(index));
    const auto shape = ElemShape(entry);
    ASSERT_TRUE(shape);
    EXPECT_EQ(*shape, at->shape);
    EXPECT_EQ(entry.offset % ItemSize(entry.dtype), 0U);
  }
}

TEST(Layout, TheLengthInFrontIsThatOfTheHeader) {
  const auto layout = Layout::Make({}, {});
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout->head(), Le(56, 8) + "{}" + std::string(54, ' '));
  EXPECT_EQ(layout->file_bytes(), 64U);
}

TEST(Layout, RefusesWhatTheFormatCannotHold) {
  const auto one = [](const TensorSpec& spec) { return Layout::Make(std::span(&spec, 1), {}); };
  ExpectFails(one({"", DType::kF32, {1}}), Errc::kBadInput,
              "the name is empty, reserved or not UTF-8");
  ExpectFails(one({"__metadata__", DType::kF32, {1}}), Errc::kBadInput, "does not allow");
  ExpectFails(one({"\xFF", DType::kF32, {1}}), Errc::kBadInput, "does not allow");
  ExpectFails(one({"c", DType::kC128, {1}}), Errc::kUnsupported,
              "tensor \"c\": complex128: safetensors has no such type");
  ExpectFails(one({"s", DType::kF6E2M3, {4}}), Errc::kBadInput, "packed rows of [4] bytes");
  const std::vector<TensorSpec> twice = {{"t", DType::kF32, {1}}, {"t", DType::kU8, {1}}};
  ExpectFails(Layout::Make(twice, {}), Errc::kBadInput, "the name appears twice");
}

TEST(Layout, RefusesAHeaderThatNobodyReads) {
  const std::string name(60'000, 'n');
  std::vector<TensorSpec> specs;
  specs.reserve(1700);
  for (int i = 0; i < 1700; ++i) specs.push_back({name + std::to_string(i), DType::kU8, {0}});
  ExpectFails(Layout::Make(specs, {}), Errc::kLimit, "too many tensors for one file");
}

TEST(Index, SaysWhichFileHoldsATensor) {
  const auto index = ParseIndex(
      R"({"metadata":{"total_size":12,"more":1},"weight_map":{"a":"x.safetensors","b":"y"}})",
      "index");
  ASSERT_TRUE(index) << index.error().message;
  EXPECT_EQ(index->total_bytes, 12U);
  EXPECT_EQ(index->files.at("a"), "x.safetensors");
  const auto again = ParseIndex(IndexText(*index), "again");
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->files, index->files);
  EXPECT_EQ(again->total_bytes, index->total_bytes);
  const auto real = ParseIndex(R"({"metadata":{"total_size":1.2e1},"weight_map":{}})", "index");
  ASSERT_TRUE(real);
  EXPECT_FALSE(real->total_bytes);
}

TEST(Index, FilesAreBaseNames) {
  for (const char* name : {"../x", "/etc/passwd", "a/b", "..", ".", "", "nul\\u0000"}) {
    const auto index =
        ParseIndex(R"({"weight_map":{"a":")" + std::string(name) + R"("}})", "index.json");
    ASSERT_FALSE(index) << name;
    EXPECT_EQ(index.error().code, Errc::kBadInput);
    EXPECT_NE(index.error().message.find("index.json: weight_map of \"a\""), std::string::npos)
        << index.error().message;
  }
  ExpectFails(ParseIndex(R"({"weight_map":{"a":1}})", "i"), Errc::kBadInput,
              "a file name expected");
}

TEST(Index, MustBeOne) {
  ExpectFails(ParseIndex("{}", "i"), Errc::kBadInput, "no object weight_map");
  ExpectFails(ParseIndex("[]", "i"), Errc::kBadInput, "no object weight_map");
  ExpectFails(ParseIndex(R"({"weight_map":{"a":"x","a":"y"}})", "i"), Errc::kBadInput, "twice");
  ExpectFails(ParseIndex(R"({"weight_map":{)", "i"), Errc::kBadInput, "i: line 1");
}

TEST(Index, NamesOfFilesCountFromOne) {
  EXPECT_EQ(FileName(0, 1), "model.safetensors");
  EXPECT_EQ(FileName(0, 3), "model-00001-of-00003.safetensors");
  EXPECT_EQ(FileName(2, 3), "model-00003-of-00003.safetensors");
}

// Every byte of a header as each character that means something in JSON.
TEST(Header, EveryChangedByteIsRefusedOrReadAsSomethingElse) {
  const std::string whole = R"({"__metadata__":{"f":"pt"},"a":)" +
                            EntryText("F32", "[2,3]", 0, 24) + R"(,"b\u0041":)" +
                            EntryText("BF16", "[]", 24, 26) + "}";
  ASSERT_TRUE(Parse(whole, 26));
  const std::string characters = "{}[]\",:\\ -+.0129eEtfnu/\x01\x7F\xC3\xFF";
  for (std::size_t at = 0; at < whole.size(); ++at) {
    for (const char character : characters) {
      std::string changed = whole;
      changed[at] = character;
      const auto header = Parse(changed, 26);
      if (!header) {
        EXPECT_TRUE(header.error().code == Errc::kBadInput ||
                    header.error().code == Errc::kUnsupported)
            << changed << header.error().message;
        continue;
      }
      for (const Entry& entry : header->entries) {
        EXPECT_LE(entry.offset, kLengthBytes + changed.size() + 26) << changed;
      }
    }
    EXPECT_FALSE(Parse(whole.substr(0, at), 26)) << at;
  }
}

}  // namespace
}  // namespace shardwright::safetensors
