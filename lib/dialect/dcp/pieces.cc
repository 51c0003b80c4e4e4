#include "dialect/dcp/pieces_internal.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

namespace shardwright::dialect::dcp {
namespace {

constexpr std::uint64_t kMostBoxes = std::uint64_t{1} << 20;

bool IsRowMajor(const pickle::Tensor& tensor) {
  const std::vector<std::uint64_t> dense = ContiguousStrides(tensor.shape);
  for (std::size_t dim = 0; dim < dense.size(); ++dim) {
    if (tensor.shape[dim] > 1 && tensor.strides[dim] != dense[dim]) return false;
  }
  return true;
}

/// A box for each run of elements that lie one after another, along dimension `inner`; the shard
/// is the storage, seen as a column along that dimension.
std::vector<layout::Box> RunsOf(const pickle::Tensor& tensor, const Shape& offsets,
                                std::size_t inner, std::uint64_t run) {
  const std::size_t rank = tensor.shape.size();
  std::vector<layout::Box> boxes;
  std::vector<std::uint64_t> at(rank, 0);
  while (true) {
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
    std::size_t dim = rank;
    while (dim-- > 0) {
      at[dim] += dim == inner ? run : 1;
      if (at[dim] < tensor.shape[dim]) break;
      at[dim] = 0;
    }
    if (dim > rank) return boxes;
  }
}

}  // namespace

Result<layout::CutPtr> PieceCuts::Of(const Shape& shape, const layout::Piece& piece) {
  std::vector<std::uint64_t> key = shape;
  key.insert(key.end(), piece.offset.begin(), piece.offset.end());
  key.insert(key.end(), piece.sizes.begin(), piece.sizes.end());
  const auto found = known_.find(key);
  if (found != known_.end()) return found->second;
  SW_TRY_ASSIGN(layout::Cut cut, layout::CutOf(shape, piece));
  auto shared = std::make_shared<const layout::Cut>(std::move(cut));
  known_.emplace(std::move(key), shared);
  return shared;
}

Result<PieceCuts::Held> PieceCuts::Stored(const Shape& shape, const Shape& offsets,
                                          const pickle::Tensor& tensor, std::uint64_t elems) {
  Held held;
  if (IsRowMajor(tensor)) {
    held.first = tensor.offset;
    held.elems = Elems(tensor.shape);
    SW_TRY_ASSIGN(held.cut, Of(shape, {offsets, tensor.shape}));
    return held;
  }
  std::size_t inner = tensor.shape.size();
  for (std::size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] < 2) continue;
    if (inner == tensor.shape.size() || tensor.strides[dim] < tensor.strides[inner]) inner = dim;
  }
  const std::uint64_t run = tensor.strides[inner] == 1 ? tensor.shape[inner] : 1;
  if (Elems(tensor.shape) / run > kMostBoxes) {
    return Fail(Errc::kUnsupported, "its elements lie in " +
                                        std::to_string(Elems(tensor.shape) / run) +
                                        " runs: save it contiguous");
  }
  Shape storage(tensor.shape.size(), 1);
  storage[inner] = elems;
  auto cut = layout::Cut::Make(shape, storage, RunsOf(tensor, offsets, inner, run));
  if (!cut) {
    return Fail(Errc::kUnsupported, "a tensor of which several elements lie in one place");
  }
  held.cut = std::make_shared<const layout::Cut>(*std::move(cut));
  held.elems = elems;
  return held;
}

bool SameOptions(const pickle::Node* a, const pickle::Node* b) {
  if (a == b) return true;
  if (a == nullptr || b == nullptr || a->kind != b->kind || a->integer != b->integer ||
      std::bit_cast<std::uint64_t>(a->real) != std::bit_cast<std::uint64_t>(b->real) ||
      a->text != b->text || a->items.size() != b->items.size()) {
    return false;
  }
  if (a->is_tensor() || a->kind == pickle::Kind::kObject) return false;
  if (a->is_dict()) {  // in any order
    for (std::size_t i = 0; i < a->entry_count(); ++i) {
      if (!a->key(i)->is_string()) return false;
      const pickle::Node* other = b->Find(a->key(i)->text);
      if (other == nullptr || !SameOptions(a->value(i), other)) return false;
    }
    return true;
  }
  for (std::size_t i = 0; i < a->items.size(); ++i) {
    if (!SameOptions(a->items[i], b->items[i])) return false;
  }
  return true;
}

}  // namespace shardwright::dialect::dcp
