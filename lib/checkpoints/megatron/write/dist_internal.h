// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/megatron/holdings.h"
#include "checkpoints/megatron/keys.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/stages.h"
#include "checkpoints/megatron/write/items.h"
#include "checkpoints/megatron/write/shards.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "files/dcp/index.h"

namespace shardwright::checkpoints::megatron {

/// Number of layers, and of experts in each, that a key represents.
struct Stack {
  std::uint64_t layers = 1;
  std::uint64_t experts = 1;
};

/// Writes a torch_dist checkpoint. dist_buffers.cc writes the states in gradient buffers.
class DistWriter {
 public:
  DistWriter(const Checkpoint& source, const MegatronLayout& to)
      : writing_(source, to),
        source_(source),
        to_(to),
        args_(writing_.args),
        builder_(writing_.builder),
        items_(writing_.items) {}

  Result<Written> Run();

 private:
  /// A box of a tensor that becomes an item.
  struct Box {
    std::uint32_t param = 0;
    std::size_t entry = 0;  // in the index
    std::string state;
    DType dtype = DType::kF32;
    Shape offsets;
    Shape sizes;
    Rank rank;
    bool again = false;  // another key has the same elements

    std::uint64_t bytes() const { return Elems(sizes) * ItemSize(dtype); }
  };

  /// A parameter in a gradient bucket, or a gap before it. Becomes an item.
  struct Piece {
    std::size_t entry = 0;  // in the index
    std::optional<std::uint32_t> array;
    std::uint64_t first = 0;
    std::uint64_t elems = 0;
    Rank rank;
  };

  Status Prepare();
  Status AddParam(std::uint32_t index);
  Status AddState(std::uint32_t index, const std::string& text, std::string_view state, DType dtype,
                  bool again);
  Status AddBoxes();
  Status AddBox(const Box& what);
  Status AddBuffers();
  Status AddBuffersOf(Shards* shards, BucketKey key, const Rank& rank);
  Status AddState(Shards* shards, BucketKey key, const StateBuffer& one, const std::string& state,
                  const Rank& rank);
  Status AddGroupObjects(BucketKey key, const std::vector<StateBuffer>& buffers, const Rank& rank);
  Status AddPieces();
  Status AddExtraStates();
  Status AddRandomStates();
  Status AddObject(const std::string& key, const Document& document, Rank rank);
  Status AddCommon();
  void AddIntegrity();
  Status AddIndex();

  std::uint64_t NumberOf(const Rank& rank) const;
  std::uint32_t FileOf(const Rank& rank);
  std::uint32_t FileNumber(const Rank& rank) const { return file_numbers_.at(NumberOf(rank)); }
  Result<Rank> RankOf(const ParamName& name) const;
  std::size_t EntryOf(const std::string& key, DType dtype, const Shape& shape);
  std::string PathOf(std::string_view name) const { return writing_.tag + "/" + std::string(name); }

  Writing writing_;
  const Checkpoint& source_;
  const MegatronLayout& to_;
  const Args& args_;
  plan::TargetBuilder& builder_;
  Items& items_;
  std::vector<Box> boxes_;
  std::vector<Piece> pieces_;
  std::optional<double> step_;
  std::vector<Stage> stages_;
  std::map<std::string, std::uint64_t> layers_;  // by stack
  std::map<std::string, Stack> stacks_;          // by key
  dcp::Index index_;
  std::map<std::string, std::size_t> entries_;
  std::map<std::uint64_t, std::uint32_t> files_;         // by rank: items' file
  std::map<std::uint64_t, std::uint32_t> file_numbers_;  // by rank: in the index
  Written out_;
};

}  // namespace shardwright::checkpoints::megatron
