// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/strided.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "engine/tensor/shape.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints {
namespace {

/// The dimensions of a tensor, grouped by their strides.
struct DimsByStride {
  std::vector<std::size_t> spread;  ///< with positive strides, the largest stride first
  std::vector<std::size_t> single;  ///< of size 1, so their strides are irrelevant
  bool repeats = false;             ///< a larger dimension has stride 0, so it repeats elements
};

DimsByStride SortDims(const pickle::Tensor& tensor) {
  DimsByStride out;
  for (std::size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    const bool single = tensor.shape[dim] == 1;
    if (single || tensor.strides[dim] > 0) (single ? out.single : out.spread).push_back(dim);
    out.repeats = out.repeats || (!single && tensor.strides[dim] == 0);
  }
  std::stable_sort(out.spread.begin(), out.spread.end(), [&](std::size_t a, std::size_t b) {
    return tensor.strides[a] > tensor.strides[b];
  });
  return out;
}

/// A storage seen as a row-major array in which the tensor is one box.
struct NestedStrides {
  std::vector<std::uint64_t> extents;  ///< by DimsByStride::spread
  std::vector<std::uint64_t> starts;   ///< of the box, in the same order
  std::uint64_t step = 1;              ///< distance of elements along the last dimension
  std::uint64_t step_start = 0;
  std::uint64_t first = 0;  ///< element of the storage where the array begins
};

/// \param aligned  start the array at a multiple of the largest stride, not at the first element
/// \returns nothing if the strides are not nested or the array exceeds the storage
std::optional<NestedStrides> Nest(const pickle::Tensor& tensor,
                                  const std::vector<std::size_t>& spread, std::uint64_t elems,
                                  bool aligned) {
  NestedStrides out;
  if (spread.empty()) {
    out.first = tensor.offset;
    return out;
  }
  const std::uint64_t largest = tensor.strides[spread.front()];
  std::uint64_t rest = aligned ? tensor.offset % largest : 0;
  out.first = tensor.offset - rest;
  out.extents.push_back(tensor.shape[spread.front()]);
  out.starts.push_back(0);
  for (std::size_t i = 1; i < spread.size(); ++i) {
    const std::uint64_t above = tensor.strides[spread[i - 1]];
    const std::uint64_t stride = tensor.strides[spread[i]];
    const std::uint64_t extent = above / stride;
    const std::uint64_t start = rest / stride;
    rest %= stride;
    const std::uint64_t size = tensor.shape[spread[i]];
    if (above % stride != 0 || size > extent || start > extent - size) return std::nullopt;
    out.extents.push_back(extent);
    out.starts.push_back(start);
  }
  out.step = tensor.strides[spread.back()];
  out.step_start = rest;
  const auto array = CheckedMul(out.extents.front(), largest);
  if (!array || *array > elems - out.first) return std::nullopt;
  return out;
}

/// Cuts one box. The shard is the array of `nested`, with its dimensions ordered by stride.
Result<layout::Cut> CutByBox(const pickle::Tensor& tensor, const DimsByStride& dims,
                             const NestedStrides& nested) {
  const std::size_t rank = tensor.shape.size();
  layout::Box box;
  box.at_view.assign(rank, 0);
  box.sizes = tensor.shape;
  Shape view = tensor.shape;
  Shape shard;
  std::vector<std::uint32_t> axes;
  const auto add = [&](std::size_t axis, std::uint64_t extent, std::uint64_t start) {
    axes.push_back(static_cast<std::uint32_t>(axis));
    shard.push_back(extent);
    box.at_shard.push_back(start);
  };
  for (const std::size_t dim : dims.single) add(dim, 1, 0);
  for (std::size_t i = 0; i < dims.spread.size(); ++i) {
    add(dims.spread[i], nested.extents[i], nested.starts[i]);
  }
  if (nested.step > 1) {
    view.push_back(1);
    box.at_view.push_back(0);
    box.sizes.push_back(1);
    add(rank, nested.step, nested.step_start);
  }
  return layout::Cut::Make(std::move(view), std::move(shard), {std::move(box)}, std::move(axes));
}

/// Advances `at` to the next index of `shape` along the dimensions that `moves` accepts.
/// \returns false after the last index
template <class Moves>
bool NextIndex(const Shape& shape, const Moves& moves, std::vector<std::uint64_t>* at) {
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    if (!moves(dim)) continue;
    if (++(*at)[dim] < shape[dim]) return true;
    (*at)[dim] = 0;
  }
  return false;
}

