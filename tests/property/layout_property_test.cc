// SPDX-License-Identifier: Apache-2.0
// Random layouts of random tensors: whatever the source and the target, the engine writes exactly
// what an element-by-element placement writes, and back again.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <list>
#include <mutex>
#include <numeric>

#include "engine/exec/units.h"
#include "property/cases.h"
#include "random_layout.h"
#include "support/base/crc32.h"

namespace shardwright::property {
namespace {

/// Members in memory; counts the bytes read.
class MemoryBytes final : public exec::ByteSource {
 public:
  explicit MemoryBytes(const Stored& stored) : stored_(stored) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    const std::vector<std::byte>& from = stored_.members[member];
    if (offset + out.size() > from.size()) return Fail(Errc::kInternal, "read past a member");
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
    bytes_.fetch_add(out.size(), std::memory_order_relaxed);
    return {};
  }
  std::uint64_t bytes_read() const override { return bytes_; }
  std::uint64_t files_read() const override { return 0; }

 private:
  const Stored& stored_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

/// Modes in which a sink accepts units.
enum class Way { kLoopsMemory, kOwnMemory, kSumsLater, kConverts };
constexpr std::array kWays = {Way::kLoopsMemory, Way::kOwnMemory, Way::kSumsLater, Way::kConverts};

/// Keeps the bytes it receives, by member.
class Collector final : public exec::UnitSink {
 public:
  Collector(const plan::Target& target, Way way) : target_(target), way_(way) {
    for (const plan::OutputFile& file : target.files) written.emplace_back(file.bytes);
  }

  bool converts() const override { return way_ == Way::kConverts; }

  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override {
    if (way_ == Way::kOwnMemory || way_ == Way::kSumsLater) return At(unit);
    if (way_ != Way::kConverts || unit.file % 2 == 0) return std::span<std::byte>();
    // The sink keeps the bytes read until it converts them.
    const std::lock_guard lock(mutex_);
    return std::span(read_.emplace_back(bytes));
  }

  Status Put(const exec::UnitInHand& unit) override {
    const std::span<std::byte> to = At(unit.unit);
    if (unit.program != nullptr) {
      std::vector<double> sums;
      exec::FinishUnit(*unit.program, unit.bytes, to, &sums);
    } else if (to.data() != unit.bytes.data()) {
      std::copy(unit.bytes.begin(), unit.bytes.end(), to.begin());
    }
    if (unit.record == nullptr) return {};
    const exec::UnitSum sum = exec::SumOf(to);
    if (unit.record->sum.crc32 != sum.crc32 || unit.record->sum.digest != sum.digest ||
        unit.record->sum.bytes != sum.bytes) {
      return Fail(Errc::kInternal, "sums are of other bytes");
    }
    summed_.fetch_add(1, std::memory_order_relaxed);
    return {};
  }

  Status Drain() override {
    ++drained;
    return {};
  }

  std::uint64_t summed() const { return summed_; }

  std::vector<std::vector<std::byte>> written;
  int drained = 0;

 private:
  std::span<std::byte> At(const plan::Unit& unit) {
    const plan::Payload& payload = target_.files[unit.file].payloads[unit.payload];
    return std::span(written[unit.file]).subspan(payload.offset + unit.first, unit.bytes);
  }

