// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::safetensors {

/// A tensor to be written.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;  ///< in elements as DType counts them
};

/// Exact byte layout of a `.safetensors` file. The widest types come first, sorted by name
/// within a type, as in the reference implementation, so that every tensor is aligned to
/// its elements. Metadata is sorted by key. Payloads begin on a multiple of kAlignBytes.
class Layout {
 public:
  static constexpr std::uint64_t kAlignBytes = 64;

  /// \error kBadInput  a name that is empty, reserved, duplicate or not UTF-8; kUnsupported
  ///        an element type that the format lacks; kLimit  the header exceeds the format's cap
  /// Pure: same input, same bytes.
  static Result<Layout> Make(std::span<const TensorSpec> tensors,
                             const std::map<std::string, std::string>& metadata);

  /// Returns the file's bytes before its payloads.
  const std::string& head() const { return head_; }
  std::uint64_t file_bytes() const { return file_bytes_; }
  /// Returns the indexes of the tensors in file order.
  const std::vector<std::uint32_t>& order() const { return order_; }
  /// Returns the position and size of a tensor in the file, in bytes.
  std::uint64_t offset(std::size_t tensor) const { return offsets_[tensor]; }
  std::uint64_t bytes(std::size_t tensor) const { return bytes_[tensor]; }

 private:
  std::string head_;
  std::vector<std::uint32_t> order_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::uint64_t> bytes_;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace shardwright::safetensors
