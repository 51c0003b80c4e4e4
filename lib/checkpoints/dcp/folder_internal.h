// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/pickled/document.h"
#include "engine/plan/target_builder.h"
#include "files/dcp/index.h"
#include "files/torch_pt/writer.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dcp {

/// Layouts of torch.save containers for items; equal items
/// share one layout. The layouts live as long as this object.
class ItemLayouts {
 public:
  using Ptr = const torch_pt::Layout*;
  /// Returns the layout for a contiguous tensor.
  Result<Ptr> OfTensor(DType dtype, const Shape& shape);
  /// Returns the `.pt` layout for a pickled value that has no tensors. \pre the node outlives this
  Result<Ptr> OfValue(const pickle::Node* node);
  /// Returns the layout for one document; it is not shared.
  Result<Ptr> OfDocument(const Document& document);

 private:
  Ptr Keep(torch_pt::Layout layout);

  std::deque<torch_pt::Layout> all_;
  std::map<std::pair<DType, Shape>, Ptr> tensors_;
  std::unordered_map<const pickle::Node*, Ptr> values_;
};

/// Lays out one DCP folder: data files and their index.
class FolderBuilder {
 public:
  /// \param prefix  prepended to file names: a folder with a slash, or empty
  /// \param files   number of data files
  FolderBuilder(plan::TargetBuilder* builder, std::shared_ptr<ItemLayouts> layouts,
                std::string prefix, std::uint64_t files);

  /// Begins a tensor or an object. The items added next are its chunks.
  Status Begin(shardwright::dcp::Entry entry);

  /// Adds a box of a tensor. Its elements are the only shard of `array` in the target.
  Status AddElements(std::uint64_t number, Shape offsets, Shape sizes, std::uint32_t array);
  /// Adds a box of a tensor with known bytes.
  Status AddInline(std::uint64_t number, Shape offsets, Shape sizes, std::string bytes);
  /// Adds a pickled value that has no tensors.
  Status AddValue(std::uint64_t number, const pickle::Node* value);
  /// Adds a value that contains tensors. Their elements are members of the source
  /// or known bytes. If the entry is a tensor, the value is one of its chunks.
  Status AddDocument(std::uint64_t number, Shape offsets, Shape sizes, const Document& document);
  /// Copies a complete item of the source.
  void AddRaw(std::uint64_t number, std::uint32_t member, std::uint64_t bytes);

  /// Writes the frames of the data files and the index.
  Status Finish();

 private:
  static constexpr std::uint32_t kElsewhere = ~std::uint32_t{0};

  /// One container in a data file. A file may have millions.
  struct Item {
    std::uint64_t offset = 0;
    ItemLayouts::Ptr layout = nullptr;  // null: a copied item, all payload
    std::uint32_t known = kElsewhere;   // storage 0: index into Items::known, or kElsewhere
  };
  /// Input for the frame of a data file.
  struct Items {
    std::vector<Item> all;
    std::vector<std::string> known;
    std::shared_ptr<const ItemLayouts> layouts;  // keeps the layouts alive
  };
  struct File {
    std::uint32_t target = 0;
    std::uint32_t number = 0;  // index in the index file's list of files
    bool used = false;
    std::uint64_t end = 0;
    std::shared_ptr<Items> items = std::make_shared<Items>();
  };

  File& Use(std::uint64_t file);
  void Place(File& file, Shape offsets, Shape sizes, std::uint64_t bytes);
  static Status PutFrameOf(const Items& items, std::span<const std::uint32_t> crcs,
                           const plan::PutFrame& put);
  Status EndEntry();

  plan::TargetBuilder* builder_;
  std::shared_ptr<ItemLayouts> layouts_;
  std::string prefix_;
  std::vector<File> files_;
  std::optional<shardwright::dcp::Entry> entry_;  // the entry that Begin has started
  std::vector<std::string> names_;                // of files in the index
  shardwright::dcp::IndexWriter index_;
};

}  // namespace shardwright::checkpoints::dcp
