// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <memory>

#include "support/base/result.h"
#include "trainer/load/load.h"

namespace shardwright::trainer_torch {

/// Wraps a tensor on any device that PyTorch supports. PyTorch copies the data to it. Operations
/// queued for the tensor must have completed. The result keeps a reference to the tensor.
/// \pre it is contiguous
/// \error kIo  PyTorch cannot make a flat view of it
Result<std::shared_ptr<trainer::DeviceTensor>> MakeFar(const torch::stable::Tensor& tensor);

}  // namespace shardwright::trainer_torch
