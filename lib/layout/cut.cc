#include "layout/cut.h"

#include "base/checked.h"

namespace shardwright::layout {
namespace {

bool Inside(std::uint64_t at, std::uint64_t size, std::uint64_t extent) {
  return size <= extent && at <= extent - size;
}

bool IsEmpty(const Box& box) {
  return std::any_of(box.sizes.begin(), box.sizes.end(),
                     [](std::uint64_t size) { return size == 0; });
}

bool Overlap(const std::vector<std::uint64_t>& a, const std::vector<std::uint64_t>& a_sizes,
             const std::vector<std::uint64_t>& b, const std::vector<std::uint64_t>& b_sizes) {
  for (std::size_t dim = 0; dim < a.size(); ++dim) {
    if (a[dim] + a_sizes[dim] <= b[dim] || b[dim] + b_sizes[dim] <= a[dim]) return false;
  }
  return true;
}

}  // namespace

Result<Cut> Cut::Make(Shape view, Shape shard, std::vector<Box> boxes) {
  Cut cut;
  const std::size_t rank = view.size();
  if (shard.size() != rank) {
    return Fail(Errc::kBadInput,
                "shard " + ToString(shard) + " and view " + ToString(view) + " differ in rank");
  }
  SW_TRY(CountElems(view));
  SW_TRY_ASSIGN(cut.shard_elems_, CountElems(shard));
  for (const Box& box : boxes) {
    bool inside =
        box.at_view.size() == rank && box.at_shard.size() == rank && box.sizes.size() == rank;
    for (std::size_t dim = 0; inside && dim < rank; ++dim) {
      inside = Inside(box.at_view[dim], box.sizes[dim], view[dim]) &&
               Inside(box.at_shard[dim], box.sizes[dim], shard[dim]);
    }
    if (!inside) {
      return Fail(Errc::kBadInput, "box of " + ToString(box.sizes) + " at " +
                                       ToString(box.at_view) + " leaves the tensor " +
                                       ToString(view) + " or its shard " + ToString(shard));
    }
  }
  std::erase_if(boxes, IsEmpty);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      const Box& a = boxes[i];
      const Box& b = boxes[j];
      if (Overlap(a.at_view, a.sizes, b.at_view, b.sizes) ||
          Overlap(a.at_shard, a.sizes, b.at_shard, b.sizes)) {
        return Fail(Errc::kBadInput, "boxes at " + ToString(a.at_view) + " and " +
                                         ToString(b.at_view) + " of " + ToString(view) +
                                         " overlap");
      }
    }
  }
  const std::vector<std::uint64_t> view_strides = ContiguousStrides(view);
  const std::vector<std::uint64_t> shard_strides = ContiguousStrides(shard);
  for (const Box& box : boxes) {
    Rows rows;
    rows.count = 1;
    rows.row_elems = 1;
    std::size_t split = rank;  // dims before it enumerate rows, it and those after it are one row
    const auto full = [&](std::size_t dim) {
      return box.sizes[dim] == view[dim] && box.sizes[dim] == shard[dim];
    };
    if (rank > 0) {
      split = rank - 1;
      while (split > 0 && full(split)) --split;
    }
    for (std::size_t dim = 0; dim < rank; ++dim) {
      rows.logical_at += box.at_view[dim] * view_strides[dim];
      rows.shard_at += box.at_shard[dim] * shard_strides[dim];
      if (dim < split) {
        rows.outer.push_back(box.sizes[dim]);
        rows.logical_strides.push_back(view_strides[dim]);
        rows.shard_strides.push_back(shard_strides[dim]);
        rows.count *= box.sizes[dim];
      } else {
        rows.row_elems *= box.sizes[dim];
      }
    }
    cut.covered_elems_ += rows.count * rows.row_elems;
    cut.rows_.push_back(std::move(rows));
  }
  cut.whole_ = view == shard && cut.covered_elems_ == cut.shard_elems_ &&
               std::all_of(boxes.begin(), boxes.end(),
                           [](const Box& box) { return box.at_view == box.at_shard; });
  cut.view_ = std::move(view);
  cut.shard_ = std::move(shard);
  cut.boxes_ = std::move(boxes);
  return cut;
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
  return (text.empty() ? "whole" : text) + pad;
}

bool operator==(const Cut& a, const Cut& b) {
  const auto same = [](const Box& x, const Box& y) {
    return x.at_view == y.at_view && x.at_shard == y.at_shard && x.sizes == y.sizes;
  };
  return a.view_ == b.view_ && a.shard_ == b.shard_ &&
         std::equal(a.boxes_.begin(), a.boxes_.end(), b.boxes_.begin(), b.boxes_.end(), same);
}

}  // namespace shardwright::layout
