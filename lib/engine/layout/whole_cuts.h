// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>

#include "engine/layout/cut.h"
#include "engine/tensor/shape.h"

namespace shardwright::layout {

/// Makes one cut of the whole tensor per shape, because models have
/// many tensors but few shapes, and a cut takes half a kilobyte.
class WholeCuts {
 public:
  /// Returns Cut::Whole of the shape. Pure except for the cache of earlier results.
  CutPtr Of(const Shape& shape) {
    CutPtr& cut = cuts_[shape];
    if (cut == nullptr) cut = std::make_shared<const Cut>(Cut::Whole(shape));
    return cut;
  }

 private:
  std::map<Shape, CutPtr> cuts_;
};

}  // namespace shardwright::layout
