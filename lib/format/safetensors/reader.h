#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "os/file.h"
#include "tensor/dtype.h"
#include "tensor/shape.h"

namespace shardwright::safetensors {

/// A tensor of a `.safetensors` file, contiguous and row-major.
struct Entry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::uint64_t offset = 0;  ///< of its first byte in the file
  std::uint64_t bytes = 0;
};

/// Reads the header of a file; payloads stay unread.
/// \returns the tensors by name
/// \error kBadInput  not such a file, truncated, a tensor whose bytes do not fit its shape, lie
///        outside the file or overlap another's; kLimit  a header above limits::kJsonBytes;
///        kUnsupported  a number format that this toolkit lacks
/// Local; many threads may read different files. Source: docs/formats/loads.md, "Safetensors".
Result<std::vector<Entry>> ReadHeader(const os::File& file);

}  // namespace shardwright::safetensors
