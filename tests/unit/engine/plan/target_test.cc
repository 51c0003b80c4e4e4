// SPDX-License-Identifier: Apache-2.0
#include "engine/plan/target.h"

#include <gtest/gtest.h>

#include "engine/plan/target_builder.h"

namespace shardwright::plan {
namespace {

std::string FrameOf(const OutputFile& file) {
  std::string out;
  const Status made = file.frame({}, [&](std::uint64_t offset, std::string_view bytes) -> Status {
    EXPECT_EQ(offset, out.size());
    out += bytes;
    return {};
  });
  EXPECT_TRUE(made.has_value());
  return out;
}

TEST(OutputFiles, OfTextAreAllFrame) {
  const OutputFile file = TextFile("latest", "global_step4");
  EXPECT_EQ(file.path, "latest");
  EXPECT_EQ(file.bytes, 12U);
  EXPECT_TRUE(file.payloads.empty());
  EXPECT_EQ(FrameOf(file), "global_step4");
}

TEST(OutputFiles, OfKnownBytesAreOnePayload) {
  const OutputFile file = WholeFile("notes", std::string("a\0b", 3));
  ASSERT_EQ(file.payloads.size(), 1U);
  EXPECT_EQ(file.payloads[0].kind, Payload::Kind::kInline);
  EXPECT_EQ(file.payloads[0].bytes_inline, std::string("a\0b", 3));
  EXPECT_EQ(file.bytes, 3U);
  EXPECT_EQ(FrameOf(file), "");
  EXPECT_TRUE(WholeFile("empty", "").payloads.empty());
}

TEST(OutputFiles, AreAsLongAsTheirFrameAndTheirPayloads) {
  TargetBuilder builder;
  const std::uint32_t file = builder.AddFile("f");
  builder.SetFrame(file, 12, nullptr);  // with a directory behind the payloads
  builder.AddInline(file, 4, "first");
  EXPECT_EQ(builder.bytes(file), 12U);
  builder.AddInline(file, 9, "later");
  EXPECT_EQ(builder.bytes(file), 14U);
}

TEST(OutputFiles, ThatRepeatASourceFileAddItToTheMap) {
  layout::ShardMap map;
  map.files = {"before"};
  const OutputFile copy = WholeFile("a", "/in/a", 10, CloneMode::kClone, &map);
  EXPECT_EQ(map.files, (std::vector<std::string>{"before", "/in/a"}));
  ASSERT_EQ(map.members.size(), 1U);
  EXPECT_EQ(map.members[0].file, 1U);
  EXPECT_EQ(map.members[0].bytes, 10U);
  EXPECT_FALSE(map.members[0].crc32.has_value());
  EXPECT_EQ(copy.clone_of, 1U);
  ASSERT_EQ(copy.payloads.size(), 1U);
  EXPECT_EQ(copy.payloads[0].kind, Payload::Kind::kMember);
  EXPECT_EQ(copy.payloads[0].member, 0U);
  EXPECT_TRUE(WholeFile("b", "/in/b", 10, CloneMode::kLink, &map).payloads.empty());
  EXPECT_TRUE(WholeFile("c", "/in/c", 0, CloneMode::kCopy, &map).payloads.empty()) << "it is empty";
}

}  // namespace
}  // namespace shardwright::plan
