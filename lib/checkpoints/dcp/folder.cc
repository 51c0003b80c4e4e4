// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/dcp/folder_internal.h"

#include <span>
#include <utility>

#include "support/base/crc32.h"

namespace shardwright::checkpoints::dcp {

namespace file_format = shardwright::dcp;

ItemLayouts::Ptr ItemLayouts::Keep(torch_pt::Layout layout) {
  return &all_.emplace_back(std::move(layout));
}

Result<ItemLayouts::Ptr> ItemLayouts::OfTensor(DType dtype, const Shape& shape) {
  Ptr& known = tensors_[{dtype, shape}];
  if (known == nullptr) {
    Document document;
    document.root = document.AddTensor(0, dtype, shape);
    SW_TRY_ASSIGN(known, OfDocument(document));
  }
  return known;
}

Result<ItemLayouts::Ptr> ItemLayouts::OfValue(const pickle::Node* node) {
  Ptr& known = values_[node];
  if (known == nullptr) {
    SW_TRY_ASSIGN(torch_pt::Layout layout, torch_pt::Layout::Make(node, {}));
    known = Keep(std::move(layout));
  }
  return known;
}

Result<ItemLayouts::Ptr> ItemLayouts::OfDocument(const Document& document) {
  SW_TRY_ASSIGN(torch_pt::Layout layout, torch_pt::Layout::Make(document.root, document.storages));
  return Keep(std::move(layout));
}

FolderBuilder::FolderBuilder(plan::TargetBuilder* builder, std::shared_ptr<ItemLayouts> layouts,
                             std::string prefix, std::uint64_t files)
    : builder_(builder), layouts_(std::move(layouts)), prefix_(std::move(prefix)), files_(files) {}

Status FolderBuilder::Begin(file_format::Entry entry) {
  SW_TRY(EndEntry());
  entry_ = std::move(entry);
  return {};
}

Status FolderBuilder::EndEntry() {
  if (entry_) SW_TRY(index_.Add(*entry_, names_));
  return {};
}

FolderBuilder::File& FolderBuilder::Use(std::uint64_t file) {
  File& used = files_[file];
  if (used.used) return used;
  const std::string name = "__" + std::to_string(file) + "_0.distcp";
  used.used = true;
  used.target = builder_->AddFile(prefix_ + name);
  used.number = static_cast<std::uint32_t>(names_.size());
  used.items->layouts = layouts_;
  names_.push_back(name);
  return used;
}

void FolderBuilder::Place(File& file, Shape offsets, Shape sizes, std::uint64_t bytes) {
  const file_format::Place at{file.number, 0, file.end, bytes};
  if (entry_->is_tensor) {
    entry_->chunks.push_back({std::move(offsets), std::move(sizes), at});
  } else {
    entry_->at = at;
  }
  file.end += bytes;
}

Status FolderBuilder::AddElements(std::uint64_t number, Shape offsets, Shape sizes,
                                  std::uint32_t array) {
  File& file = Use(number);
  SW_TRY_ASSIGN(const ItemLayouts::Ptr layout, layouts_->OfTensor(entry_->dtype, sizes));
  builder_->AddElements(file.target, file.end + layout->payload_offset(0), array, 0, Elems(sizes),
                        entry_->name);
  file.items->all.push_back({file.end, layout});
  Place(file, std::move(offsets), std::move(sizes), layout->file_bytes());
  return {};
}

Status FolderBuilder::AddInline(std::uint64_t number, Shape offsets, Shape sizes,
                                std::string bytes) {
  File& file = Use(number);
  SW_TRY_ASSIGN(const ItemLayouts::Ptr layout, layouts_->OfTensor(entry_->dtype, sizes));
  file.items->all.push_back(
      {file.end, layout, static_cast<std::uint32_t>(file.items->known.size())});
  file.items->known.push_back(std::move(bytes));
  Place(file, std::move(offsets), std::move(sizes), layout->file_bytes());
  return {};
}

Status FolderBuilder::AddValue(std::uint64_t number, const pickle::Node* value) {
  File& file = Use(number);
  SW_TRY_ASSIGN(const ItemLayouts::Ptr layout, layouts_->OfValue(value));
  file.items->all.push_back({file.end, layout});
  Place(file, {}, {}, layout->file_bytes());
  return {};
}

Status FolderBuilder::AddDocument(std::uint64_t number, Shape offsets, Shape sizes,
                                  const Document& document) {
  File& file = Use(number);
  SW_TRY_ASSIGN(const ItemLayouts::Ptr layout, layouts_->OfDocument(document));
  for (const std::uint32_t i : layout->order()) {
    if (layout->payload_bytes(i) == 0) continue;
    const Fill& fill = document.fills[i];
    const std::uint64_t offset = file.end + layout->payload_offset(i);
    if (fill.kind == Fill::Kind::kInline) {
      builder_->AddInline(file.target, offset, fill.bytes);
    } else {
      builder_->AddMember(file.target, offset, fill.member, layout->payload_bytes(i));
    }
  }
  file.items->all.push_back({file.end, layout});
  Place(file, std::move(offsets), std::move(sizes), layout->file_bytes());
  return {};
}

void FolderBuilder::AddRaw(std::uint64_t number, std::uint32_t member, std::uint64_t bytes) {
  File& file = Use(number);
  builder_->AddMember(file.target, file.end, member, bytes);
  file.items->all.push_back({file.end, nullptr});
  Place(file, {}, {}, bytes);
}

Status FolderBuilder::PutFrameOf(const Items& items, std::span<const std::uint32_t> crcs,
                                 const plan::PutFrame& put) {
  std::size_t payload = 0;
  std::vector<std::uint32_t> sums;
  for (const Item& item : items.all) {
    if (item.layout == nullptr) {
      ++payload;
      continue;
    }
    sums.assign(item.layout->storage_count(), 0);
    const std::string* known = item.known == kElsewhere ? nullptr : &items.known[item.known];
    if (known != nullptr) {
      sums[0] = Crc32(std::as_bytes(std::span(*known)));
    } else {
      for (const std::uint32_t storage : item.layout->order()) {
        if (item.layout->payload_bytes(storage) > 0) sums[storage] = crcs[payload++];
      }
    }
    for (const torch_pt::Layout::Piece& piece : item.layout->Frame(sums)) {
      if (known != nullptr && piece.offset > item.layout->payload_offset(0)) {
        SW_TRY(put(item.offset + item.layout->payload_offset(0), *known));
      }
      SW_TRY(put(item.offset + piece.offset, piece.bytes));
    }
  }
  return {};
}

Status FolderBuilder::Finish() {
  SW_TRY(EndEntry());
  for (const File& file : files_) {
    if (!file.used) continue;
    builder_->SetFrame(
        file.target, file.end,
        [items = file.items](std::span<const std::uint32_t> crcs, const plan::PutFrame& put) {
          return PutFrameOf(*items, crcs, put);
        });
  }
  const auto parts = std::make_shared<const std::vector<std::string>>(std::move(index_).Finish());
  std::uint64_t bytes = 0;
  for (const std::string& part : *parts) bytes += part.size();
  const std::uint32_t target = builder_->AddFile(prefix_ + std::string(file_format::kIndexName));
  builder_->SetFrame(target, bytes,
                     [parts](std::span<const std::uint32_t>, const plan::PutFrame& put) -> Status {
                       std::uint64_t at = 0;
                       for (const std::string& part : *parts) {
                         SW_TRY(put(at, part));
                         at += part.size();
                       }
                       return {};
                     });
  return {};
}

}  // namespace shardwright::checkpoints::dcp
