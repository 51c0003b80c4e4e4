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

/// An open .pt file and its objects.
struct PtFile {
  os::File file;
  torch_pt::Document document;
  std::uint64_t bytes = 0;  ///< bytes read so far
};

/// Reads the objects of a .pt file. \error as torch_pt::ReadMetadata, Parse
Result<PtFile> OpenPt(const std::string& path);

/// Checks the number of elements before they are read. \error kLimit
Status CheckElems(std::uint64_t elems, const std::string& where);

/// Stands for -1 in a map to logical experts.
inline constexpr std::uint64_t kNoExpert = ~std::uint64_t{0};

/// Converts elements of one type to counts.
/// \param shape  shape of the elements, to name them in messages
/// \param map  the elements are numbers of experts: -1 becomes kNoExpert
/// \error kBadInput  an element is not a count; kUnsupported  the type is not numeric
Result<std::vector<std::uint64_t>> Counts(DType dtype, std::span<const std::byte> bytes,
                                          const Shape& shape, const std::string& where,
                                          bool map = false);

/// Reads a tensor of a .pt file as counts, in row-major order.
/// \param map  as for Counts
/// \error as Counts, CheckElems; kBadInput  the checksum is wrong
Result<std::vector<std::uint64_t>> ReadCounts(const PtFile& pt, const pickle::Tensor& tensor,
                                              const std::string& where, bool map = false);

}  // namespace shardwright::token_counts
