// SPDX-License-Identifier: Apache-2.0
// lib/trainer/torch: operators for PyTorch, and the Python package that calls them.
// operators.cc registers torch.ops.shardwright.* on the stable ABI of LibTorch, so that one library
// is for every PyTorch from 2.10 on. An operator takes a request as JSON and answers with JSON, an
// error with our message and code included: nothing is thrown into PyTorch. Those of tokens.cc are
// on tensors and have no other way to fail than to throw. What they do is lib/trainer/load and
// lib/placement. The folder shardwright is the package: it knows trainers, and which of their
// tensors are what.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/base/result.h"
#include "trainer/load/load.h"

namespace shardwright::trainer_torch {

/// A tensor of the trainer as an operator was given it, without strides.
struct Given {
  std::byte* data = nullptr;                   ///< null where it is far
  std::shared_ptr<trainer::DeviceTensor> far;  ///< null on the CPU
  std::uint64_t elems = 0;
  std::string dtype;  ///< as in torch: "float32"
};

/// Carries out the operator `load`.
/// \param request  JSON: "held" as trainer::ParseShards takes it but for "dtype", one for each
///        tensor, and what load.cc reads of it
/// \param tensors  one more where some are far: LoadOptions::staging
/// \returns  JSON: {"result": as trainer::Tell} or {"error": {"code", "message", "rank"}}
/// Collective. Nothing is thrown.
std::string LoadRequest(const std::string& request, const Result<std::vector<Given>>& tensors);

}  // namespace shardwright::trainer_torch