/// Returns the number of runs of consecutive elements.
std::uint64_t CountRuns(const pickle::Tensor& tensor, const DimsByStride& dims) {
  std::uint64_t runs = 1;
  for (const std::size_t dim : dims.spread) runs *= tensor.shape[dim];  // counts the elements first
  const std::size_t inner = dims.spread.back();
  return tensor.strides[inner] == 1 ? runs / tensor.shape[inner] : runs;
}

/// Formats "strides [2] of shape [3]".
std::string StridesText(const pickle::Tensor& tensor) {
  return "strides " + ToString(tensor.strides) + " of shape " + ToString(tensor.shape);
}

}  // namespace

bool IsRowMajor(const pickle::Tensor& tensor) {
  const std::vector<std::uint64_t> dense = ContiguousStrides(tensor.shape);
  for (std::size_t dim = 0; dim < dense.size(); ++dim) {
    if (tensor.shape[dim] > 1 && tensor.strides[dim] != dense[dim]) return false;
  }
  return true;
}

Result<layout::Cut> CutByRuns(const pickle::Tensor& tensor, const Shape& whole,
                              const Shape& offsets, std::uint64_t elems, std::uint64_t most) {
  const DimsByStride dims = SortDims(tensor);
  if (dims.repeats) {
    return Fail(Errc::kUnsupported,
                "one stored element is used for several (Tensor.expand): ", StridesText(tensor),
                ": save a contiguous copy");
  }
  if (CountRuns(tensor, dims) > most) {
    return Fail(Errc::kUnsupported, StridesText(tensor), " need more than ", most,
                " boxes: save a contiguous copy");
  }
  const std::size_t rank = tensor.shape.size();
  const std::size_t inner = dims.spread.back();
  const std::uint64_t run = tensor.strides[inner] == 1 ? tensor.shape[inner] : 1;
  std::vector<layout::Box> boxes;
  std::vector<std::uint64_t> at(rank, 0);
  const auto moves = [&](std::size_t dim) {
    return tensor.shape[dim] > 1 && !(dim == inner && run > 1);
  };
  do {
    layout::Box box;
    box.at_view = offsets;
    box.at_shard.assign(rank, 0);
    box.sizes.assign(rank, 1);
    box.sizes[inner] = run;
    std::uint64_t element = tensor.offset;
    for (std::size_t dim = 0; dim < rank; ++dim) {
      box.at_view[dim] += at[dim];
      element += at[dim] * tensor.strides[dim];
    }
    box.at_shard[inner] = element;
    boxes.push_back(std::move(box));
  } while (NextIndex(tensor.shape, moves, &at));
  Shape storage(rank, 1);
  storage[inner] = elems;
  auto cut = layout::Cut::Make(whole, std::move(storage), std::move(boxes));
  if (cut) return cut;
  return Fail(Errc::kUnsupported, "some of its elements share a position (", StridesText(tensor),
              "): save a contiguous copy");
}

Result<std::vector<StoredPart>> StoredParts(const pickle::Tensor& tensor, std::uint64_t elems,
                                            std::uint64_t most) {
  std::vector<StoredPart> parts;
  SW_TRY_ASSIGN(const std::uint64_t own, CountElems(tensor.shape));
  if (own == 0) {
    parts.push_back({nullptr, 0, 0});
    return parts;
  }
  if (IsRowMajor(tensor)) {
    parts.push_back({nullptr, tensor.offset, own});
    return parts;
  }
  const DimsByStride dims = SortDims(tensor);
  std::optional<NestedStrides> nested;
  if (!dims.repeats) nested = Nest(tensor, dims.spread, elems, true);
  if (!dims.repeats && !nested) nested = Nest(tensor, dims.spread, elems, false);
  auto cut = nested ? CutByBox(tensor, dims, *nested)
                    : CutByRuns(tensor, tensor.shape, Shape(tensor.shape.size(), 0), elems, most);
  if (!cut) return tl::unexpected<Error>(std::move(cut).error());
  StoredPart part;
  part.first = nested ? nested->first : 0;
  part.elems = cut->shard_elems();
  part.order = std::make_shared<const layout::Cut>(*std::move(cut));
  parts.push_back(std::move(part));
  return parts;
}

}  // namespace shardwright::checkpoints
