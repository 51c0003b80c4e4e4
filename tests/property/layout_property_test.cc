// Random layouts of random tensors: whatever the source and the target, the engine writes exactly
// what an element-by-element placement writes, and back again.

#include <gtest/gtest.h>

#include "exec/gather.h"
#include "random_layout.h"

namespace shardwright::property {
namespace {

/// Members in memory; counts what is read.
class MemoryBytes final : public exec::ByteSource {
 public:
  explicit MemoryBytes(const Stored& stored) : stored_(stored) {}
  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    const std::vector<std::byte>& from = stored_.members[member];
    if (offset + out.size() > from.size()) return Fail(Errc::kInternal, "read past a member");
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
    bytes_ += out.size();
    return {};
  }
  std::uint64_t bytes_read() const override { return bytes_; }
  std::uint64_t files_read() const override { return 0; }

 private:
  const Stored& stored_;
  std::uint64_t bytes_ = 0;
};

/// Runs the engine over every unit and returns what it would write, by member.
testing::AssertionResult Convert(const Stored& source, const Stored& shape_of_target,
                                 std::vector<std::vector<std::byte>>* written) {
  const plan::Target target = TargetOf(shape_of_target);
  const auto plan = plan::Plan::Make(source.map, target);
  if (!plan) return testing::AssertionFailure() << plan.error().message;
  MemoryBytes bytes(source);
  exec::Workspace workspace;
  written->assign(shape_of_target.members.size(), {});
  for (std::uint64_t index = 0; index < plan->unit_count(); ++index) {
    const plan::Unit unit = plan->unit(index);
    if (const Status status = exec::GatherUnit(*plan, unit, bytes, &workspace, nullptr); !status) {
      return testing::AssertionFailure() << status.error().message;
    }
    auto& out = (*written)[unit.file];
    out.insert(out.end(), workspace.unit.begin(), workspace.unit.end());
  }
  if (bytes.bytes_read() != plan->totals().read_bytes) {
    return testing::AssertionFailure()
           << bytes.bytes_read() << " bytes read, " << plan->totals().read_bytes << " predicted";
  }
  return testing::AssertionSuccess();
}

/// Says where two layouts differ first, and what the tensors are.
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
  constexpr int kCases = 12'000;
  int with_means = 0;
  int with_stacks = 0;
  for (int seed = 0; seed < kCases; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    const std::vector<Truth> truth = RandomTruth(random);
    const Stored a = Store(truth, RandomMesh(random), random, true);
    const Stored b = Store(truth, RandomMesh(random), random, false);
    std::vector<std::vector<std::byte>> there;
    ASSERT_TRUE(Convert(a, b, &there)) << "seed " << seed;
    ASSERT_TRUE(there == b.members) << "seed " << seed << "\n" << Difference(truth, b, there);
    const Stored c = Store(truth, RandomMesh(random), random, false);
    std::vector<std::vector<std::byte>> back;
    ASSERT_TRUE(Convert(b, c, &back)) << "seed " << seed;
    ASSERT_TRUE(back == c.members) << "seed " << seed << "\n" << Difference(truth, c, back);
    for (const Truth& tensor : truth) {
      with_means += tensor.rule.split == layout::Split::kAverage ? 1 : 0;
      with_stacks += tensor.rule.split == layout::Split::kSub ? 1 : 0;
    }
  }
  EXPECT_GT(with_means, 1000);
  EXPECT_GT(with_stacks, 1000);
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
