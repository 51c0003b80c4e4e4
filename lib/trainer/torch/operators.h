// SPDX-License-Identifier: Apache-2.0
// lib/trainer/torch: operators for PyTorch, and the Python package that calls them.
// operators.cc registers torch.ops.shardwright.* on the stable ABI of LibTorch, so
// that one library supports every PyTorch from 2.10 on. An operator takes a request
// as JSON and returns JSON. It returns an error with its code and message, and
// throws nothing into PyTorch. Only the operators of tokens.cc, which return
// tensors, throw. Operators call lib/trainer/load, lib/placement and other modules.
// The folder shardwright is the Python package, which knows the tensors of trainers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/base/result.h"
#include "trainer/load/load.h"

namespace shardwright::trainer_torch {

/// A tensor of the trainer as an operator received it, without strides.
struct TrainerTensor {
  std::byte* data = nullptr;                   ///< null if it is on a device
  std::shared_ptr<trainer::DeviceTensor> far;  ///< null on the CPU; otherwise copies to the device
  std::uint64_t elems = 0;
  std::string dtype;  ///< as in torch: "float32"
};

/// Implements the operator `load`.
/// \param request  JSON: "held", a list with an entry per tensor as in trainer::ParseShards, but
///        without "dtype"; load.cc lists the other keys
/// \param tensors  one per entry; then LoadOptions::staging if some are on a device
/// \returns  JSON: {"result": as trainer::LoadResultJson} or {"error": {"code", "message", "rank"}}
/// Collective. Nothing is thrown.
std::string LoadRequest(const std::string& request,
                        const Result<std::vector<TrainerTensor>>& tensors);

}  // namespace shardwright::trainer_torch
