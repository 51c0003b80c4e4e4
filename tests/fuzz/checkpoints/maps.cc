// SPDX-License-Identifier: Apache-2.0
// Any bytes as a map file, used on a made-up checkpoint in both directions. An accepted map makes a
// checkpoint that holds every element once. Its inverse, if also accepted, makes the first one
// again.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/name_maps/maps.h"
#include "engine/layout/shard_map.h"
#include "support/base/result.h"

namespace checkpoints = shardwright::checkpoints;
namespace layout = shardwright::layout;
using shardwright::Elems;
using shardwright::Errc;
using shardwright::Result;
using shardwright::Shape;

namespace {

const std::vector<std::pair<std::string, Shape>> kTensors = {
    {"l.0.q", {8, 3}}, {"l.0.k", {4, 3}}, {"e.0.w", {2, 3}},
    {"e.1.w", {2, 3}}, {"w", {7, 3}},     {"f", {5}},
};

/// Whole tensors in files of their own, the first cut into two shards.
checkpoints::Checkpoint MadeUp() {
  checkpoints::Checkpoint out;
  layout::ShardMap& map = out.map;
  map.files = {"file"};
  for (const auto& [name, shape] : kTensors) {
    checkpoints::Param param;
    param.name = name;
    param.shape = shape;
    out.params.push_back(param);
    layout::LogicalTensor tensor{name, "weight", shardwright::DType::kU8, shape, {}};
    const std::uint64_t parts = map.tensors.empty() ? 2 : 1;
    const std::uint64_t width = Elems(shape) / parts;
    for (std::uint64_t part = 0; part < parts; ++part) {
      const auto member = static_cast<std::uint32_t>(map.members.size());
      map.members.push_back({0, 0, width, std::nullopt, "data"});
      const auto array = static_cast<std::uint32_t>(map.arrays.size());
      map.arrays.push_back({shardwright::DType::kU8, {{member, 0, width}}});
      const Result<layout::Cut> cut =
          layout::Cut::Make({Elems(shape)}, {width}, {{{part * width}, {0}, {width}}});
      SW_CHECK(cut.has_value());
      tensor.fragments.push_back(
          {std::make_shared<const layout::Cut>(*cut), {array}, layout::Role::kOwner});
    }
    map.tensors.push_back(std::move(tensor));
  }
  return out;
}

/// Returns the location of every element of every tensor.
std::map<std::string, std::vector<std::uint64_t>> ElementsOf(const layout::ShardMap& map) {
  std::map<std::string, std::vector<std::uint64_t>> all;
  for (const layout::LogicalTensor& tensor : map.tensors) {
    std::vector<std::uint64_t>& elements = all[tensor.name];
    elements.resize(Elems(tensor.shape));
    for (const layout::Fragment& fragment : tensor.fragments) {
      fragment.cut->ForLogicalRange(0, elements.size(), [&](const layout::Run& run) {
        for (std::uint64_t i = 0; i < run.elems; ++i) {
          SW_CHECK(elements[run.logical + i] == 0);
          elements[run.logical + i] = ((fragment.at.array + 1ULL) << 32) + run.shard + i;
        }
      });
    }
    for (const std::uint64_t element : elements) SW_CHECK(element != 0);
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size_bytes) {
  const Result<checkpoints::ModelMap> map = checkpoints::ModelMap::Parse(
      std::string_view(reinterpret_cast<const char*>(data), size_bytes), "fuzz");
  if (!map) {
    SW_CHECK(map.error().code == Errc::kBadInput || map.error().code == Errc::kLimit);
    return 0;
  }
  const checkpoints::Checkpoint source = MadeUp();
  const auto before = ElementsOf(source.map);
  for (const std::string& to : map->sides()) {
    const Result<checkpoints::Mapped> there =
        checkpoints::ApplyMap(*map, {"", to, {{"g", 2}}}, source, checkpoints::Patterns());
    if (!there) {
      SW_CHECK(there.error().code != Errc::kInternal);
      continue;
    }
    SW_CHECK(layout::Validate(there->checkpoint.map).has_value());
    SW_CHECK(!ElementsOf(there->checkpoint.map).empty() || !there->left_behind.empty());
    const Result<checkpoints::Mapped> back = checkpoints::ApplyMap(
        *map, {to, there->from, there->sizes}, there->checkpoint, checkpoints::Patterns());
    if (!back) {
      SW_CHECK(back.error().code != Errc::kInternal);
      continue;
    }
    for (const auto& [name, elements] : ElementsOf(back->checkpoint.map)) {
      const auto old = before.find(name);
      SW_CHECK(old != before.end() && elements.size() <= old->second.size());
      SW_CHECK(std::equal(elements.begin(), elements.end(), old->second.begin()));
    }
  }
  return 0;
}
