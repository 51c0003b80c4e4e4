// SPDX-License-Identifier: Apache-2.0
// Reads plans from tensors: maps from slots to experts, and vllm-ascend's from experts to slots.

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "files/torch_pt/reader.h"
#include "placement/io/plan_file_internal.h"
#include "support/base/limits.h"
#include "support/os/file.h"

namespace shardwright::placement {
namespace {

/// Returns the integers of a tensor, row-major.
/// \error kLimit  too many numbers; other errors as os::File::ReadAt
Result<std::vector<std::int64_t>> NumbersOf(const os::File& file,
                                            const torch_pt::Document& document,
                                            const pickle::Tensor& tensor,
                                            const std::string& where) {
  const auto& storage = document.storages[tensor.storage];
  const std::uint64_t item = ItemSize(tensor.dtype);
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(tensor.shape));
  if (elems > limits::kMoeCells || storage.bytes / item > limits::kMoeCells) {
    return Fail(Errc::kLimit, where, ": ", ToString(tensor.shape), ", at most ", limits::kMoeCells,
                " slots are supported");
  }
  std::vector<std::byte> bytes(storage.bytes);
  SW_TRY(file.ReadAt(storage.offset, bytes));
  std::vector<std::int64_t> numbers;
  numbers.reserve(elems);
  std::vector<std::uint64_t> index(tensor.shape.size(), 0);
  for (std::uint64_t i = 0; i < elems; ++i) {
    std::uint64_t at = tensor.offset;
    for (std::size_t d = 0; d < index.size(); ++d) at += index[d] * tensor.strides[d];
    std::int64_t value = 0;
    std::int32_t narrow = 0;
    std::memcpy(item == 4 ? static_cast<void*>(&narrow) : &value, bytes.data() + at * item, item);
    numbers.push_back(item == 4 ? narrow : value);
    for (std::size_t d = index.size(); d-- > 0;) {
      if (++index[d] < tensor.shape[d]) break;
      index[d] = 0;
    }
  }
  return numbers;
}

/// Adds the layers of a tensor [layers, slots] of experts.
Status AddSlots(const std::vector<std::int64_t>& numbers, const Shape& shape,
                const std::string& where, PlanFile* plan) {
  auto number = numbers.begin();
  for (std::uint64_t l = 0; l < shape[0]; ++l) {
    std::vector<std::int32_t> slots;
    slots.reserve(shape[1]);
    for (std::uint64_t s = 0; s < shape[1]; ++s) {
      SW_TRY_ASSIGN(const std::int32_t slot,
                    SlotOf(Json(*number++),
                           where + ": layer " + std::to_string(l) + " slot " + std::to_string(s)));
      slots.push_back(slot);
    }
    SW_TRY(AddLayer(plan, l, std::move(slots), where));
  }
  return {};
}

/// Adds the layers of a tensor [layers, ranks, experts] of slots, -1 for a missing expert.
Status AddExpertMaps(const std::vector<std::int64_t>& numbers, const Shape& shape,
                     const std::string& where, PlanFile* plan) {
  if (shape[1] > limits::kMoeDevices || shape[2] > limits::kMoeExperts) {
    return Fail(Errc::kLimit, where, ": ", ToString(shape), ", at most ", limits::kMoeDevices,
                " ranks and ", limits::kMoeExperts, " experts are supported");
  }
  const std::int64_t last =
      numbers.empty() ? -1 : *std::max_element(numbers.begin(), numbers.end());
  const std::uint64_t slots = last < 0 ? 0 : static_cast<std::uint64_t>(last) + 1;
  if (slots == 0 || slots > shape[2]) {
    return Fail(Errc::kBadInput, where,
                ": an expert map [layers, ranks, experts] holds slots from "
                "0 to ",
                shape[2] - 1, " and -1, found at most ", last);
  }
  plan->experts = static_cast<std::uint32_t>(shape[2]);
  plan->device_slots.assign(shape[1], static_cast<std::uint32_t>(slots));
  auto number = numbers.begin();
  for (std::uint64_t l = 0; l < shape[0]; ++l) {
    std::vector<std::int32_t> row(shape[1] * slots, kNoExpert);
    for (std::uint64_t rank = 0; rank < shape[1]; ++rank) {
      for (std::uint64_t e = 0; e < shape[2]; ++e) {
        const std::int64_t slot = *number++;
        if (slot == -1) continue;
        const std::string place = where + ": layer " + std::to_string(l) + " rank " +
                                  std::to_string(rank) + " expert " + std::to_string(e);
        if (slot < 0) return Fail(Errc::kBadInput, place, ": slot ", slot, " is below -1");
        std::int32_t& at = row[rank * slots + static_cast<std::uint64_t>(slot)];
        if (at != kNoExpert) {
          return Fail(Errc::kBadInput, place, ": slot ", slot, " holds expert ", at, " already");
        }
        at = static_cast<std::int32_t>(e);
      }
    }
    SW_TRY(AddLayer(plan, l, std::move(row), where));
  }
  return {};
}

}  // namespace

Result<PlanFile> ReadTensorPlan(const std::string& path) {
  SW_TRY_ASSIGN(const os::File file, os::File::OpenRead(path));
  auto metadata = torch_pt::ReadMetadata(file);
  if (!metadata) return Within(path, metadata.error());
  auto document = torch_pt::Parse(*metadata);
  if (!document) return Within(path, document.error());
  const pickle::Node* map = document->root;
  PlanFile plan;
  std::string where = path;
  if (!map->is_tensor()) {
    where += ": physical_to_logical_map";
    map = map->Find("physical_to_logical_map");
    plan.format = "sglang";
  }
  const bool whole = map != nullptr && map->is_tensor() &&
                     (map->tensor->dtype == DType::kI64 || map->tensor->dtype == DType::kI32);
  const std::size_t dimensions = whole ? map->tensor->shape.size() : 0;
  if ((dimensions != 2 && dimensions != 3) || map->tensor->shape[0] > limits::kMoeLayers) {
    return Fail(Errc::kBadInput, where,
                ": whole numbers [layers, slots], or an expert map [layers, ranks, experts], "
                "expected, found ",
                (map == nullptr ? "no such key" : pickle::Describe(map)));
  }
  const pickle::Tensor& tensor = *map->tensor;
  SW_TRY_ASSIGN(const auto numbers, NumbersOf(file, *document, tensor, where));
  if (plan.format.empty()) {
    plan.format = dimensions == 3 ? "expert-map" : "slot-map";
    plan.positions = true;
  }
  SW_TRY(dimensions == 2 ? AddSlots(numbers, tensor.shape, where, &plan)
                         : AddExpertMaps(numbers, tensor.shape, where, &plan));
  SW_TRY(Finish(&plan, path));
  return plan;
}

}  // namespace shardwright::placement
