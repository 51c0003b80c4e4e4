// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/layout/rule.h"
#include "engine/layout/shard_map.h"
#include "engine/plan/target.h"

namespace shardwright::property {

using Random = std::mt19937_64;

/// A logical tensor with its elements, which every layout of it must contain.
struct Truth {
  std::string name;
  std::string state;
  DType dtype = DType::kF32;
  Shape shape;
  layout::SplitRule rule;
  std::vector<std::byte> bytes;
};

/// Tensors of one model: every pattern occurs (replicated, mean, rows, columns, stacks of
/// sub-tensors with unequal and zero widths, uneven, padded vocabulary, scalars, empty tensors).
std::vector<Truth> RandomTruth(Random& random);

/// A tensor that is cut along one dimension of a view of it, and its shards. A program makes such a
/// shard by slicing the view and reshaping the slice to the tensor's number of dimensions.
struct Viewed {
  Shape shape;
  layout::SplitRule rule;
  std::vector<Shape> shapes;                         ///< of the shards, by rank
  std::vector<std::vector<std::uint64_t>> elements;  ///< of the tensor, by rank and shard element
};

/// Makes such a tensor with a view that splits every dimension into one to three. Makes the shards
/// element by element without the engine.
Viewed RandomViewed(Random& random);

/// A layout of the truth: a map, and the bytes of its members, worked out element by element
/// without the engine.
struct Stored {
  layout::ShardMap map;
  std::vector<std::vector<std::byte>> members;
};

/// Numbers of ranks, and the partition of the flat form.
struct Mesh {
  std::uint64_t tp = 1;
  std::uint64_t dp = 1;
  int zero = 0;  ///< 0 whole tensors, 1 one flat vector, 3 a share of each tensor per rank
};

Mesh RandomMesh(Random& random);

/// \param noise  fills padding with random bytes, as real checkpoints do; otherwise with zeros, as
///        the engine writes
Stored Store(const std::vector<Truth>& truth, const Mesh& mesh, Random& random, bool noise);

/// The same map as something to be written: one file per member.
plan::Target TargetOf(const Stored& stored);

}  // namespace shardwright::property
