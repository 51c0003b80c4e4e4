// SPDX-License-Identifier: Apache-2.0
#include "convert/compare.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "engine/layout/states.h"
#include "opened.h"

namespace shardwright::convert {
namespace {

/// Reads as another source, except for some bytes.
class ChangedBytes final : public exec::ByteSource {
 public:
  explicit ChangedBytes(std::unique_ptr<exec::ByteSource> inner) : inner_(std::move(inner)) {}

  std::map<std::pair<std::uint32_t, std::uint64_t>, std::byte> changes;  ///< by member and offset

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    SW_TRY(inner_->Read(member, offset, out));
    const auto end = changes.lower_bound({member, offset + out.size()});
    for (auto change = changes.lower_bound({member, offset}); change != end; ++change) {
      out[change->first.second - offset] = change->second;
    }
    return {};
  }
  std::uint64_t bytes_read() const override { return inner_->bytes_read(); }
  std::uint64_t files_read() const override { return inner_->files_read(); }

 private:
  std::unique_ptr<exec::ByteSource> inner_;
};

/// A checkpoint with bytes that tests change in memory. Its checksums are not compared.
class Changed : public os::Scratch {
 protected:
  void Open(const std::string& name) {
    input_ = Opened(Own(name));
    ASSERT_NE(input_, nullptr);
    for (layout::Member& member : input_->checkpoint.map.members) member.crc32.reset();
    auto changed = std::make_unique<ChangedBytes>(std::move(input_->bytes));
    bytes_ = changed.get();
    input_->bytes = std::move(changed);
  }

  /// Overwrites an element of all fragments with that role. \returns the number of fragments
  template <class T>
  int Put(const layout::LogicalTensor& tensor, layout::Role role, std::uint64_t element,
          const T& value) {
    EXPECT_EQ(ItemSize(tensor.dtype), sizeof(T));
    const layout::ShardMap& map = input_->checkpoint.map;
    int put = 0;
    for (const layout::Fragment& fragment : tensor.fragments) {
      if (fragment.role != role) continue;
      fragment.cut->ForLogicalRange(element, element + 1, [&](const layout::Run& run) {
        layout::ForHolders(map, fragment.at, run.shard, run.shard + 1,
                           [&](const layout::Region& region, std::uint64_t at, std::uint64_t) {
                             const auto bytes = std::as_bytes(std::span(&value, 1));
                             for (std::size_t i = 0; i < bytes.size(); ++i) {
                               const std::uint64_t offset = region.offset + at * sizeof(T) + i;
                               bytes_->changes[{region.member, offset}] = bytes[i];
                             }
                             ++put;
                           });
      });
    }
    return put;
  }

  const layout::LogicalTensor& Tensor(const std::string& name, std::string_view state) {
    const layout::ShardMap& map = input_->checkpoint.map;
    return map.tensors[*layout::TensorIndex(map).Find(name, state)];
  }

  Status Prove() {
    const auto comm = comm::MakeSerialComm();
    NullSink sink;
    return ProveInferred(*comm, input_->checkpoint, *input_->bytes, {}, {}, sink);
  }

  std::unique_ptr<Input> input_;
  ChangedBytes* bytes_ = nullptr;
};

// A NaN that is rounded to bfloat16 may have another sign or payload there.
TEST_F(Changed, ANanProvesANanAndNothingElse) {
  Open("bf16_zero2_w2");
  input_->checkpoint.inferred = {{0}, "a test"};
  Status proved = Prove();
  ASSERT_TRUE(proved) << proved.error().message;
  const std::string& name = input_->checkpoint.params.front().name;
  const layout::LogicalTensor& weight = Tensor(name, layout::kWeight);
  const layout::LogicalTensor& master = Tensor(name, layout::kMaster);
  ASSERT_GT(Put(weight, layout::Role::kOwner, 3, std::uint16_t{0xFFC1}), 0);
  proved = Prove();
  ASSERT_FALSE(proved);
  EXPECT_EQ(proved.error().code, Errc::kBadInput);
  EXPECT_NE(proved.error().message.find("element 3: "), std::string::npos)
      << proved.error().message;
  ASSERT_GT(Put(master, layout::Role::kOwner, 3, std::uint32_t{0x7FC00000}), 0);
  proved = Prove();
  EXPECT_TRUE(proved) << proved.error().message;
}

TEST_F(Changed, ReplicasThatDifferAreFoundWhereTheyAreAskedFor) {
  Open("autotp2_dp2_zero1");
  const auto& tensors = input_->checkpoint.map.tensors;
  const auto replicated = std::find_if(tensors.begin(), tensors.end(), [](const auto& tensor) {
    return ItemSize(tensor.dtype) == sizeof(std::uint32_t) &&
           std::any_of(tensor.fragments.begin(), tensor.fragments.end(), [](const auto& fragment) {
             return fragment.role == layout::Role::kReplica;
           });
  });
  ASSERT_NE(replicated, tensors.end());
  ASSERT_GT(Put(*replicated, layout::Role::kReplica, 1, 12345.0F), 0);
  ConvertOptions options;
  options.output = At("sums");
  auto converted = Converted(*input_, "tp=1,dp=1", options);
  EXPECT_TRUE(converted) << converted.error().message;
  options.output = At("replicas");
  options.verify = exec::Verify::kReplicas;
  converted = Converted(*input_, "tp=1,dp=1", options);
  ASSERT_FALSE(converted);
  EXPECT_EQ(converted.error().code, Errc::kBadInput);
  EXPECT_NE(converted.error().message.find("replicas differ at element 1"), std::string::npos)
      << converted.error().message;
  EXPECT_FALSE(fs::exists(At("replicas")));
}

}  // namespace
}  // namespace shardwright::convert
