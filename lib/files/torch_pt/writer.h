// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "files/pickle/node.h"
#include "support/base/result.h"

namespace shardwright::torch_pt {

/// One storage of a file to be written, in the index order that its tensors use.
struct StorageSpec {
  DType dtype = DType::kF32;
  bool untyped = false;
  std::uint64_t elems = 0;  ///< of dtype; bytes if untyped
};

/// Exact byte layout of a `.pt` file, computed before any payload is known: protocol 2, stored
/// members on 64-byte boundaries, data descriptors, zip64 as in torch (docs/formats/pt.md).
class Layout {
 public:
  /// Lays out a file with `root` as its object graph; kTensor nodes refer to `storages` by index.
  /// \error kBadInput     a value that the format cannot hold
  ///        kUnsupported  a graph that contains itself
  ///        kLimit        nesting beyond limits::kPickleDepth
  /// Pure: same input, same bytes.
  static Result<Layout> Make(const pickle::Node* root, std::span<const StorageSpec> storages);

  std::uint64_t file_bytes() const { return file_bytes_; }
  std::size_t storage_count() const { return payloads_.size(); }
  /// Returns the storages in file order.
  const std::vector<std::uint32_t>& order() const { return order_; }
  std::uint64_t payload_offset(std::size_t storage) const { return payloads_[storage].offset; }
  std::uint64_t payload_bytes(std::size_t storage) const { return payloads_[storage].bytes; }

  struct Piece {
    std::uint64_t offset = 0;
    std::string bytes;
  };
  /// Returns all bytes of the file outside the payloads, in
  /// file order. They contain the CRC-32 of every payload.
  /// \pre crcs.size() == storage_count()
  std::vector<Piece> Frame(std::span<const std::uint32_t> crcs) const;

 private:
  struct Payload {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
  };
  std::string pickle_;
  std::uint32_t pickle_crc_ = 0;
  std::vector<std::uint32_t> order_;  // storage indexes in file order
  std::vector<Payload> payloads_;
  std::uint64_t file_bytes_ = 0;
};

}  // namespace shardwright::torch_pt
