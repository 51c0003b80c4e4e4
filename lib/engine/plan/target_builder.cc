// SPDX-License-Identifier: Apache-2.0
#include "engine/plan/target_builder.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/layout/cut.h"

namespace shardwright::plan {
std::uint32_t TargetBuilder::AddFile(std::string path) {
  OutputFile file;
  file.path = std::move(path);
  AddFile(std::move(file));
  return static_cast<std::uint32_t>(target_.files.size() - 1);
}

void TargetBuilder::AddText(std::string path, std::string text) {
  AddFile(TextFile(std::move(path), std::move(text)));
}

void TargetBuilder::AddDigests(std::string path, DigestList list) {
  OutputFile file;
  file.path = std::move(path);
  constexpr std::size_t kDigits = 64;
  file.bytes =
      list.text(std::vector<std::string>(list.files.size(), std::string(kDigits, '0'))).size();
  file.digests = std::move(list);
  AddFile(std::move(file));
}

void TargetBuilder::AddFile(OutputFile file) {
  target_.map.files.push_back(file.path);
  target_.files.push_back(std::move(file));
}

void TargetBuilder::SetFrame(std::uint32_t file, std::uint64_t bytes, Frame frame) {
  target_.files[file].bytes = bytes;
  target_.files[file].frame = std::move(frame);
}

std::uint32_t TargetBuilder::AddArray(DType dtype, std::uint64_t holders) {
  layout::Array array;
  array.dtype = dtype;
  array.regions.resize(holders);
  target_.map.arrays.push_back(std::move(array));
  return static_cast<std::uint32_t>(target_.map.arrays.size() - 1);
}

std::uint32_t TargetBuilder::AddTensor(std::string name, std::string_view state, DType dtype,
                                       Shape shape) {
  layout::LogicalTensor tensor;
  tensor.name = std::move(name);
  tensor.state = state;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  target_.map.tensors.push_back(std::move(tensor));
  return static_cast<std::uint32_t>(target_.map.tensors.size() - 1);
}

void TargetBuilder::AddFragment(std::uint32_t tensor, layout::Fragment fragment) {
  target_.map.tensors[tensor].fragments.push_back(std::move(fragment));
}

void TargetBuilder::AddPayload(std::uint32_t file, Payload payload) {
  OutputFile& out = target_.files[file];
  out.bytes = std::max(out.bytes, payload.offset + payload.bytes);
  out.payloads.push_back(std::move(payload));
}

void TargetBuilder::AddElements(std::uint32_t file, std::uint64_t offset, std::uint32_t array,
                                std::uint64_t holder, std::uint64_t elems, std::string what) {
  layout::ShardMap& map = target_.map;
  Payload payload;
  payload.offset = offset;
  payload.bytes = elems * ItemSize(map.arrays[array].dtype);
  payload.array = array;
  payload.holder = holder;
  const auto member = static_cast<std::uint32_t>(map.members.size());
  map.members.push_back({file, offset, payload.bytes, std::nullopt, std::move(what)});
  map.arrays[array].regions[holder] = {member, 0, elems};
  AddPayload(file, std::move(payload));
}

std::uint32_t TargetBuilder::AddWhole(std::uint32_t file, std::uint64_t offset, std::string name,
                                      std::string_view state, DType dtype, Shape shape,
                                      std::string what) {
  const std::uint32_t array = AddArray(dtype, 1);
  AddElements(file, offset, array, 0, Elems(shape), std::move(what));
  layout::Fragment whole;
  whole.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(shape));
  whole.at.array = array;
  const std::uint32_t tensor = AddTensor(std::move(name), state, dtype, std::move(shape));
  AddFragment(tensor, std::move(whole));
  return tensor;
}

void TargetBuilder::AddMember(std::uint32_t file, std::uint64_t offset, std::uint32_t member,
                              std::uint64_t bytes) {
  Payload payload;
  payload.kind = Payload::Kind::kMember;
  payload.offset = offset;
  payload.bytes = bytes;
  payload.member = member;
  AddPayload(file, std::move(payload));
}

void TargetBuilder::AddInline(std::uint32_t file, std::uint64_t offset, std::string bytes) {
  Payload payload;
  payload.kind = Payload::Kind::kInline;
  payload.offset = offset;
  payload.bytes = bytes.size();
  payload.bytes_inline = std::move(bytes);
  AddPayload(file, std::move(payload));
}

}  // namespace shardwright::plan
