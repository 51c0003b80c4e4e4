// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>

#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"

namespace shardwright::layout {

/// Makes cuts of whole tensors, one for all tensors of a shape: models have many tensors and few
/// shapes, and a cut takes half a kilobyte.
class WholeCuts {
 public:
  /// Returns Cut::Whole of the shape. Pure but for the memory of earlier calls.
  CutPtr Of(const Shape& shape) {
    CutPtr& cut = cuts_[shape];
    if (cut == nullptr) cut = std::make_shared<const Cut>(Cut::Whole(shape));
    return cut;
  }

 private:
  std::map<Shape, CutPtr> cuts_;
};

}  // namespace shardwright::layout
