// SPDX-License-Identifier: Apache-2.0
// The parts of a checkpoint folder that a snapshot copies, and its announced reads.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/exec/byte_source.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

using SnapshotTest = test::AgentTest;

struct ReadOf {
  std::uint32_t member;
  std::uint64_t offset;
  std::uint64_t bytes;
};

/// Records the byte ranges read.
class NotedBytes final : public exec::ByteSource {
 public:
  NotedBytes(std::unique_ptr<exec::ByteSource> source, std::vector<ReadOf>* reads)
      : source_(std::move(source)), reads_(reads) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    {
      const std::lock_guard lock(mutex_);
      reads_->push_back({member, offset, out.size()});
    }
    return source_->Read(member, offset, out);
  }
  std::uint64_t bytes_read() const override { return source_->bytes_read(); }
  std::uint64_t files_read() const override { return source_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> source_;
  std::vector<ReadOf>* reads_;
  std::mutex mutex_;
};

TEST_F(SnapshotTest, SaysWhatItReads) {
  Agent agent(Options());
  for (const std::uint64_t iteration : {1U, 2U}) {  // all, then a selection
    const auto input = Open(iteration);
    std::vector<ReadOf> reads;
    input->bytes = std::make_unique<NotedBytes>(std::move(input->bytes), &reads);
    std::vector<FileByteRange> told;
    const auto fill = [&](const std::vector<FileByteRange>& stretches) -> Status {
      EXPECT_TRUE(reads.empty());
      told = stretches;
      return {};
    };
    const auto taken = agent.Snapshot(*input, 0, sink_, {}, fill);
    ASSERT_TRUE(taken) << taken.error().message;
    std::uint64_t bytes = 0;
    for (const ReadOf& read : reads) {
      const layout::Member& member = input->checkpoint.map.members[read.member];
      const std::string& file = input->set.files[member.file].name;
      const std::uint64_t first = member.offset + read.offset;
      EXPECT_TRUE(std::any_of(told.begin(), told.end(),
                              [&](const FileByteRange& one) {
                                return one.name == file && one.first <= first &&
                                       first + read.bytes <= one.first + one.bytes;
                              }))
          << file << " " << first << " " << read.bytes;
      bytes += read.bytes;
    }
    // Each byte once, in as few ranges as possible.
    std::uint64_t told_bytes = 0;
    for (std::size_t i = 0; i < told.size(); ++i) {
      told_bytes += told[i].bytes;
      if (i == 0 || told[i].name != told[i - 1].name) continue;
      EXPECT_GT(told[i].first, told[i - 1].first + told[i - 1].bytes) << told[i].name;
    }
    EXPECT_EQ(told_bytes, bytes);
    EXPECT_GT(told.size(), 2U);
    ASSERT_TRUE(agent.Persist(sink_));
  }
}

TEST_F(SnapshotTest, KeptComponentsAreOfAllExperts) {
  constexpr auto kMaster = static_cast<std::size_t>(Component::kMaster);
  constexpr auto kMoments = static_cast<std::size_t>(Component::kMoments);
  AgentOptions options = Options();
  options.save.keep = KeptComponents();
  (*options.save.keep)[kMaster] = true;
  Agent agent(options);
  for (const std::uint64_t iteration : {1U, 2U}) {
    ASSERT_EQ(*Snapshot(agent, iteration), iteration);
    ASSERT_TRUE(agent.Persist(sink_));
  }
  const auto newest = agent.Newest();
  std::size_t older = 0;
  for (std::size_t i = 0; i < newest->manifest.modules.size(); ++i) {
    const StoredModule& held = newest->manifest.modules[i];
    EXPECT_EQ(held[kMaster]->version, 2U) << newest->manifest.names[i];
    older += held[kMoments]->version == 1 ? 1 : 0;
  }
  EXPECT_EQ(older, 4U);  // two of four experts of each of two layers were not selected
}

}  // namespace
}  // namespace shardwright::partial
