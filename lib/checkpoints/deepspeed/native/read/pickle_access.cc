// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "support/base/checked.h"

namespace shardwright::checkpoints::reader {

Result<std::uint64_t> CountAt(const Reading& reading, std::uint32_t file, const Node* dict,
                              std::string_view key) {
  auto count = pickle::AsCount(dict->Find(key));
  if (!count) {
    return Within(reading.file_name(file) + ": " + std::string(key), std::move(count).error());
  }
  return count;
}

Spread SpreadOf(const Reading& reading, std::uint64_t mp, std::size_t group) {
  const std::vector<std::uint64_t>& counts = reading.shards[mp].front().partition_count;
  Spread out;
  out.mp = mp;
  out.group = group;
  out.ranks = counts.size() == 1 ? counts[0] : counts[group];
  out.ep = reading.ranks / out.ranks;
  return out;
}

std::uint64_t RankOf(const Reading& reading, const Spread& spread, std::uint64_t ep,
                     std::uint64_t edp) {
  if (spread.ep == 1) return edp;
  return RankOfExpert({ep, edp}, reading.ranks, spread.ep, reading.data_first);
}

const ShardGroup& GroupAt(const Reading& reading, const Spread& spread, std::uint64_t rank) {
  return reading.shards[spread.mp][rank].groups[spread.group];
}

std::string GroupText(const Reading& reading, const Spread& spread) {
  return reading.file_name(reading.shards[spread.mp].front().file) + ": group " +
         std::to_string(spread.group);
}

std::string Show(const Scalar& scalar) {
  if (!scalar.is_tensor) {
    const Node* value = scalar.value;
    if (value != nullptr &&
        (value->kind == pickle::Kind::kInt || value->kind == pickle::Kind::kBool)) {
      return std::to_string(value->integer);
    }
    if (value != nullptr && value->kind == pickle::Kind::kFloat) {
      std::array<char, 32> text{};
      std::snprintf(text.data(), text.size(), "%.9g", value->real);
      return text.data();
    }
    return pickle::Describe(value);
  }
  const std::string type = " (tensor " + std::string(Name(scalar.dtype)) + ")";
  if (scalar.dtype == DType::kI64 && scalar.bytes.size() == sizeof(std::int64_t)) {
    std::int64_t value = 0;
    std::memcpy(&value, scalar.bytes.data(), sizeof(value));
    return std::to_string(value) + type;
  }
  if (const std::optional<double> number = NumberOf(scalar)) {
    const double value = *number;
    std::string text = std::to_string(value);
    if (std::isfinite(value) && value == std::trunc(value)) text.resize(text.find('.'));
    return text + type;
  }
  return "a tensor " + std::string(Name(scalar.dtype)) + " " + ToString(scalar.shape);
}

}  // namespace shardwright::checkpoints::reader
