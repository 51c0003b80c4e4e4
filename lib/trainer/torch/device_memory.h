// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <memory>

#include "support/base/result.h"
#include "trainer/load/load.h"

namespace shardwright::trainer_torch {

/// A tensor on a device, which PyTorch copies to: whatever device it knows. What was queued for the
/// tensor has to have ended. It keeps the tensor.
/// \pre it is contiguous
/// \error kIo  PyTorch cannot make a flat view of it
Result<std::shared_ptr<trainer::DeviceTensor>> MakeFar(const torch::stable::Tensor& tensor);

}  // namespace shardwright::trainer_torch
