// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/strided.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "engine/tensor/shape.h"

// Tensors with elements that are not stored in row-major order. Compares the parts found for them
// with the definition of a stride, element by element.

namespace shardwright::checkpoints {
namespace {

pickle::Tensor TensorOf(Shape shape, std::vector<std::uint64_t> strides, std::uint64_t offset = 0) {
  pickle::Tensor tensor;
  tensor.shape = std::move(shape);
  tensor.strides = std::move(strides);
  tensor.offset = offset;
  return tensor;
}

/// Returns the storage index of each element of the tensor.
std::vector<std::uint64_t> Defined(const pickle::Tensor& tensor) {
  std::vector<std::uint64_t> out;
  for (std::uint64_t i = 0; i < Elems(tensor.shape); ++i) {
    std::uint64_t rest = i;
    std::uint64_t at = tensor.offset;
    for (std::size_t dim = tensor.shape.size(); dim-- > 0;) {
      at += rest % tensor.shape[dim] * tensor.strides[dim];
      rest /= tensor.shape[dim];
    }
    out.push_back(at);
  }
  return out;
}

/// The same from the parts; every element must be in one of them.
void ExpectAsDefined(const pickle::Tensor& tensor, std::uint64_t storage) {
  const auto parts = StoredParts(tensor, storage, 4096);
  ASSERT_TRUE(parts.has_value()) << parts.error().message << ToString(tensor.shape)
                                 << ToString(tensor.strides);
  constexpr std::uint64_t kNone = ~std::uint64_t{0};
  std::vector<std::uint64_t> found(Elems(tensor.shape), kNone);
  for (const StoredPart& part : *parts) {
    ASSERT_LE(part.first + part.elems, storage);
    if (part.order == nullptr) {
      ASSERT_EQ(part.elems, found.size());
      std::iota(found.begin(), found.end(), part.first);
      continue;
    }
    ASSERT_EQ(Elems(part.order->view()), found.size());
    ASSERT_EQ(part.order->shard_elems(), part.elems);
    part.order->ForLogicalRange(0, found.size(), [&](const layout::Run& run) {
      for (std::uint64_t i = 0; i < run.elems; ++i) {
        EXPECT_EQ(found[run.logical + i], kNone);
        found[run.logical + i] = part.first + run.shard + i;
      }
    });
  }
  EXPECT_EQ(found, Defined(tensor)) << ToString(tensor.shape) << ToString(tensor.strides);
}

TEST(Strided, ViewsThatTrainersStore) {
  ExpectAsDefined(TensorOf({3, 4}, {4, 1}), 12);                  // row-major
  ExpectAsDefined(TensorOf({4, 3}, {1, 4}), 12);                  // x.t()
  ExpectAsDefined(TensorOf({2, 3, 5, 7}, {105, 1, 21, 3}), 210);  // channels_last
  ExpectAsDefined(TensorOf({3, 2}, {4, 1}, 1), 12);               // x[:, 1:3]
  ExpectAsDefined(TensorOf({3, 2}, {4, 1}, 2), 12);               // x[:, 2:]
  ExpectAsDefined(TensorOf({2, 3}, {1, 4}, 1), 12);               // x[:, 1:3].t()
  ExpectAsDefined(TensorOf({3}, {2}, 1), 6);                      // x[1::2]
  ExpectAsDefined(TensorOf({3}, {2}), 5);                         // x[::2] of an odd length
  ExpectAsDefined(TensorOf({1, 3, 1}, {77, 1, 0}), 3);            // strides of one element
  ExpectAsDefined(TensorOf({4}, {5}), 16);                        // a diagonal
  ExpectAsDefined(TensorOf({0, 3}, {7, 5}), 0);                   // nothing
  EXPECT_EQ(StoredParts(TensorOf({3, 4}, {4, 1}), 12, 1)->front().order, nullptr);
}

TEST(Strided, RandomViewsOfRandomStorages) {
  std::mt19937 random(7);
  const auto below = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 2000; ++round) {
    // A row-major tensor, then cut, stepped through and permuted.
    pickle::Tensor tensor;
    for (std::size_t dim = 0; dim < 1 + below(4); ++dim) tensor.shape.push_back(1 + below(5));
    tensor.strides = ContiguousStrides(tensor.shape);
    const std::uint64_t storage = Elems(tensor.shape);
    for (std::size_t dim = 0; dim < tensor.shape.size(); ++dim) {
      const std::uint64_t first = below(tensor.shape[dim]);
      const std::uint64_t step = 1 + below(2);
      tensor.offset += first * tensor.strides[dim];
      tensor.shape[dim] = (tensor.shape[dim] - first + step - 1) / step;
      tensor.strides[dim] *= step;
    }
    std::vector<std::size_t> order(tensor.shape.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const pickle::Tensor before = TensorOf(tensor.shape, tensor.strides);
    for (std::size_t dim = 0; dim < order.size(); ++dim) {
      tensor.shape[dim] = before.shape[order[dim]];
      tensor.strides[dim] = before.strides[order[dim]];
    }
    ExpectAsDefined(tensor, storage);
    if (HasFatalFailure() || HasNonfatalFailure()) return;
  }
}

TEST(Strided, ElementsInOnePlaceAreRefusedWithWhatToDo) {
  // A sliding window, and x.expand(4, -1).
  for (const auto& tensor : {TensorOf({3, 3}, {1, 1}), TensorOf({4, 2}, {0, 1})}) {
    const auto parts = StoredParts(tensor, 5, 9);
    ASSERT_FALSE(parts.has_value());
    EXPECT_EQ(parts.error().code, Errc::kUnsupported);
    EXPECT_NE(parts.error().message.find("save a contiguous copy"), std::string::npos);
  }
}

TEST(Strided, TensorsThatTakeTooManyBoxesAreRefused) {
  const pickle::Tensor tensor = TensorOf({4, 2}, {3, 2});
  EXPECT_TRUE(StoredParts(tensor, 12, 8).has_value());
  const auto parts = StoredParts(tensor, 12, 7);
  ASSERT_FALSE(parts.has_value());
  EXPECT_EQ(parts.error().code, Errc::kUnsupported);
}

}  // namespace
}  // namespace shardwright::checkpoints
