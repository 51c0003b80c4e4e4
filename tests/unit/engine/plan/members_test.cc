// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "small_maps.h"

// Files copied unchanged: as whole members, and verified by the tensors inside them.

namespace shardwright::plan {
namespace {

/// A source file of 100 bytes, and a target that repeats it.
struct Repeated {
  layout::ShardMap source;
  Target target;
  std::string bytes;

  Repeated() {
    for (int i = 0; i < 100; ++i) bytes += static_cast<char>(i);
    target.files.push_back(WholeFile("copy", "original", 100, CloneMode::kCopy, &source));
  }
  /// A member within the file that has a checksum.
  void Inside(std::uint64_t offset, std::uint64_t size) {
    source.members.push_back({0, offset, size, 7, "data/" + std::to_string(offset)});
  }
  Program Filled() const {
    const auto plan = Plan::Make(source, target);
    EXPECT_TRUE(plan.has_value()) << plan.error().message;
    Program program;
    plan->Fill(plan->unit(0), &program);
    return program;
  }
};

struct Stretch {
  std::uint32_t member;
  std::uint64_t offset;
  std::uint64_t bytes;
  bool primary;
  friend bool operator==(const Stretch&, const Stretch&) = default;
};

void PrintTo(const Stretch& s, std::ostream* out) {
  *out << s.member << " at " << s.offset << " for " << s.bytes << (s.primary ? "" : " again");
}

std::vector<Stretch> ReadsOf(const Program& program) {
  std::vector<Stretch> out;
  std::uint64_t at = 0;
  for (const Read& read : program.reads) {
    out.push_back({read.member, read.offset, read.bytes, read.primary});
    EXPECT_EQ(read.copy_count, 1U);
    EXPECT_EQ(program.copies.at(read.first_copy).at, at) << "pieces follow one another";
    at += read.bytes;
  }
  return out;
}

TEST(Repeats, AFileWithoutChecksumsAsItIs) {
  const Repeated file;
  const auto plan = Plan::Make(file.source, file.target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  EXPECT_EQ(RunPlan(*plan, {file.bytes})[0], file.bytes);
  EXPECT_EQ(plan->files_without_sums(), (std::vector<std::uint32_t>{0}));
  EXPECT_EQ(plan->totals().read_bytes, 100U);
}

TEST(Repeats, MembersWithinAFileByTheirOwnChecksums) {
  Repeated file;
  file.Inside(60, 10);  // 1
  file.Inside(20, 30);  // 2
  EXPECT_EQ(ReadsOf(file.Filled()), (std::vector<Stretch>{{0, 0, 20, true},
                                                          {2, 0, 30, true},
                                                          {0, 50, 10, true},
                                                          {1, 0, 10, true},
                                                          {0, 70, 30, true}}));
  const auto plan = Plan::Make(file.source, file.target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(RunPlan(*plan, {file.bytes, file.bytes.substr(60, 10), file.bytes.substr(20, 30)})[0],
            file.bytes);
  EXPECT_EQ(plan->primary_bytes(2), 30U);
  EXPECT_EQ(plan->totals().members_read, 3U);
}

TEST(Repeats, AMemberThatEndsWithItsFile) {
  Repeated file;
  file.Inside(90, 10);
  EXPECT_EQ(ReadsOf(file.Filled()), (std::vector<Stretch>{{0, 0, 90, true}, {1, 0, 10, true}}));
}

TEST(Repeats, AMemberOfSeveralUnitsGoesOnWhereTheLastEnded) {
  layout::ShardMap source;
  Target target;
  target.files.push_back(
      WholeFile("copy", "original", 2 * kUnitBytes + 10, CloneMode::kCopy, &source));
  source.members.push_back({0, 100, 2 * kUnitBytes - 200, 7, "data/0"});
  const auto plan = Plan::Make(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  ASSERT_EQ(plan->unit_count(), 3U);
  std::vector<std::vector<Stretch>> reads;
  for (std::uint64_t u = 0; u < 3; ++u) {
    Program program;
    plan->Fill(plan->unit(u), &program);
    reads.push_back(ReadsOf(program));
  }
  EXPECT_EQ(reads[0], (std::vector<Stretch>{{0, 0, 100, true}, {1, 0, kUnitBytes - 100, true}}));
  EXPECT_EQ(reads[1], (std::vector<Stretch>{{1, kUnitBytes - 100, kUnitBytes - 100, true},
                                            {0, 2 * kUnitBytes - 100, 100, true}}));
  EXPECT_EQ(reads[2], (std::vector<Stretch>{{0, 2 * kUnitBytes, 10, true}}));
}

TEST(Repeats, MembersThatOverlapByTheFirstOnly) {
  Repeated file;
  file.Inside(20, 30);  // 1
  file.Inside(40, 30);  // 2: an edited catalogue may contain this
  EXPECT_EQ(ReadsOf(file.Filled()),
            (std::vector<Stretch>{{0, 0, 20, true}, {1, 0, 30, true}, {0, 50, 50, true}}));
}

TEST(Repeats, MembersThatReachBeyondTheFileNotAtAll) {
  Repeated file;
  file.Inside(90, 20);
  EXPECT_EQ(ReadsOf(file.Filled()), (std::vector<Stretch>{{0, 0, 100, true}}));
}

TEST(Repeats, AMemberThatHasItsOwnChecksumAtOnce) {
  Repeated file;
  file.source.members[0].crc32 = 1;
  EXPECT_EQ(ReadsOf(file.Filled()), (std::vector<Stretch>{{0, 0, 100, false}}));
  const auto plan = Plan::Make(file.source, file.target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(plan->files_without_sums().empty());
}

TEST(Repeats, NoMemberOfAnotherSize) {
  Repeated file;
  file.source.members[0].bytes = 99;
  const auto plan = Plan::Make(file.source, file.target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, Errc::kInternal);
  EXPECT_NE(plan.error().message.find("copy"), std::string::npos) << plan.error().message;
}

TEST(Repeats, LinksWithoutReadingOrWriting) {
  layout::ShardMap source;
  Target target;
  target.files.push_back(WholeFile("linked", "original", 100, CloneMode::kLink, &source));
  target.files.push_back(TextFile("text", "four"));
  const auto plan = Plan::Make(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  EXPECT_EQ(plan->totals().output_files, 2U);
  EXPECT_EQ(plan->totals().linked_files, 1U);
  EXPECT_EQ(plan->totals().output_bytes, 4U);
  EXPECT_EQ(plan->totals().read_bytes, 0U);
  EXPECT_EQ(plan->unit_count(), 0U);
}

}  // namespace
}  // namespace shardwright::plan