  const plan::Target& target_;
  const Way way_;
  std::mutex mutex_;
  std::list<std::vector<std::byte>> read_;
  std::atomic<std::uint64_t> summed_ = 0;
};

/// Runs the engine over every unit, into a sink of one mode, and returns the bytes that the sink
/// received, by member.
testing::AssertionResult Convert(const Stored& source, const Stored& shape_of_target, Way way,
                                 std::vector<std::vector<std::byte>>* written) {
  const plan::Target target = TargetOf(shape_of_target);
  layout::ShardMap map = source.map;
  for (std::uint32_t m = 0; m < map.members.size(); ++m) {
    map.members[m].crc32 = Crc32(source.members[m]);
  }
  const auto plan = plan::Plan::Make(map, target);
  if (!plan) return testing::AssertionFailure() << plan.error().message;
  MemoryBytes bytes(source);
  static tbb::task_arena arena(2);
  NullSink sink;
  exec::SourceSums sums(source.map.members.size());
  exec::UnitLoopOptions options;
  options.sums = &sums;
  exec::UnitLoop loop(*plan, bytes, arena, sink, options);
  std::vector<std::uint64_t> units(plan->unit_count());
  std::iota(units.begin(), units.end(), std::uint64_t{0});
  Collector to(target, way);
  Status status = way == Way::kSumsLater ? loop.CopyUnits(units, to) : loop.ForUnits(units, to);
  if (status && way == Way::kSumsLater) {
    if (to.summed() > 0) return testing::AssertionFailure() << "sums before they were asked for";
    status = loop.SumUnits(units, to);
  }
  if (!status) return testing::AssertionFailure() << status.error().message;
  *written = std::move(to.written);
  if (bytes.bytes_read() != plan->totals().read_bytes) {
    return testing::AssertionFailure()
           << bytes.bytes_read() << " bytes read, " << plan->totals().read_bytes << " predicted";
  }
  const std::uint64_t summed = way == Way::kConverts ? 0 : units.size();
  if (to.summed() != summed || to.drained != (way == Way::kSumsLater ? 2 : 1)) {
    return testing::AssertionFailure() << to.summed() << " units with sums, drained " << to.drained;
  }
  // Checksums of members, in every mode: of all that primary reads touch.
  for (std::uint32_t m = 0; m < source.map.members.size(); ++m) {
    if (sums.bytes(m) != plan->primary_bytes(m)) {
      return testing::AssertionFailure() << "member " << m << ": " << sums.bytes(m) << " noted, "
                                         << plan->primary_bytes(m) << " read";
    }
    const bool whole = sums.bytes(m) == source.members[m].size();
    if (whole && sums.crc(m) != *map.members[m].crc32) {
      return testing::AssertionFailure() << "member " << m << " has another checksum";
    }
  }
  return testing::AssertionSuccess();
}

/// Describes the first difference of two layouts and lists the tensors.
std::string Difference(const std::vector<Truth>& truth, const Stored& expected,
                       const std::vector<std::vector<std::byte>>& written) {
  std::string text;
  for (const Truth& tensor : truth) {
    text += tensor.name + " " + std::string(Name(tensor.dtype)) + " " + ToString(tensor.shape) +
            " " + layout::Explain(tensor.rule) + "\n";
  }
  for (std::size_t m = 0; m < written.size(); ++m) {
    const auto& want = expected.members[m];
    if (written[m].size() != want.size()) {
      return text + "member " + std::to_string(m) + " has another size";
    }
    for (std::size_t b = 0; b < want.size(); ++b) {
      if (written[m][b] != want[b])
        return text + "member " + std::to_string(m) + " byte " + std::to_string(b);
    }
  }
  return text;
}

TEST(LayoutProperty, ThereAndBackIsTheIdentity) {
  int with_means = 0;
  int with_stacks = 0;
  for (int seed = 0; seed < kCases; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const std::vector<Truth> truth = RandomTruth(random);
    const Stored a = Store(truth, RandomMesh(random), random, true);
    const Stored b = Store(truth, RandomMesh(random), random, false);
    std::vector<std::vector<std::byte>> there;
    const Way way = kWays[static_cast<std::size_t>(seed) % kWays.size()];
    ASSERT_TRUE(Convert(a, b, way, &there)) << "seed " << seed;
    ASSERT_TRUE(there == b.members) << "seed " << seed << "\n" << Difference(truth, b, there);
    const Stored c = Store(truth, RandomMesh(random), random, false);
    std::vector<std::vector<std::byte>> back;
    ASSERT_TRUE(Convert(b, c, way, &back)) << "seed " << seed;
    ASSERT_TRUE(back == c.members) << "seed " << seed << "\n" << Difference(truth, c, back);
    for (const Truth& tensor : truth) {
      with_means += tensor.rule.split == layout::Split::kAverage ? 1 : 0;
      with_stacks += tensor.rule.split == layout::Split::kSub ? 1 : 0;
    }
  }
  EXPECT_GT(with_means, kCases / 12);
  EXPECT_GT(with_stacks, kCases / 12);
}

TEST(LayoutProperty, ShardsOfAViewHaveTheTensorsOwnDimensions) {
  int joined = 0;
  int ambiguous = 0;
  for (int seed = 0; seed < kCases; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const Viewed viewed = RandomViewed(random);
    const std::uint64_t ranks = viewed.shapes.size();
    std::vector<std::uint64_t> back(Elems(viewed.shape), ~std::uint64_t{0});
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      const auto what = testing::Message()
                        << "seed " << seed << ": " << ToString(viewed.shape) << ", "
                        << layout::Explain(viewed.rule) << ", rank " << rank << " of " << ranks;
      const auto shape = layout::ShardShape(viewed.rule, viewed.shape, ranks, rank);
      ASSERT_TRUE(shape.has_value()) << what << ": " << shape.error().message;
      ASSERT_EQ(*shape, viewed.shapes[rank]) << what;
      const auto cut = layout::MakeCut(viewed.rule, viewed.shape, ranks, rank);
      ASSERT_TRUE(cut.has_value()) << what << ": " << cut.error().message;
      std::vector<std::uint64_t> elements(cut->shard_elems());
      cut->ForShardRange(0, cut->shard_elems(), [&](const layout::Run& run) {
        for (std::uint64_t i = 0; i < run.elems; ++i) elements[run.shard + i] = run.logical + i;
      });
      ASSERT_EQ(elements, viewed.elements[rank]) << what;
      for (const std::uint64_t element : elements) back[element] = element;
    }
    for (std::uint64_t e = 0; e < back.size(); ++e) ASSERT_EQ(back[e], e) << "seed " << seed;
    // The shards of a reader: one shape fits them, or the rule does not decide between several.
    const auto whole = layout::WholeShape(viewed.rule, viewed.shapes);
    ambiguous += whole ? 0 : 1;
    joined += whole ? 1 : 0;
    if (whole) {
      ASSERT_EQ(*whole, viewed.shape) << "seed " << seed << ": " << layout::Explain(viewed.rule);
    } else {
      ASSERT_EQ(whole.error().code, Errc::kUnsupported) << "seed " << seed << whole.error().message;
      ASSERT_NE(whole.error().message.find("fit a tensor of shape"), std::string::npos)
          << "seed " << seed << ": " << whole.error().message;
    }
  }
  EXPECT_GT(joined, kCases / 2);
  EXPECT_LT(ambiguous, kCases / 4);
}

TEST(LayoutProperty, AMissingElementIsAlwaysNoticed) {
  int noticed = 0;
  for (int seed = 0; seed < 2'000; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const std::vector<Truth> truth = RandomTruth(random);
    Stored a = Store(truth, RandomMesh(random), random, true);
    layout::LogicalTensor& tensor = a.map.tensors[random() % a.map.tensors.size()];
    std::erase_if(tensor.fragments, [](const layout::Fragment& fragment) {
      return fragment.role != layout::Role::kReplica && fragment.cut->covered_elems() > 0;
    });
    if (Elems(tensor.shape) == 0) continue;
    const Status status = layout::Validate(a.map);
    ASSERT_FALSE(status) << "seed " << seed;
    EXPECT_EQ(status.error().code, Errc::kBadInput);
    EXPECT_NE(status.error().message.find(tensor.name), std::string::npos)
        << status.error().message;
    ++noticed;
  }
  EXPECT_GT(noticed, 1500);
}

}  // namespace
}  // namespace shardwright::property
