// SPDX-License-Identifier: Apache-2.0
#include "files/safetensors/layout.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "files/safetensors/dtypes_internal.h"
#include "files/safetensors/header.h"
#include "files/utf8.h"
#include "support/base/checked.h"
#include "support/base/limits.h"
#include "support/json/json.h"

namespace shardwright::safetensors {
namespace {

constexpr std::string_view kMetadata = "__metadata__";

/// Returns the index of a type in kTypes. \error kUnsupported
Result<std::size_t> TypeIndex(DType dtype) {
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i].dtype == dtype) return i;
  }
  return Fail(Errc::kUnsupported, Name(dtype), ": safetensors has no such type");
}

Status CheckName(const std::string& name) {
  if (name.empty() || name == kMetadata || !IsUtf8(name, Surrogates::kRefuse)) {
    return Fail(Errc::kBadInput,
                "the name is empty, reserved or not UTF-8, which safetensors does not allow");
  }
  return {};
}

/// Returns the shape for the header.
/// \error kBadInput  the bytes of a packed type are not whole values
Result<Shape> HeaderShape(const TypeInfo& type, const Shape& shape) {
  const std::uint64_t together = ValuesTogether(type.bits);
  if (together == 1) return shape;
  const std::uint64_t bytes = together * type.bits / 8;
  Shape values = shape;
  if (values.empty() || values.back() % bytes != 0) {
    return Fail(Errc::kBadInput, "packed rows of ", ToString(shape),
                " bytes do not hold whole values");
  }
  SW_TRY_ASSIGN(values.back(), CheckedMul(values.back() / bytes, together));
  return values;
}

/// Pads the header with spaces to a multiple of the alignment and prepends its length.
Result<std::string> Finish(std::string header) {
  header.resize(RoundUp(kLengthBytes + header.size(), Layout::kAlignBytes) - kLengthBytes, ' ');
  if (header.size() > limits::kSafetensorsHeaderBytes) {
    return Fail(Errc::kLimit, "a header of ", header.size(), " bytes, at most ",
                limits::kSafetensorsHeaderBytes, ": too many tensors for one file");
  }
  std::string head;
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    head.push_back(static_cast<char>(header.size() >> (8 * i) & 0xFFU));
  }
  return head + header;
}

}  // namespace

Result<Layout> Layout::Make(std::span<const TensorSpec> tensors,
                            const std::map<std::string, std::string>& metadata) {
  Layout layout;
  std::vector<std::size_t> types;
  for (const TensorSpec& tensor : tensors) {
    const auto place = [&](const Error& error) {
      return Within("tensor \"" + tensor.name + "\"", error);
    };
    const Status named = CheckName(tensor.name);
    if (!named) return place(named.error());
    const auto type = TypeIndex(tensor.dtype);
    if (!type) return place(type.error());
    types.push_back(*type);
    SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(tensor.shape));
    SW_TRY_ASSIGN(const std::uint64_t bytes, CheckedMul(elems, ItemSize(tensor.dtype)));
    layout.bytes_.push_back(bytes);
  }
  layout.order_.resize(tensors.size());
  std::iota(layout.order_.begin(), layout.order_.end(), 0U);
  std::sort(layout.order_.begin(), layout.order_.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::tie(types[a], tensors[a].name) < std::tie(types[b], tensors[b].name);
  });
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"" + std::string(kMetadata) + "\":{";
    for (const auto& [key, value] : metadata) {
      if (header.back() != '{') header += ',';
      json::AppendString(&header, key);
      header += ':';
      json::AppendString(&header, value);
    }
    header += '}';
  }
  std::uint64_t end = 0;
  layout.offsets_.resize(tensors.size());
  for (const std::uint32_t index : layout.order_) {
    const TensorSpec& tensor = tensors[index];
    const TypeInfo& type = kTypes[types[index]];
    const auto shape = HeaderShape(type, tensor.shape);
    if (!shape) return Within("tensor \"" + tensor.name + "\"", shape.error());
    layout.offsets_[index] = end;
    SW_TRY_ASSIGN(end, CheckedAdd(end, layout.bytes_[index]));
    if (header.size() > 1) header += ',';
    json::AppendString(&header, tensor.name);
    header += R"(:{"dtype":")" + std::string(type.word) + R"(","shape":)";
    json::AppendNumbers(&header, *shape);
    header += R"(,"data_offsets":[)" + std::to_string(layout.offsets_[index]) + "," +
              std::to_string(end) + "]}";
  }
  SW_TRY_ASSIGN(layout.head_, Finish(std::move(header) + "}"));
  for (std::uint64_t& offset : layout.offsets_) offset += layout.head_.size();
  layout.file_bytes_ = layout.head_.size() + end;
  std::vector<std::string_view> names;
  for (const TensorSpec& tensor : tensors) names.emplace_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    return Fail(Errc::kBadInput, "tensor \"", *twice, "\": the name appears twice");
  }
  return layout;
}

}  // namespace shardwright::safetensors
