// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/write/items.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

namespace shardwright::checkpoints::megatron {

std::uint32_t Items::AddFile(std::string path) {
  auto file = std::make_shared<File>();
  file->number = builder_.AddFile(std::move(path));
  files_.push_back(std::move(file));
  return static_cast<std::uint32_t>(files_.size() - 1);
}

Items::Item& Items::Add(File& file, torch_pt::Layout layout) {
  Item item{file.bytes, std::move(layout), {}};
  item.order.resize(item.layout.storage_count());
  std::iota(item.order.begin(), item.order.end(), 0U);
  std::sort(item.order.begin(), item.order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return item.layout.payload_offset(a) < item.layout.payload_offset(b);
  });
  file.bytes += item.layout.file_bytes();
  file.items.push_back(std::move(item));
  return file.items.back();
}

Result<dcp::Place> Items::AddTensor(std::uint32_t file, DType dtype, const Shape& shape,
                                    std::uint32_t array, const std::string& what) {
  Document document;
  const pickle::Node* root = document.AddTensor(0, dtype, shape);
  SW_TRY_ASSIGN(torch_pt::Layout layout, torch_pt::Layout::Make(root, document.storages));
  File& to = *files_[file];
  const Item& item = Add(to, std::move(layout));
  builder_.AddElements(to.number, item.first + item.layout.payload_offset(0), array, 0,
                       Elems(shape), what);
  dcp::Place place;
  place.offset = item.first;
  place.bytes = item.layout.file_bytes();
  return place;
}

Result<dcp::Place> Items::AddObject(std::uint32_t file, const Document& document,
                                    std::span<const std::uint32_t> arrays) {
  SW_TRY_ASSIGN(torch_pt::Layout layout, torch_pt::Layout::Make(document.root, document.storages));
  File& to = *files_[file];
  const Item& item = Add(to, std::move(layout));
  for (const std::uint32_t storage : item.order) {
    const Fill& fill = document.fills[storage];
    const std::uint64_t offset = item.first + item.layout.payload_offset(storage);
    if (fill.kind == Fill::Kind::kTensor) {
      builder_.AddElements(to.number, offset, arrays[fill.tensor], 0,
                           document.storages[storage].elems, "data/" + std::to_string(storage));
    } else if (fill.kind == Fill::Kind::kMember) {
      builder_.AddMember(to.number, offset, fill.member, item.layout.payload_bytes(storage));
    } else {
      builder_.AddInline(to.number, offset, fill.bytes);
    }
  }
  dcp::Place place;
  place.offset = item.first;
  place.bytes = item.layout.file_bytes();
  return place;
}

void Items::Finish() {
  for (const std::shared_ptr<File>& file : files_) {
    builder_.SetFrame(
        file->number, file->bytes,
        [file](std::span<const std::uint32_t> crcs, const plan::PutFrame& put) -> Status {
          std::size_t next = 0;
          for (const Item& item : file->items) {
            std::vector<std::uint32_t> mine(item.order.size());
            for (const std::uint32_t storage : item.order) mine[storage] = crcs[next++];
            for (const torch_pt::Layout::Piece& piece : item.layout.Frame(mine)) {
              SW_TRY(put(item.first + piece.offset, piece.bytes));
            }
          }
          return {};
        });
  }
}

}  // namespace shardwright::checkpoints::megatron
