// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dcp/pieces_internal.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <utility>

#include "checkpoints/pickled/strided.h"

namespace shardwright::checkpoints::dcp {
namespace {

constexpr std::uint64_t kMostBoxes = std::uint64_t{1} << 20;

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

Result<PieceCuts::StoredPiece> PieceCuts::Stored(const Shape& shape, const Shape& offsets,
                                                 const pickle::Tensor& tensor,
                                                 std::uint64_t elems) {
  StoredPiece held;
  if (IsRowMajor(tensor)) {
    held.first = tensor.offset;
    held.elems = Elems(tensor.shape);
    SW_TRY_ASSIGN(held.cut, Of(shape, {offsets, tensor.shape}));
    return held;
  }
  SW_TRY_ASSIGN(layout::Cut cut, CutByRuns(tensor, shape, offsets, elems, kMostBoxes));
  held.cut = std::make_shared<const layout::Cut>(std::move(cut));
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
  if (a->is_dict()) {  // entries may be in any order
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

}  // namespace shardwright::checkpoints::dcp
