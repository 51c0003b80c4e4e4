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

/// Writes items of torch.save into files, one after the other.
class Items {
 public:
  explicit Items(plan::TargetBuilder& builder) : builder_(builder) {}

  /// Adds an empty file. \returns its number
  std::uint32_t AddFile(std::string path);

  /// Adds an item that is one tensor. Its elements are in an array of the target.
  /// \returns its place; the caller must set the place's file
  Result<dcp::Place> AddTensor(std::uint32_t file, DType dtype, const Shape& shape,
                               std::uint32_t array, const std::string& what);

  /// Adds an item that is an object.
  /// \param arrays  numbers of target arrays, by number of the document's tensors
  Result<dcp::Place> AddObject(std::uint32_t file, const Document& document,
                               std::span<const std::uint32_t> arrays = {});

  /// Completes the frame of every file. Call it after the last Add call.
  void Finish();

 private:
  struct Item {
    std::uint64_t first = 0;
    torch_pt::Layout layout;
    std::vector<std::uint32_t> order;  // storages by ascending offset
  };
  struct File {
    std::uint32_t number = 0;  // number in the target
    std::uint64_t bytes = 0;
    std::vector<Item> items;
  };

  Item& Add(File& file, torch_pt::Layout layout);

  plan::TargetBuilder& builder_;
  std::vector<std::shared_ptr<File>> files_;
};

}  // namespace shardwright::checkpoints::megatron
