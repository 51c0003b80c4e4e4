// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::layout {

/// A box of elements at `at_view` in the logical tensor and at `at_shard` in the shard.
struct Box {
  std::vector<std::uint64_t> at_view;   ///< by axis of the view
  std::vector<std::uint64_t> at_shard;  ///< by axis of the shard
  std::vector<std::uint64_t> sizes;     ///< by axis of the view
};

/// Elements that are contiguous both in the logical tensor and
/// in the shard. Positions are row-major and count elements.
struct Run {
  std::uint64_t logical = 0;
  std::uint64_t shard = 0;
  std::uint64_t elems = 0;
};

/// Describes which elements of a logical tensor a shard contains, and in which order: a TP slice,
/// a stack of sub-tensors, a transposed matrix, a padded vocabulary or a DCP chunk
/// (docs/architecture.md, "Shard maps"). `view` is a reshape of the logical tensor, and the shard
/// has the axes of the view in the same or another order. Shard elements outside all boxes are
/// padding without a logical element. A cut may also be a composition of two cuts: see Compose.
class Cut {
 public:
  /// \param axes  axis of the view for each axis of the shard; empty: the same axes
  /// \pre every box has the rank of `view` and `shard`
  /// \error kBadInput  a box leaves the view or the shard, two boxes overlap
  ///        in either, or `axes` is not a permutation of the axes of the view
  static Result<Cut> Make(Shape view, Shape shard, std::vector<Box> boxes,
                          std::vector<std::uint32_t> axes = {});

  /// Makes the cut of a shard that is the whole tensor.
  static Cut Whole(Shape shape);

  /// Makes a cut through an intermediate tensor. `outer` places the elements of the intermediate
  /// tensor (its shard) in the logical tensor, and `inner` cuts the intermediate tensor. Elements
  /// of the intermediate tensor that `outer` does not cover become padding of the result.
  /// \pre outer->shard_elems() is the number of elements of inner->view()
  static std::shared_ptr<const Cut> Compose(std::shared_ptr<const Cut> outer,
                                            std::shared_ptr<const Cut> inner);

  const Shape& view() const { return view_; }
  const Shape& shard() const { return shard_; }
  /// \pre !is_composed()
  const std::vector<Box>& boxes() const { return boxes_; }
  /// Returns the axis of the view for each axis of the shard; empty if they are the same.
  const std::vector<std::uint32_t>& axes() const { return axes_; }
  bool is_composed() const { return inner_ != nullptr; }
  /// \pre is_composed()
  const Cut& outer() const { return *outer_; }
  const Cut& inner() const { return *inner_; }
  std::uint64_t shard_elems() const { return shard_elems_; }
  /// Returns the number of elements of the logical tensor in the shard, without padding.
  std::uint64_t covered_elems() const { return covered_elems_; }
  bool is_whole() const { return whole_; }

  /// Visits every run of shard elements within [first, last), box by box.
  template <class Visit>
  void ForShardRange(std::uint64_t first, std::uint64_t last, Visit&& visit) const {
    if (is_composed()) return ForComposed(false, first, last, std::ref(visit));
    ForRange<false>(rows_by_shard_.empty() ? rows_ : rows_by_shard_, first, last, visit);
  }

  /// Visits every run of logical elements within [first, last), box by box.
  template <class Visit>
  void ForLogicalRange(std::uint64_t first, std::uint64_t last, Visit&& visit) const {
    if (is_composed()) return ForComposed(true, first, last, std::ref(visit));
    ForRange<true>(rows_, first, last, visit);
  }

  /// Describes the cut in one line: "whole", "rows [0, 31) of 61", "4 boxes of [4, 8]".
  std::string Explain() const;

  friend bool operator==(const Cut& a, const Cut& b);

 private:
  // A box as rows: the extents in `outer` enumerate rows of `row_elems` contiguous
  // elements. They ascend in the logical tensor, or in the shard for rows_by_shard_.
  struct Rows {
    std::vector<std::uint64_t> outer;
    std::vector<std::uint64_t> logical_strides;
    std::vector<std::uint64_t> shard_strides;
    std::uint64_t count = 0;
    std::uint64_t row_elems = 0;
    std::uint64_t logical_at = 0;
    std::uint64_t shard_at = 0;

    Run At(std::uint64_t row) const {
      Run run{logical_at, shard_at, row_elems};
      for (std::size_t dim = outer.size(); dim-- > 0 && row > 0;) {
        const std::uint64_t index = row % outer[dim];
        row /= outer[dim];
        run.logical += index * logical_strides[dim];
        run.shard += index * shard_strides[dim];
      }
      return run;
    }
    Rows ByShard() const;
  };

  static Rows RowsOf(const Box& box, std::span<const std::uint64_t> view_strides,
                     std::span<const std::uint64_t> shard_strides,
                     std::span<const std::uint32_t> axes);
  void ForComposed(bool logical, std::uint64_t first, std::uint64_t last,
                   const std::function<void(const Run&)>& visit) const;

  template <bool kLogical, class Visit>
  void ForRange(const std::vector<Rows>& boxes, std::uint64_t first, std::uint64_t last,
                Visit&& visit) const {
    for (const Rows& rows : boxes) {
      // Finds the first row that reaches into the range by bisection, because rows ascend.
      std::uint64_t row = 0;
      for (std::uint64_t count = rows.count; count > 0;) {
        const std::uint64_t half = count / 2;
        const Run run = rows.At(row + half);
        if ((kLogical ? run.logical : run.shard) + run.elems <= first) {
          row += half + 1;
          count -= half + 1;
        } else {
          count = half;
        }
      }
      for (; row < rows.count; ++row) {
        Run run = rows.At(row);
        const std::uint64_t start = kLogical ? run.logical : run.shard;
        if (start >= last) break;
        const std::uint64_t skip = start < first ? first - start : 0;
        run.logical += skip;
        run.shard += skip;
        run.elems = std::min(run.elems - skip, last - (start + skip));
        visit(run);
      }
    }
  }

  Shape view_;
  Shape shard_;
  std::vector<Box> boxes_;
  std::vector<std::uint32_t> axes_;
  std::vector<Rows> rows_;
  std::vector<Rows> rows_by_shard_;  // empty if rows_ also ascend in the shard
  std::shared_ptr<const Cut> outer_;
  std::shared_ptr<const Cut> inner_;
  std::uint64_t shard_elems_ = 0;
  std::uint64_t covered_elems_ = 0;
  bool whole_ = false;
};

using CutPtr = std::shared_ptr<const Cut>;

}  // namespace shardwright::layout
