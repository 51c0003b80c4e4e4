// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "engine/tensor/dtype.h"
#include "files/pickle/names.h"
#include "support/base/result.h"

namespace shardwright::pickle {

/// Globals with special handling. Every other class remains a name.
enum class Known : std::uint8_t {
  kOther,
  kOrderedDict,
  kSize,
  kSet,
  kFrozenSet,
  kBytes,
  kByteArray,
  kEncode,
  kGetattr,
  kNewObj,
  kNewObjEx,
  kStorage,
  kTensor,
  kTensorV2,
  kTensorV3,
  kParameter,
  kParameterWithState,
  kFromType,
  kDeviceTensor,
  kWrapper,  ///< builds a tensor of a class that wraps others
  kUnsupportedTensor,
  kUnsupportedStorage,
};

/// Meaning of a GLOBAL, after Python 2 names have been mapped.
struct Meaning {
  std::string dotted;  ///< "module.name"
  std::string nested;  ///< rest of a dotted name: "Inner" of "module.Outer.Inner", or empty
  Known known = Known::kOther;
  DType dtype = DType::kU8;  ///< of a storage class
  bool untyped = false;      ///< UntypedStorage
};

/// Classifies a global by name. Nothing is looked up or imported.
/// \param protocol  of the pickle; below 3, modules have their Python 2 names
/// \error kBadInput  a name that is not a dotted identifier or gives access to code
///        execution; a Python 2 module in a later protocol, which Python cannot import either
/// Pure.
Result<Meaning> Interpret(std::string_view module, std::string_view name, unsigned protocol);

/// Returns true if reading this attribute of a class cannot lead to code execution.
bool IsHarmlessAttribute(std::string_view name);

/// Returns true for classes of tensors distributed over ranks, which wrap the piece of one rank.
bool IsShardedTensor(std::string_view dotted);

/// Returns true for the class of a device mesh. Its attributes refer to other meshes and back.
bool IsDeviceMesh(std::string_view dotted);

/// Returns true for the attributes of meshes, which readers of checkpoints do not need.
bool LeadsToMeshes(std::string_view attribute);

/// Returns the storage class of a dtype in module torch ("FloatStorage"), empty if it has none.
std::string_view StorageClass(DType dtype);

/// Returns module and name with their spelling in protocol 2, for writing.
/// \pre dotted contains a dot
std::pair<std::string, std::string> Spelling(std::string_view dotted);

}  // namespace shardwright::pickle
