// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::token_counts {

/// A .pt file that is open.
struct PtFile {
  os::File file;
  torch_pt::Document document;
  std::uint64_t bytes = 0;  ///< that were read
};

/// Reads the objects of a .pt file. \error as torch_pt::ReadMetadata, Parse
Result<PtFile> OpenPt(const std::string& path);

/// Checks a number of elements before they are read. \error kLimit
Status CheckElems(std::uint64_t elems, const std::string& where);

/// Elements of one type as counts.
/// \param shape  names elements in messages
/// \error kBadInput  an element that is not a count; kUnsupported  a type without numbers
Result<std::vector<std::uint64_t>> Counts(DType dtype, std::span<const std::byte> bytes,
                                          const Shape& shape, const std::string& where);

/// A tensor of a .pt file as counts, row-major.
/// \error as Counts, CheckElems; kBadInput  a wrong checksum
Result<std::vector<std::uint64_t>> ReadCounts(const PtFile& pt, const pickle::Tensor& tensor,
                                              const std::string& where);

}  // namespace shardwright::token_counts
