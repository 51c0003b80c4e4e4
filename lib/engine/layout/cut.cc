// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/cut.h"

#include <numeric>

#include "engine/layout/boxes_internal.h"
#include "support/base/checked.h"

namespace shardwright::layout {
namespace {

bool Inside(std::uint64_t at, std::uint64_t size, std::uint64_t extent) {
  return size <= extent && at <= extent - size;
}

bool IsEmpty(const Box& box) {
  return std::any_of(box.sizes.begin(), box.sizes.end(),
                     [](std::uint64_t size) { return size == 0; });
}

/// Checks that `axes` is empty or has every axis below `rank` once.
Status CheckAxes(const std::vector<std::uint32_t>& axes, std::size_t rank) {
  std::vector<bool> seen(rank);
  bool good = axes.empty() || axes.size() == rank;
  for (const std::uint32_t axis : axes) {
    good = good && axis < rank && !seen[axis];
    if (good) seen[axis] = true;
  }
  if (good) return {};
  return Fail(Errc::kBadInput, "the axes of a shard are not a permutation of its tensor's axes");
}

std::uint64_t SizeInShard(const Box& box, const std::vector<std::uint32_t>& axes, std::size_t dim) {
  return box.sizes[axes.empty() ? dim : axes[dim]];
}

}  // namespace

Cut::Rows Cut::RowsOf(const Box& box, std::span<const std::uint64_t> view_strides,
                      std::span<const std::uint64_t> shard_strides,
                      std::span<const std::uint32_t> axes) {
  std::vector<std::uint64_t> stride_in_shard(shard_strides.begin(), shard_strides.end());
  for (std::size_t i = 0; i < axes.size(); ++i) stride_in_shard[axes[i]] = shard_strides[i];
  Rows rows;
  rows.count = 1;
  rows.row_elems = 1;
  for (std::size_t dim = 0; dim < box.sizes.size(); ++dim) {
    rows.logical_at += box.at_view[dim] * view_strides[dim];
    rows.shard_at += box.at_shard[dim] * shard_strides[dim];
    const std::uint64_t size = box.sizes[dim];
    if (size == 1) continue;
    // Merge this axis with the previous one if their elements are contiguous in view and shard.
    if (!rows.outer.empty() && rows.logical_strides.back() == size * view_strides[dim] &&
        rows.shard_strides.back() == size * stride_in_shard[dim]) {
      rows.outer.back() *= size;
      rows.logical_strides.back() = view_strides[dim];
      rows.shard_strides.back() = stride_in_shard[dim];
      continue;
    }
    rows.outer.push_back(size);
    rows.logical_strides.push_back(view_strides[dim]);
    rows.shard_strides.push_back(stride_in_shard[dim]);
  }
  if (!rows.outer.empty() && rows.logical_strides.back() == 1 && rows.shard_strides.back() == 1) {
    rows.row_elems = rows.outer.back();
    rows.outer.pop_back();
    rows.logical_strides.pop_back();
    rows.shard_strides.pop_back();
  }
  for (const std::uint64_t extent : rows.outer) rows.count *= extent;
  return rows;
}

Cut::Rows Cut::Rows::ByShard() const {
  std::vector<std::size_t> order(outer.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return shard_strides[a] > shard_strides[b]; });
  Rows sorted = *this;
  for (std::size_t i = 0; i < order.size(); ++i) {
    sorted.outer[i] = outer[order[i]];
    sorted.logical_strides[i] = logical_strides[order[i]];
    sorted.shard_strides[i] = shard_strides[order[i]];
  }
  return sorted;
}

Result<Cut> Cut::Make(Shape view, Shape shard, std::vector<Box> boxes,
                      std::vector<std::uint32_t> axes) {
  Cut cut;
  const std::size_t rank = view.size();
  if (shard.size() != rank) {
    return Fail(Errc::kBadInput, "shard ", ToString(shard), " and view ", ToString(view),
                " differ in rank");
  }
  SW_TRY(CheckAxes(axes, rank));
  if (std::is_sorted(axes.begin(), axes.end())) axes.clear();
  SW_TRY(CountElems(view));
  SW_TRY_ASSIGN(cut.shard_elems_, CountElems(shard));
  for (const Box& box : boxes) {
    bool inside =
        box.at_view.size() == rank && box.at_shard.size() == rank && box.sizes.size() == rank;
    for (std::size_t dim = 0; inside && dim < rank; ++dim) {
      inside = Inside(box.at_view[dim], box.sizes[dim], view[dim]) &&
               Inside(box.at_shard[dim], SizeInShard(box, axes, dim), shard[dim]);
    }
    if (!inside) {
      return Fail(Errc::kBadInput, "box of ", ToString(box.sizes), " at ", ToString(box.at_view),
                  " leaves the tensor ", ToString(view), " or its shard ", ToString(shard));
    }
  }
  std::erase_if(boxes, IsEmpty);
  for (const Side side : {Side::kLogical, Side::kShard}) {
    std::vector<PlacedBox> placed;
    AddPlaced(boxes, axes, side, &placed);
    if (const auto both = FindOverlap(std::move(placed))) {
      return Fail(Errc::kBadInput, "boxes at ", ToString(both->first.at), " and ",
                  ToString(both->second.at), " of ",
                  ToString(side == Side::kLogical ? view : shard), " overlap");
    }
  }
  const std::vector<std::uint64_t> view_strides = ContiguousStrides(view);
  const std::vector<std::uint64_t> shard_strides = ContiguousStrides(shard);
  for (const Box& box : boxes) {
    Rows rows = RowsOf(box, view_strides, shard_strides, axes);
    cut.covered_elems_ += rows.count * rows.row_elems;
    cut.rows_.push_back(std::move(rows));
  }
  if (!axes.empty()) {
    for (const Rows& rows : cut.rows_) cut.rows_by_shard_.push_back(rows.ByShard());
  }
  cut.whole_ = axes.empty() && view == shard && cut.covered_elems_ == cut.shard_elems_ &&
               std::all_of(boxes.begin(), boxes.end(),
                           [](const Box& box) { return box.at_view == box.at_shard; });
  cut.view_ = std::move(view);
  cut.shard_ = std::move(shard);
  cut.boxes_ = std::move(boxes);
  cut.axes_ = std::move(axes);
  return cut;
}

