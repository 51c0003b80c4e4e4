// SPDX-License-Identifier: Apache-2.0
// Any bytes as JSON and, with 'm' in front, as MessagePack. Accepted input is at most as deep as
// the limit allows, and has the same value after it is written and read again.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/limits.h"
#include "support/base/result.h"
#include "support/json/json.h"

namespace json = shardwright::json;
using json::Json;
using shardwright::Errc;
using shardwright::Result;

namespace {

std::uint64_t DepthOf(const Json& value) {
  std::uint64_t deepest = 0;
  for (const Json& one : value) {
    if (one.is_structured()) deepest = std::max(deepest, DepthOf(one));
  }
  return deepest + 1;
}

void Use(const Result<Json>& value, std::uint64_t most_depth) {
  if (!value) {
    SW_CHECK(value.error().code == Errc::kBadInput || value.error().code == Errc::kLimit);
    SW_CHECK(value.error().message.starts_with("input: "));
    return;
  }
  SW_CHECK(!value->is_structured() || DepthOf(*value) <= most_depth);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  if (size_bytes > 0 && data[0] == 'm') {
    const std::span bytes(data + 1, size_bytes - 1);
    const auto value = json::ParseMessagePack(std::as_bytes(bytes), "input");
    Use(value, json::kPackedDepth);
    if (!value) return 0;
    const std::vector<std::uint8_t> packed = Json::to_msgpack(*value);
    const auto again = json::ParseMessagePack(std::as_bytes(std::span(packed)), "again");
    SW_CHECK(again && Json::to_msgpack(*again) == packed);
    return 0;
  }
  const std::string_view text(reinterpret_cast<const char*>(data), size_bytes);
  const auto value = json::Parse(text, "input");
  Use(value, shardwright::limits::kMoeJsonDepth);
  if (!value) return 0;
  const std::string written = value->dump();
  const auto again = json::Parse(written, "again");
  SW_CHECK(again && again->dump() == written);
  return 0;
}
