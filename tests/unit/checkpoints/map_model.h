// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "checkpoints/name_maps/maps.h"
#include "engine/layout/shard_map.h"

// Checkpoints without files. An element is identified by its place.

namespace shardwright::checkpoints {

/// Storage layout of the tensors of a made-up checkpoint.
struct Spread {
  std::uint64_t ranks = 1;  ///< that cut the rows of every tensor; the first have one more
  bool flat = false;        ///< all ranks' elements in one array, cut into equal chunks
};

/// Location of an element: array, shard and offset, in one number.
using ElementId = std::uint64_t;

/// The elements of every tensor, by "name state", row-major.
inline std::map<std::string, std::vector<ElementId>> ElementsOf(const layout::ShardMap& map) {
  std::map<std::string, std::vector<ElementId>> all;
  for (const layout::LogicalTensor& tensor : map.tensors) {
    std::vector<ElementId>& elements = all[tensor.name + " " + tensor.state];
    elements.assign(Elems(tensor.shape), 0);
    for (const layout::Fragment& fragment : tensor.fragments) {
      fragment.cut->ForLogicalRange(0, elements.size(), [&](const layout::Run& run) {
        std::uint64_t at = run.logical;
        layout::ForHolders(
            map, fragment.at, run.shard, run.shard + run.elems,
            [&](const layout::Region& region, std::uint64_t element, std::uint64_t count) {
              for (std::uint64_t i = 0; i < count; ++i) {
                EXPECT_EQ(elements[at], 0u) << tensor.name << " element " << at;
                elements[at++] = ((std::uint64_t{region.member} + 1) << 32) + element + i;
              }
            });
      });
    }
    for (const ElementId element : elements) EXPECT_NE(element, 0u) << tensor.name;
  }
  return all;
}

/// A checkpoint of tensors with these names and shapes, in this order, each with a master weight
/// and one moment. All are trained, of group 0, with step 7.
inline Checkpoint MadeUp(const std::vector<std::pair<std::string, Shape>>& tensors,
                         const Spread& spread = {}) {
  Checkpoint out;
  out.origin = "test";
  out.states = {"exp_avg"};
  out.iteration = 7;
  out.groups.emplace_back();
  layout::ShardMap& map = out.map;
  map.files = {"file"};
  const auto add_region = [&](std::uint64_t elems) {
    map.members.push_back({0, 0, elems * 4, std::nullopt, "data"});
    return layout::Region{static_cast<std::uint32_t>(map.members.size() - 1), 0, elems};
  };
  for (const auto& [name, shape] : tensors) {
    Param param;
    param.name = name;
    param.shape = shape;
    param.group = 0;
    Scalar step;
    step.state = "step";
    step.is_tensor = true;
    step.bytes = std::string("\0\0\xe0\x40", 4);
    param.scalars.push_back(step);
    out.groups[0].params.push_back(static_cast<std::uint32_t>(out.params.size()));
    out.params.push_back(std::move(param));
    for (const char* state : {"fp32", "exp_avg"}) {
      layout::LogicalTensor tensor{name, state, DType::kF32, shape, {}};
      const std::uint64_t rows = shape.empty() ? 1 : shape[0];
      const std::uint64_t width = shape.empty() ? 1 : Elems(shape) / rows;
      std::uint64_t row = 0;
      for (std::uint64_t rank = 0; rank < spread.ranks; ++rank) {
        const std::uint64_t mine = rows / spread.ranks + (rank < rows % spread.ranks ? 1 : 0);
        if (mine == 0) continue;
        layout::Fragment fragment;
        fragment.cut = std::make_shared<const layout::Cut>(
            spread.ranks == 1 ? layout::Cut::Whole(shape)
                              : *layout::Cut::Make({rows, width}, {mine, width},
                                                   {{{row, 0}, {0, 0}, {mine, width}}}));
        row += mine;
        layout::Array array{DType::kF32, {}};
        const std::uint64_t elems = mine * width;
        fragment.at.array = static_cast<std::uint32_t>(map.arrays.size());
        if (spread.flat) {
          fragment.at.chunk = elems / 3 + 1;
          fragment.at.vector_offset = 1;
          for (std::uint64_t at = 0; at < elems + 1; at += fragment.at.chunk) {
            array.regions.push_back(add_region(fragment.at.chunk));
          }
        } else {
          array.regions.push_back(add_region(elems));
        }
        map.arrays.push_back(std::move(array));
        tensor.fragments.push_back(std::move(fragment));
      }
      map.tensors.push_back(std::move(tensor));
    }
  }
  EXPECT_TRUE(layout::Validate(map).has_value());
  return out;
}

inline ModelMap ParseMap(const std::string& text) {
  const Result<ModelMap> map = ModelMap::Parse(text, "map.json");
  EXPECT_TRUE(map.has_value()) << map.error().message << "\n" << text;
  return *map;
}

/// Returns the mapped checkpoint; verifies its shard map.
inline Mapped Map(const ModelMap& map, const MapUse& use, const Checkpoint& source) {
  Result<Mapped> mapped = ApplyMap(map, use, source, Patterns());
  EXPECT_TRUE(mapped.has_value()) << mapped.error().message;
  if (!mapped) return {};
  const Status valid = layout::Validate(mapped->checkpoint.map);
  EXPECT_TRUE(valid.has_value()) << valid.error().message;
  return *std::move(mapped);
}

inline std::string MapError(const ModelMap& map, const MapUse& use, const Checkpoint& source) {
  const Result<Mapped> mapped = ApplyMap(map, use, source, Patterns());
  return mapped
             ? ""
             : std::to_string(static_cast<int>(mapped.error().code)) + " " + mapped.error().message;
}

}  // namespace shardwright::checkpoints
