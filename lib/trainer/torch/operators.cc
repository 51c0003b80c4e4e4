// SPDX-License-Identifier: Apache-2.0
#include "trainer/torch/operators.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <utility>

#include "partial/store/store.h"
#include "support/base/bytes.h"
#include "trainer/torch/answer.h"
#include "trainer/torch/device_memory.h"
#include "trainer/torch/exact_replay.h"
#include "trainer/torch/experts.h"

namespace shardwright::trainer_torch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// Returns the name of an element type, or nothing for an unsupported type.
std::optional<std::string> NameOf(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return std::nullopt;
  }
}

Result<std::vector<TrainerTensor>> Take(const std::vector<Tensor>& tensors) {
  std::vector<TrainerTensor> out;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    // The package reports this with the tensor's name; this check is for other callers.
    const std::string where = StrCat("tensor ", i);
    if (!tensor.is_contiguous()) {
      return Fail(Errc::kUnsupported, where, ": only contiguous tensors are supported");
    }
    std::optional<std::string> name = NameOf(tensor.scalar_type());
    if (!name) return Fail(Errc::kUnsupported, where, ": unknown element type");
    TrainerTensor given;
    given.elems = static_cast<std::uint64_t>(tensor.numel());
    given.dtype = *std::move(name);
    if (tensor.is_cpu()) {
      given.data = static_cast<std::byte*>(tensor.mutable_data_ptr());
    } else {
      SW_TRY_ASSIGN(given.far, MakeFar(tensor));
    }
    out.push_back(std::move(given));
  }
  return out;
}

// TORCH_BOX requires functions that take parameters by value.
// NOLINTBEGIN(performance-unnecessary-value-param)

/// torch.ops.shardwright.load: fills tensors from a checkpoint.
std::string LoadOperator(std::string request, std::vector<Tensor> tensors) {
  return LoadRequest(request, Take(tensors));
}

/// torch.ops.shardwright.parse_size: {"size": "1.5GB"} yields {"bytes": 1500000000}.
std::string ParseSizeOperator(std::string request) {
  return Answer(request, [](const nlohmann::json& of) -> Result<nlohmann::json> {
    SW_TRY_ASSIGN(const std::uint64_t bytes, ParseBytes(of.at("size").get<std::string>()));
    return nlohmann::json{{"bytes", bytes}};
  });
}

/// torch.ops.shardwright.prepare_store: partial::Store::Prepare for {"store": PATH}; yields {}.
std::string PrepareStoreOperator(std::string request) {
  return Answer(request, [](const nlohmann::json& of) -> Result<nlohmann::json> {
    SW_TRY(partial::Store::Prepare(of.at("store").get<std::string>()));
    return nlohmann::json::object();
  });
}

std::string ReadPlanOperator(std::string request) { return ReadPlanRequest(request); }
std::string PlanMovesOperator(std::string request) { return PlanMovesRequest(request); }
std::string CalibrateOperator(std::string request) { return CalibrateRequest(request); }
std::string CheckStepOperator(std::string request) { return CheckStepRequest(request); }

// NOLINTEND(performance-unnecessary-value-param)

}  // namespace
}  // namespace shardwright::trainer_torch

STABLE_TORCH_LIBRARY(shardwright, library) {
  library.def("load(str request, Tensor[] tensors) -> str");
  library.def("parse_size(str request) -> str");
  library.def("prepare_store(str request) -> str");
  library.def("read_plan(str request) -> str");
  library.def("plan_moves(str request) -> str");
  library.def("calibrate(str request) -> str");
  library.def("check_step(str request) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(shardwright, CompositeExplicitAutograd, library) {
  using namespace shardwright::trainer_torch;
  library.impl("load", TORCH_BOX(&LoadOperator));
  library.impl("parse_size", TORCH_BOX(&ParseSizeOperator));
  library.impl("prepare_store", TORCH_BOX(&PrepareStoreOperator));
  library.impl("read_plan", TORCH_BOX(&ReadPlanOperator));
  library.impl("plan_moves", TORCH_BOX(&PlanMovesOperator));
  library.impl("calibrate", TORCH_BOX(&CalibrateOperator));
  library.impl("check_step", TORCH_BOX(&CheckStepOperator));
}
