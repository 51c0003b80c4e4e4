// SPDX-License-Identifier: Apache-2.0
#include "token_counts/tensor_counts_internal.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "engine/tensor/convert.h"
#include "support/base/checked.h"
#include "support/base/crc32.h"
#include "support/base/limits.h"
#include "token_counts/trace_internal.h"

namespace shardwright::token_counts {
namespace {

/// Returns an array element's name for messages: ": step 3: layer 2 expert 5".
std::string ElementName(const Shape& shape, std::uint64_t element) {
  if (shape.size() < 2 || shape.size() > 3) return ": element " + std::to_string(element);
  const std::uint64_t experts = std::max<std::uint64_t>(shape.back(), 1);
  const std::uint64_t layers = std::max<std::uint64_t>(shape[shape.size() - 2], 1);
  const std::uint64_t row = element / experts;
  return (shape.size() == 3 ? ": step " + std::to_string(row / layers) : "") + ": " +
         CellName(row % layers, element % experts);
}

template <class T>
Status TakeIntegers(std::span<const std::byte> bytes, const Shape& shape, const std::string& where,
                    bool map, std::vector<std::uint64_t>* counts) {
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(T)) {
    T value{};
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    if (value < 0) {
      if (!map || static_cast<std::int64_t>(value) != -1) {
        return Fail(Errc::kBadInput, where, ElementName(shape, counts->size()),
                    ": not a count: ", static_cast<std::int64_t>(value));
      }
      counts->push_back(kNoExpert);
      continue;
    }
    const std::uint64_t whole = static_cast<std::make_unsigned_t<T>>(value);
    if (whole <= limits::kMoeTokens) {  // without building the place for messages
      counts->push_back(whole);
      continue;
    }
    SW_TRY_ASSIGN(const std::uint64_t count,
                  WholeCountOf(whole, where + ElementName(shape, counts->size())));
    counts->push_back(count);
  }
  return {};
}

Status TakeReals(DType dtype, std::span<const std::byte> bytes, const Shape& shape,
                 const std::string& where, bool map, std::vector<std::uint64_t>* counts) {
  std::vector<double> values(bytes.size() / ItemSize(dtype));
  Convert(dtype, bytes, DType::kF64, std::as_writable_bytes(std::span(values)));
  for (const double value : values) {
    if (map && value == -1) {
      counts->push_back(kNoExpert);
      continue;
    }
    SW_TRY_ASSIGN(const std::uint64_t count,
                  CountOf(value, where + ElementName(shape, counts->size())));
    counts->push_back(count);
  }
  return {};
}

}  // namespace

Result<std::vector<std::uint64_t>> Counts(DType dtype, std::span<const std::byte> bytes,
                                          const Shape& shape, const std::string& where, bool map) {
  std::vector<std::uint64_t> counts;
  counts.reserve(bytes.size() / ItemSize(dtype));
  Status status;
  switch (dtype) {
    case DType::kI64:
      status = TakeIntegers<std::int64_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kI32:
      status = TakeIntegers<std::int32_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kI16:
      status = TakeIntegers<std::int16_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kI8:
      status = TakeIntegers<std::int8_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kU64:
      status = TakeIntegers<std::uint64_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kU32:
      status = TakeIntegers<std::uint32_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kU16:
      status = TakeIntegers<std::uint16_t>(bytes, shape, where, map, &counts);
      break;
    case DType::kU8:
      status = TakeIntegers<std::uint8_t>(bytes, shape, where, map, &counts);
      break;
    default:
      if (!CanConvert(dtype, DType::kF64)) {
        return Fail(Errc::kUnsupported, where, ": counts of type ", Name(dtype),
                    " are not supported");
      }
      status = TakeReals(dtype, bytes, shape, where, map, &counts);
  }
  if (!status) return tl::unexpected<Error>(std::move(status).error());
  return counts;
}

Status CheckElems(std::uint64_t elems, const std::string& where) {
  if (elems <= limits::kMoeCounts) return {};
  return Fail(Errc::kLimit, where, ": ", elems, " counts, at most ", limits::kMoeCounts);
}

Result<PtFile> OpenPt(const std::string& path) {
  PtFile pt;
  SW_TRY_ASSIGN(pt.file, os::File::OpenRead(path));
  auto metadata = torch_pt::ReadMetadata(pt.file);
  if (!metadata) return Within(path, metadata.error());
  pt.bytes = metadata->last;
  auto document = torch_pt::Parse(*metadata);
  if (!document) return Within(path, document.error());
  pt.document = *std::move(document);
  return pt;
}

Result<std::vector<std::uint64_t>> ReadCounts(const PtFile& pt, const pickle::Tensor& tensor,
                                              const std::string& where, bool map) {
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(tensor.shape));
  SW_TRY(CheckElems(elems, where));
  const torch_pt::Document::StorageRef& storage = pt.document.storages[tensor.storage];
  const std::uint64_t item = ItemSize(tensor.dtype);
  SW_TRY(CheckElems(storage.bytes / item, where + ": storage"));
  std::vector<std::byte> bytes(storage.bytes);
  SW_TRY(pt.file.ReadAt(storage.offset, bytes));
  if (storage.crc32 && Crc32(bytes) != *storage.crc32) {
    return Fail(Errc::kBadInput, where, ": ", storage.member, ": wrong CRC-32");
  }
  std::vector<std::byte> packed(elems * item);
  std::vector<std::uint64_t> index(tensor.shape.size(), 0);
  for (std::uint64_t e = 0; e < elems; ++e) {
    std::uint64_t at = tensor.offset;
    for (std::size_t d = 0; d < index.size(); ++d) at += index[d] * tensor.strides[d];
    std::memcpy(packed.data() + e * item, bytes.data() + at * item, item);
    for (std::size_t d = index.size(); d-- > 0;) {
      if (++index[d] < tensor.shape[d]) break;
      index[d] = 0;
    }
  }
  return Counts(tensor.dtype, packed, tensor.shape, where, map);
}

}  // namespace shardwright::token_counts
