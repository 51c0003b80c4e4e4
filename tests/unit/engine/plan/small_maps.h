// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/layout/rule.h"
#include "engine/plan/plan.h"
#include "engine/tensor/convert.h"

// Shard maps of a few elements, made by hand, and the simplest way to run a plan on them.

namespace shardwright::plan {

/// Builds a source or a target map.
struct MapMaker {
  layout::ShardMap map;

  /// A file with one member of that many elements; \returns the member's array.
  std::uint32_t Array(DType dtype, std::uint64_t elems, std::optional<std::uint32_t> crc32 = 7) {
    const auto file = static_cast<std::uint32_t>(map.files.size());
    map.files.push_back("file" + std::to_string(file));
    const auto member = static_cast<std::uint32_t>(map.members.size());
    map.members.push_back({file, 64, elems * ItemSize(dtype), crc32, "data/0"});
    map.arrays.push_back({dtype, {{member, 0, elems}}});
    return static_cast<std::uint32_t>(map.arrays.size() - 1);
  }

  layout::LogicalTensor& Tensor(const std::string& name, const std::string& state, DType dtype,
                                Shape shape) {
    map.tensors.push_back({name, state, dtype, std::move(shape), {}});
    return map.tensors.back();
  }

  /// A whole tensor in an array of its own.
  layout::LogicalTensor& Whole(const std::string& name, const std::string& state, DType dtype,
                               const Shape& shape) {
    const std::uint32_t array = Array(dtype, Elems(shape));
    layout::LogicalTensor& tensor = Tensor(name, state, dtype, shape);
    tensor.fragments.push_back({Cut(layout::Cut::Whole(shape)), {array}, layout::Role::kOwner});
    return tensor;
  }

  /// The slices of `ranks` ranks along a dimension, each in an array of its own.
  layout::LogicalTensor& Slices(const std::string& name, const std::string& state, DType dtype,
                                const Shape& shape, std::uint32_t dim, std::uint64_t ranks,
                                bool padded = false) {
    layout::SplitRule rule;
    rule.split = layout::Split::kDim;
    rule.dim = dim;
    rule.uneven = !padded;
    rule.padded = padded;
    std::vector<layout::Fragment> fragments;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      const auto cut = layout::MakeCut(rule, shape, ranks, rank);
      EXPECT_TRUE(cut.has_value()) << cut.error().message;
      const std::uint32_t array = Array(dtype, cut->shard_elems());
      fragments.push_back({Cut(*cut), {array}, layout::Role::kOwner});
    }
    layout::LogicalTensor& tensor = Tensor(name, state, dtype, shape);
    tensor.fragments = std::move(fragments);
    return tensor;
  }

  static layout::CutPtr Cut(layout::Cut cut) {
    return std::make_shared<const layout::Cut>(std::move(cut));
  }

  /// As a target: every array is the one payload of a file.
  Target AsTarget() const {
    Target target;
    target.map = map;
    for (std::uint32_t a = 0; a < map.arrays.size(); ++a) {
      OutputFile file;
      file.path = "out" + std::to_string(a);
      Payload payload;
      payload.array = a;
      payload.bytes = map.arrays[a].regions[0].elems * ItemSize(map.arrays[a].dtype);
      file.bytes = payload.bytes;
      file.payloads.push_back(payload);
      target.files.push_back(std::move(file));
    }
    return target;
  }
};

/// The payloads of a source's members.
using Bytes = std::vector<std::string>;

/// fp32 elements as bytes.
inline std::string Floats(const std::vector<float>& values) {
  std::string out(values.size() * sizeof(float), '\0');
  std::memcpy(out.data(), values.data(), out.size());
  return out;
}

inline std::vector<float> AsFloats(const std::string& bytes) {
  std::vector<float> out(bytes.size() / sizeof(float));
  std::memcpy(out.data(), bytes.data(), out.size() * sizeof(float));
  return out;
}

/// Member bytes in which element i of the first tensor of a map is the number i, and padding -1.
/// \pre its dtype is float32, and each fragment has an array of its own
inline Bytes Numbered(const layout::ShardMap& map) {
  Bytes out(map.members.size());
  for (const layout::Fragment& fragment : map.tensors.at(0).fragments) {
    std::vector<float> shard(fragment.cut->shard_elems(), -1);
    fragment.cut->ForShardRange(0, shard.size(), [&](const layout::Run& run) {
      for (std::uint64_t i = 0; i < run.elems; ++i) {
        shard[run.shard + i] = static_cast<float>(run.logical + i);
      }
    });
    out[map.arrays[fragment.at.array].regions[0].member] = Floats(shard);
  }
  return out;
}

/// Runs a unit's program on the source's bytes. Returns the unit.
inline std::string RunProgram(const Program& program, const Bytes& members, std::uint64_t bytes) {
  std::string unit(bytes, '\0');
  std::vector<double> sums(bytes);  // more than there are elements
  for (const Read& read : program.reads) {
    EXPECT_LE(read.offset + read.bytes, members.at(read.member).size());
    const std::string from = members[read.member].substr(read.offset, read.bytes);
    for (std::uint32_t c = read.first_copy; c < read.first_copy + read.copy_count; ++c) {
      const Copy& copy = program.copies.at(c);
      const auto part =
          std::as_bytes(std::span(from)).subspan(copy.skip, copy.elems * ItemSize(copy.from));
      const std::uint64_t item = ItemSize(program.to);
      if (copy.accumulate) {
        Accumulate(copy.from, part, std::span(sums).subspan(copy.at / item, copy.elems));
      } else {
        Convert(copy.from, part, program.to,
                std::as_writable_bytes(std::span(unit)).subspan(copy.at, copy.elems * item));
      }
    }
  }
  for (const Mean& mean : program.means) {
    const std::uint64_t item = ItemSize(program.to);
    StoreMean(std::span(sums).subspan(mean.at / item, mean.elems), mean.count, program.to,
              std::as_writable_bytes(std::span(unit)).subspan(mean.at, mean.elems * item));
  }
  return unit;
}

/// All payloads of a plan, file by file.
inline std::vector<std::string> RunPlan(const Plan& plan, const Bytes& members) {
  std::vector<std::string> out(plan.target().files.size());
  Program program;
  for (std::uint64_t u = 0; u < plan.unit_count(); ++u) {
    const Unit unit = plan.unit(u);
    plan.Fill(unit, &program);
    out[unit.file] += RunProgram(program, members, unit.bytes);
  }
  return out;
}

}  // namespace shardwright::plan
