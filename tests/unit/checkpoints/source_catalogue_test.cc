// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "checkpoints/open_source.h"
#include "checkpoints/registry.h"
#include "fixtures.h"

namespace shardwright::checkpoints {
namespace {

SourceSet MadeUp() {
  std::mt19937 random(7);
  SourceSet out;
  out.format = "universal";
  out.tag = "global_step12";
  out.manifest = std::string("{}\0x", 4);
  out.warnings = {"one", ""};
  for (int i = 0; i < 20; ++i) {
    SourceFile file;
    file.name = "zero/p" + std::to_string(i) + "/fp32.pt";
    file.path = "/somewhere/" + file.name;
    file.identity = {random(), -static_cast<std::int64_t>(random()), random()};
    Container& container = file.containers.emplace_back();
    files::ContainerMetadata metadata;
    metadata.last = 1 << 20;
    for (std::uint32_t s = 0; s < random() % 6; ++s) {
      files::Storage storage;
      storage.key = s % 2 == 0 ? std::to_string(s) : "key" + std::to_string(random());
      storage.offset = random() % (1 << 19);
      storage.bytes = s == 0 ? 4 : random() % (1 << 19);
      if (s % 3 != 0) storage.crc32 = static_cast<std::uint32_t>(random());
      metadata.storages.push_back(storage);
      if (s == 0) container.inlined[0] = "abcd";
    }
    metadata.header.resize(random() % 300000, static_cast<char>(random()));
    for (char& c : metadata.header) c = static_cast<char>(random() % 3);
    container.metadata = std::make_shared<const files::ContainerMetadata>(std::move(metadata));
    out.files.push_back(std::move(file));
  }
  return out;
}

TEST(Catalogues, HoldContainersOfAnyKind) {
  SourceSet source = MadeUp();
  SourceFile& file = source.files.front();
  files::ContainerMetadata metadata;
  metadata.head = files::Head::kJson;
  metadata.header = "{}";
  metadata.first = 1 << 20;
  metadata.last = 1 << 21;
  metadata.storages = {{"a.weight", (1 << 20) + 8, 64, std::nullopt}};
  const Container json{
      std::make_shared<const files::ContainerMetadata>(std::move(metadata)), {}, {}};
  file.containers.push_back(json);
  const std::string bytes = Serialize(source);
  EXPECT_EQ(bytes.substr(0, 12), std::string("SWsource\0\0\0\4", 12));
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  ASSERT_EQ(again->files.front().containers.size(), 2U);
  const files::ContainerMetadata& back = *again->files.front().containers[1].metadata;
  EXPECT_EQ(back.head, files::Head::kJson);
  EXPECT_EQ(back.header, "{}");
  EXPECT_EQ(back.first, 1U << 20);
  EXPECT_EQ(back.storages.at(0).key, "a.weight");
  EXPECT_FALSE(back.storages.at(0).crc32.has_value());
  EXPECT_EQ(again->format, "universal");
  source.format = "none such";
  EXPECT_FALSE(DeserializeSource(Serialize(source)));
}

TEST(Catalogues, OfFilesWithoutContainersAreRefused) {
  SourceSet source = MadeUp();
  ASSERT_TRUE(DeserializeSource(Serialize(source)));
  source.files.back().containers.clear();
  const auto set = DeserializeSource(Serialize(source));
  ASSERT_FALSE(set);
  EXPECT_EQ(set.error().code, Errc::kBadInput);
  EXPECT_NE(set.error().message.find(source.files.back().name), std::string::npos);
}

TEST(Catalogues, GiveBackWhatTheyWereGiven) {
  const SourceSet source = MadeUp();
  const std::string bytes = Serialize(source);
  EXPECT_EQ(Serialize(source), bytes);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->format, source.format);
  EXPECT_EQ(again->tag, source.tag);
  EXPECT_EQ(again->manifest, source.manifest);
  EXPECT_EQ(again->warnings, source.warnings);
  ASSERT_EQ(again->files.size(), source.files.size());
  for (std::size_t i = 0; i < source.files.size(); ++i) {
    const SourceFile& was = source.files[i];
    const SourceFile& is = again->files[i];
    EXPECT_EQ(was.name, is.name);
    EXPECT_EQ(was.path, is.path);
    EXPECT_EQ(was.identity, is.identity);
    ASSERT_EQ(is.containers.size(), 1U);
    const Container& a = was.containers.front();
    const Container& b = is.containers.front();
    EXPECT_EQ(a.inlined, b.inlined);
    EXPECT_TRUE(*a.metadata == *b.metadata);
  }
}

// The files of ranks differ only in their payloads.
TEST(Catalogues, HoldASkeletonOnce) {
  SourceSet source = MadeUp();
  source.files.resize(2);
  const std::size_t two = Serialize(source).size();
  for (int rank = 0; rank < 100; ++rank) {
    SourceFile file = source.files.back();
    file.containers[0].metadata = std::make_shared<const files::ContainerMetadata>(
        *file.containers[0].metadata);  // equal, not the same
    source.files.push_back(std::move(file));
  }
  const std::string bytes = Serialize(source);
  EXPECT_LT(bytes.size(), two + std::size_t{100} * 100);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  const auto metadata = [&](std::size_t file) { return again->files[file].containers[0].metadata; };
  EXPECT_NE(metadata(0), metadata(1));
  for (std::size_t file = 2; file < again->files.size(); ++file)
    EXPECT_EQ(metadata(file), metadata(1));
}

// tests/data/catalogues: as earlier versions wrote them.
TEST(Catalogues, OfEarlierFormsAreRead) {
  for (int form = 1; form <= 3; ++form) {
    const std::string path =
        std::string(SW_SOURCE_DIR) + "/tests/data/catalogues/form" + std::to_string(form) + ".swc";
    const auto bytes = os::ReadWholeText(path, 1 << 20);
    ASSERT_TRUE(bytes) << bytes.error().message;
    const auto set = DeserializeSource(*bytes);
    ASSERT_TRUE(set) << path << ": " << set.error().message;
    EXPECT_EQ(set->format, form == 3 ? "safetensors" : "deepspeed");
    EXPECT_EQ(set->files.size(), form == 3 ? 1U : 3U);
    EXPECT_EQ(set->siblings.size(), form == 1 ? 0U : 1U);
    const auto read = ReadCheckpoint(*set, Patterns());
    ASSERT_TRUE(read) << path << ": " << read.error().message;
    EXPECT_FALSE(read->params.empty());
    const auto again = DeserializeSource(Serialize(*set));
    ASSERT_TRUE(again);
    for (std::size_t i = 0; i < set->files.size(); ++i) {
      EXPECT_EQ(*again->files[i].containers[0].metadata, *set->files[i].containers[0].metadata);
    }
  }
}

TEST(Catalogues, HoldSiblings) {
  SourceSet source = MadeUp();
  source.files.resize(1);
  const std::string without = Serialize(source);
  source.siblings = {{"/somewhere/a", "a", {3, -5, 7}, true, "abc"},
                     {"/somewhere/b", "b", {1ULL << 40, 5, 8}, false, std::nullopt}};
  source.left_out = {{"runs", "a folder"}};
  const std::string bytes = Serialize(source);
  const auto again = DeserializeSource(bytes);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(Serialize(*again), bytes);
  ASSERT_EQ(again->siblings.size(), 2U);
  EXPECT_EQ(again->siblings[0].content, "abc");
  EXPECT_TRUE(again->siblings[0].executable);
  EXPECT_EQ(again->siblings[1].identity.bytes, 1ULL << 40);
  EXPECT_FALSE(again->siblings[1].content);
  EXPECT_EQ(again->left_out.at(0).why, "a folder");
  EXPECT_TRUE(DeserializeSource(without)->siblings.empty());

  for (const char* name : {"../a", "", ".", "a/b", "latest", "latest_universal", "shardwright.json",
                           ".journal", "x.lock"}) {
    source.siblings[0].name = name;
    EXPECT_FALSE(DeserializeSource(Serialize(source))) << name;
  }
  source.siblings[0].name = "a";
  source.siblings[0].content = "longer";
  EXPECT_FALSE(DeserializeSource(Serialize(source)));
}

TEST(Catalogues, ATagIsTheNameOfAFolder) {
  SourceSet source = MadeUp();
  source.files.resize(1);
  for (const char* tag : {"..", ".", "a/b", "../../../evil", "/evil", "a/"}) {
    source.tag = tag;
    EXPECT_FALSE(DeserializeSource(Serialize(source))) << tag;
  }
  source.tag.clear();
  EXPECT_TRUE(DeserializeSource(Serialize(source)));
}

TEST(Catalogues, DamageIsFound) {
  SourceSet source = MadeUp();
  source.files.resize(2);
  source.siblings = {{"/somewhere/a", "a", {3, -5, 7}, true, "abc"}};
  const std::string bytes = Serialize(source);
  for (std::size_t n = 0; n < bytes.size(); n += n < 64 ? 1 : 997) {
    EXPECT_FALSE(DeserializeSource(std::string_view(bytes).substr(0, n))) << n;
  }
  for (std::size_t n = 0; n < bytes.size(); n += n < 64 ? 1 : 997) {
    std::string flipped = bytes;
    flipped[n] = static_cast<char>(flipped[n] ^ 0x10);
    EXPECT_FALSE(DeserializeSource(flipped)) << n;
  }
  EXPECT_FALSE(DeserializeSource(bytes + "x"));
  EXPECT_FALSE(DeserializeSource(""));
}

// Any bit of any of them, also of those that earlier versions wrote.
TEST(Catalogues, NoBitOfThemIsTakenForAnother) {
  std::vector<std::string> catalogues;
  for (const char* form : {"form1.swc", "form2.swc", "form3.swc"}) {
    const auto bytes =
        os::ReadWholeText(std::string(SW_SOURCE_DIR) + "/tests/data/catalogues/" + form, 1 << 20);
    ASSERT_TRUE(bytes) << bytes.error().message;
    const auto set = DeserializeSource(*bytes);
    ASSERT_TRUE(set) << set.error().message;
    catalogues.push_back(*bytes);
    catalogues.push_back(Serialize(*set));
  }
  for (std::string& bytes : catalogues) {
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      char& byte = bytes[bit / 8];
      const char sound = byte;
      byte = static_cast<char>(byte ^ 1 << bit % 8);
      EXPECT_FALSE(DeserializeSource(bytes)) << bit << " of " << 8 * bytes.size();
      byte = sound;
    }
  }
}

}  // namespace
}  // namespace shardwright::checkpoints