CutPtr Cut::Compose(CutPtr outer, CutPtr inner) {
  SW_CHECK(outer->shard_elems() == Elems(inner->view()));
  if (inner->is_whole()) return outer;
  if (outer->is_whole()) return inner;
  Cut cut;
  cut.view_ = outer->view();
  cut.shard_ = inner->shard();
  cut.shard_elems_ = inner->shard_elems();
  cut.covered_elems_ = inner->covered_elems();
  cut.outer_ = std::move(outer);
  cut.inner_ = std::move(inner);
  if (cut.outer_->covered_elems() != cut.outer_->shard_elems()) {
    cut.covered_elems_ = 0;
    cut.ForShardRange(0, cut.shard_elems_,
                      [&](const Run& run) { cut.covered_elems_ += run.elems; });
  }
  return std::make_shared<const Cut>(std::move(cut));
}

void Cut::ForComposed(bool logical, std::uint64_t first, std::uint64_t last,
                      const std::function<void(const Run&)>& visit) const {
  if (logical) {
    outer_->ForLogicalRange(first, last, [&](const Run& far) {
      inner_->ForLogicalRange(far.shard, far.shard + far.elems, [&](const Run& near) {
        visit({far.logical + (near.logical - far.shard), near.shard, near.elems});
      });
    });
    return;
  }
  inner_->ForShardRange(first, last, [&](const Run& near) {
    outer_->ForShardRange(near.logical, near.logical + near.elems, [&](const Run& far) {
      visit({far.logical, near.shard + (far.shard - near.logical), far.elems});
    });
  });
}

Cut Cut::Whole(Shape shape) {
  Box box{std::vector<std::uint64_t>(shape.size()), std::vector<std::uint64_t>(shape.size()),
          shape};
  Shape shard = shape;
  Result<Cut> cut = Make(std::move(shape), std::move(shard), {std::move(box)});
  SW_CHECK(cut.has_value());
  return *std::move(cut);
}

std::string Cut::Explain() const {
  if (whole_) return "whole";
  if (is_composed()) return inner_->Explain() + ", as " + outer_->Explain();
  if (boxes_.empty()) return "no elements";
  const std::uint64_t padding = shard_elems_ - covered_elems_;
  const std::string pad = padding > 0 ? " + " + std::to_string(padding) + " padding" : "";
  if (boxes_.size() > 1) {
    return std::to_string(boxes_.size()) + " boxes, " + std::to_string(covered_elems_) +
           " elements of " + ToString(view_) + pad;
  }
  const Box& box = boxes_.front();
  std::string text;
  for (std::size_t dim = 0; dim < view_.size(); ++dim) {
    if (box.sizes[dim] == view_[dim]) continue;
    if (!text.empty()) text += ", ";
    text += "dim " + std::to_string(dim) + " [" + std::to_string(box.at_view[dim]) + ", " +
            std::to_string(box.at_view[dim] + box.sizes[dim]) + ") of " +
            std::to_string(view_[dim]);
  }
  if (text.empty()) text = "whole";
  if (!axes_.empty()) text += " with its axes in another order";
  return text + pad;
}

bool operator==(const Cut& a, const Cut& b) {
  if (a.is_composed() || b.is_composed()) {
    const auto equal = [](const CutPtr& x, const CutPtr& y) { return x == y || *x == *y; };
    return a.is_composed() && b.is_composed() && equal(a.inner_, b.inner_) &&
           equal(a.outer_, b.outer_);
  }
  const auto same = [](const Box& x, const Box& y) {
    return x.at_view == y.at_view && x.at_shard == y.at_shard && x.sizes == y.sizes;
  };
  return a.view_ == b.view_ && a.shard_ == b.shard_ && a.axes_ == b.axes_ &&
         std::equal(a.boxes_.begin(), a.boxes_.end(), b.boxes_.begin(), b.boxes_.end(), same);
}

}  // namespace shardwright::layout
