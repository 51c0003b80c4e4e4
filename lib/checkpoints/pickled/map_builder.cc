// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/map_builder.h"

#include <algorithm>

#include "engine/tensor/shape.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints {
namespace {

/// Maximum number of boxes for one tensor.
constexpr std::uint64_t kMostBoxes = std::uint64_t{1} << 16;

/// Returns the tensor in a node. \error kBadInput  not a tensor; begins with `where`
Result<const pickle::Tensor*> TensorOf(const pickle::Node* node, const std::string& where) {
  if (node != nullptr && node->is_tensor()) return node->tensor.get();
  return Fail(Errc::kBadInput, where, ": tensor expected, found ", pickle::Describe(node));
}

}  // namespace

MapBuilder::MapBuilder(const SourceSet& source, layout::ShardMap* map)
    : source_(source), map_(map), members_(source.files.size()) {
  for (const SourceFile& file : source.files) map_->files.push_back(file.path);
}

std::uint32_t MapBuilder::MemberOf(std::uint32_t file, std::uint32_t container,
                                   std::uint32_t storage) {
  const files::ContainerMetadata& metadata = *source_.files[file].containers[container].metadata;
  std::vector<std::uint32_t>& known = stored_[{file, container}];
  if (known.empty()) known.resize(metadata.storages.size(), kNone);
  std::uint32_t& index = known[storage];
  if (index == kNone) {
    const files::Storage& stored = metadata.storages[storage];
    index = static_cast<std::uint32_t>(map_->members.size());
    map_->members.push_back(
        {file, stored.offset, stored.bytes, stored.crc32, NameOf(metadata, stored)});
  }
  return index;
}

std::uint32_t MapBuilder::MemberOf(std::uint32_t file, std::uint32_t container,
                                   const torch_pt::Document& document, std::uint32_t storage) {
  if (source_.files[file].containers.size() == 1) return MemberOf(file, document, storage);
  const auto& stored = source_.files[file].containers[container].metadata->storages;
  const torch_pt::Document::StorageRef& ref = document.storages[storage];
  for (std::uint32_t i = 0; i < stored.size(); ++i) {
    if (stored[i].offset == ref.offset) return MemberOf(file, container, i);
  }
  SW_CHECK(false);  // a document's storages are those of its metadata
  return 0;
}

std::uint32_t MapBuilder::MemberOf(std::uint32_t file, const torch_pt::Document& document,
                                   std::uint32_t storage) {
  std::vector<std::uint32_t>& known = members_[file];
  if (known.size() < document.storages.size()) known.resize(document.storages.size(), kNone);
  std::uint32_t& index = known[storage];
  if (index == kNone) {
    const torch_pt::Document::StorageRef& ref = document.storages[storage];
    index = static_cast<std::uint32_t>(map_->members.size());
    map_->members.push_back({file, ref.offset, ref.bytes, ref.crc32, ref.member});
  }
  return index;
}

Result<Place> MapBuilder::PlaceOf(std::uint32_t file, std::uint32_t container,
                                  const torch_pt::Document& document, const pickle::Node* node,
                                  const std::string& what) {
  const std::string where = source_.files[file].name + ": " + what;
  SW_TRY_ASSIGN(const pickle::Tensor* const stored, TensorOf(node, where));
  const pickle::Tensor& tensor = *stored;
  Place out;
  SW_TRY_ASSIGN(out.elems, CountElems(tensor.shape));
  out.dtype = tensor.dtype;
  if (out.elems > 0) {
    if (!IsRowMajor(tensor)) {
      return Fail(Errc::kUnsupported, where, ": its elements are not stored in row-major order");
    }
    SW_TRY_ASSIGN(out.offset, CheckedMul(tensor.offset, ItemSize(tensor.dtype)));
  }
  out.member = MemberOf(file, container, document, tensor.storage);
  return out;
}

Result<std::vector<PlacedPart>> MapBuilder::PartsOf(std::uint32_t file,
                                                    const torch_pt::Document& document,
                                                    const pickle::Node* node,
                                                    const std::string& what) {
  const std::string where = source_.files[file].name + ": " + what;
  SW_TRY_ASSIGN(const pickle::Tensor* const found, TensorOf(node, where));
  const pickle::Tensor& tensor = *found;
  const std::uint64_t item = ItemSize(tensor.dtype);
  auto stored = StoredParts(tensor, document.storages[tensor.storage].bytes / item,
                            std::min(boxes_left_, kMostBoxes));
  if (!stored) return Within(where, stored.error());
  std::vector<PlacedPart> parts;
  for (StoredPart& part : *stored) {
    Place place;
    place.member = MemberOf(file, document, tensor.storage);
    SW_TRY_ASSIGN(place.offset, CheckedMul(part.first, item));
    place.elems = part.elems;
    place.dtype = tensor.dtype;
    if (part.order != nullptr) boxes_left_ -= part.order->boxes().size();
    parts.push_back({place, std::move(part.order)});
  }
  return parts;
}

Result<std::string> MapBuilder::Payload(std::uint32_t file, const torch_pt::Document& document,
                                        const pickle::Node* tensor, const std::string& what) {
  SW_TRY_ASSIGN(const Place place, PlaceOf(file, document, tensor, what));
  const SourceFile& named = source_.files[file];
  const Container& source = named.containers.front();
  if (keyed_file_ != file) {
    keys_.clear();
    for (std::size_t i = 0; i < source.metadata->storages.size(); ++i) {
      keys_.emplace(source.metadata->storages[i].key, static_cast<std::uint32_t>(i));
    }
    keyed_file_ = file;
  }
  const std::string& member = map_->members[place.member].name;
  auto found = keys_.find(member);
  if (found == keys_.end()) found = keys_.find(member.substr(member.rfind('/') + 1));
  const std::uint64_t bytes = place.elems * ItemSize(place.dtype);
  if (bytes == 0) return std::string();
  const auto inlined =
      found == keys_.end() ? source.inlined.end() : source.inlined.find(found->second);
  if (inlined == source.inlined.end() || place.offset + bytes > inlined->second.size()) {
    return Fail(Errc::kUnsupported, named.name, ": ", what, ": ", pickle::Describe(tensor),
                " is not a number");
  }
  return inlined->second.substr(place.offset, bytes);
}

std::uint32_t MapBuilder::AddArray(DType dtype, std::vector<layout::Region> regions) {
  map_->arrays.push_back({dtype, std::move(regions)});
  return static_cast<std::uint32_t>(map_->arrays.size() - 1);
}

}  // namespace shardwright::checkpoints
