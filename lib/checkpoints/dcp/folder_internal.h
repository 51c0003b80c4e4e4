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

/// Containers of torch.save for items, one layout for all that are alike. Layouts live as long as
/// this.
class ItemLayouts {
 public:
  using Ptr = const torch_pt::Layout*;
  /// Of a contiguous tensor.
  Result<Ptr> OfTensor(DType dtype, const Shape& shape);
  /// Of a value without tensors. \pre the node lives until the last call
  Result<Ptr> OfValue(const pickle::Node* node);
  /// Of one item alone.
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
  /// \param prefix  of the names of files: a folder with a slash, or nothing
  /// \param files   how many data files
  FolderBuilder(plan::TargetBuilder* builder, std::shared_ptr<ItemLayouts> layouts,
                std::string prefix, std::uint64_t files);

  /// Begins a tensor or an object; items that are added are its chunks.
  Status Begin(shardwright::dcp::Entry entry);

  /// A box whose elements are one holder of an array. \returns nothing for an empty one
  Status AddElements(std::uint64_t number, Shape offsets, Shape sizes, std::uint32_t array);
  /// A tensor whose elements are known.
  Status AddInline(std::uint64_t number, Shape offsets, Shape sizes, std::string bytes);
  /// A value without tensors.
  Status AddValue(std::uint64_t number, const pickle::Node* value);
  /// Adds a value with tensors, which are members of the source or have known elements. If the
  /// entry is a tensor, the value is one chunk of it.
  Status AddDocument(std::uint64_t number, Shape offsets, Shape sizes, const Document& document);
  /// A whole item of the source.
  void AddRaw(std::uint64_t number, std::uint32_t member, std::uint64_t bytes);

  /// Writes frames and the index.
  Status Finish();

 private:
  static constexpr std::uint32_t kElsewhere = ~std::uint32_t{0};

  /// One container in a data file. There may be millions.
  struct Item {
    std::uint64_t offset = 0;
    ItemLayouts::Ptr layout = nullptr;  // null: a copy, which is all payload
    std::uint32_t known = kElsewhere;   // storage 0, into Items::known; else payloads are of others
  };
  /// What the frame of a data file is made of.
  struct Items {
    std::vector<Item> all;
    std::vector<std::string> known;
    std::shared_ptr<const ItemLayouts> layouts;  // to keep them
  };
  struct File {
    std::uint32_t target = 0;
    std::uint32_t number = 0;  // in the index
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
  std::optional<shardwright::dcp::Entry> entry_;  // the one that was begun
  std::vector<std::string> names_;                // of files in the index
  shardwright::dcp::IndexWriter index_;
};

}  // namespace shardwright::checkpoints::dcp
