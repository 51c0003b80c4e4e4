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

/// Globals with a meaning of their own. Every other class stays a name.
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

/// What a GLOBAL names, after Python 2 names have been mapped.
struct Meaning {
  std::string dotted;  ///< "module.name"
  std::string nested;  ///< rest of a dotted name: "Inner" of "module.Outer.Inner", or empty
  Known known = Known::kOther;
  DType dtype = DType::kU8;  ///< of a storage class
  bool untyped = false;      ///< UntypedStorage
};

/// Reads a global's name. Nothing is looked up or imported.
/// \param protocol  of the pickle: below 3 modules have their names of Python 2
/// \error kBadInput  a name that is not a dotted identifier, or that gives access to code
///        execution; a module that only Python 2 has, in a later protocol, where Python finds none
/// Pure.
Result<Meaning> Interpret(std::string_view module, std::string_view name, unsigned protocol);

/// True if reading this attribute of a class cannot be a step towards running code.
bool IsHarmlessAttribute(std::string_view name);

/// True for the classes of tensors that are spread over ranks, which wrap the piece of one rank.
bool IsShardedTensor(std::string_view dotted);

/// True for the class of a mesh of ranks, whose attributes lead to other meshes and back.
bool IsDeviceMesh(std::string_view dotted);

/// True for those attributes: nothing that is read of a checkpoint needs them.
bool LeadsToMeshes(std::string_view attribute);

/// The storage class of a dtype in module torch ("FloatStorage"), empty if it has none.
std::string_view StorageClass(DType dtype);

/// Module and name as protocol 2 spells them, for writing.
/// \pre dotted holds a dot
std::pair<std::string, std::string> Spelling(std::string_view dotted);

}  // namespace shardwright::pickle
