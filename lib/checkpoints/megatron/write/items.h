// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/pickled/document.h"
#include "engine/plan/target_builder.h"
#include "files/dcp/index.h"
#include "files/torch_pt/writer.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::megatron {

/// Lays items of torch.save into files, one behind the other.
class Items {
 public:
  explicit Items(plan::TargetBuilder& builder) : builder_(builder) {}

  /// An empty file. \returns its number
  std::uint32_t AddFile(std::string path);

  /// An item that is one tensor, whose elements an array holds.
  /// \returns where it lies; of the place's file nothing is said
  Result<dcp::Place> AddTensor(std::uint32_t file, DType dtype, const Shape& shape,
                               std::uint32_t array, const std::string& what);

  /// An item that is an object.
  /// \param arrays  of the target, by the numbers that the document's tensors have
  Result<dcp::Place> AddObject(std::uint32_t file, const Document& document,
                               std::span<const std::uint32_t> arrays = {});

  /// Gives every file its frame. Nothing is added after that.
  void Finish();

 private:
  struct Item {
    std::uint64_t first = 0;
    torch_pt::Layout layout;
    std::vector<std::uint32_t> order;  // storages in the order of their offsets
  };
  struct File {
    std::uint32_t number = 0;  // of the target
    std::uint64_t bytes = 0;
    std::vector<Item> items;
  };

  Item& Add(File& file, torch_pt::Layout layout);

  plan::TargetBuilder& builder_;
  std::vector<std::shared_ptr<File>> files_;
};

}  // namespace shardwright::checkpoints::megatron
