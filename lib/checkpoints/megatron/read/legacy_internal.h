// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoints/megatron/buckets.h"
#include "checkpoints/megatron/holdings.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/read/read_internal.h"
#include "checkpoints/megatron/stages.h"

namespace shardwright::checkpoints::megatron {

/// The files of one tensor, pipeline and expert rank.
struct RankFiles {
  std::uint64_t t = 0;
  std::uint64_t p = 0;
  std::uint64_t e = 0;
  std::string folder;
  std::uint32_t model = 0;                 ///< index of model_optim_rng.pt
  std::optional<std::uint32_t> optimizer;  ///< index of distrib_optim.pt
  std::shared_ptr<const torch_pt::Document> document;
  std::shared_ptr<const torch_pt::Document> optimizer_document;
};

/// A tensor of a rank's model.
struct RankTensor {
  std::size_t rank = 0;  ///< index into the files
  const pickle::Node* node = nullptr;
  bool copy = false;  ///< the last stage's copy of a tied embedding
};

/// A tensor of the whole model, and the ranks that store it.
struct Spread {
  std::vector<RankTensor> held;
  std::tuple<std::uint64_t, std::size_t, std::uint64_t, std::size_t> place;  ///< in the model
};

/// A parameter of a rank, in model order.
struct LocalName {
  std::string name;
  const pickle::Node* node = nullptr;
  bool shared = false;  ///< an embedding that another stage also has
  bool copy = false;
};

/// Reads folders mp_rank_*. Source: docs/formats/megatron.md, "Optimizer state".
class Legacy {
 public:
  Legacy(const SourceSet& source, const Patterns& patterns, Reads reads)
      : source_(source), reads_(reads), collector_(source, patterns) {}

  Result<Checkpoint> Run();

 private:
  Status ReadFiles();
  Status PlaceFiles();
  Status ReadModels();
  Status ReadModel(std::size_t rank, std::uint64_t chunk, const pickle::Node* model);
  static Status CheckList(const std::string& where, std::string_view key);
  void ReadExtra(std::size_t rank, const Stage& stage, std::string_view key,
                 const pickle::Node* value);
  Status ReadLayers(std::size_t rank, std::uint64_t chunk,
                    const std::map<std::uint64_t, std::uint64_t>& layers) const;
  Status AddParams();
  Status AddWeights();

  // legacy_optimizer.cc: states of whole shards.
  Status ReadOptimizers();
  Status ReadOptimizer(std::size_t rank);
  Result<std::vector<const pickle::Node*>> PartsOfOptimizer(std::size_t rank) const;
  Status ReadPart(std::size_t rank, std::size_t part, const pickle::Node* root);
  Status ReadWholeStates(std::size_t rank, const pickle::Node* root, bool mixed,
                         const std::vector<LocalName>& names,
                         const std::vector<std::vector<std::size_t>>& shared);
  Status ReadStatesOf(std::size_t rank, const pickle::Node* state, const LocalName& name);
  Status SetGroups(const std::vector<LocalName>& names,
                   const std::vector<std::vector<std::size_t>>& shared, const pickle::Node* groups,
                   bool experts);

  // legacy_buffers.cc: states in gradient buffers.
  Status ReadBuffers(std::size_t rank, std::size_t part, bool experts);
  Status ReadBuffer(std::size_t rank, std::uint64_t chunk, const std::vector<LocalName>& names,
                    const pickle::Node* entry, bool experts, std::uint64_t elems);

  Status ReadRunState();

  /// Adds a rank's shard of a parameter in a state. `array` contains it from element `first` on.
  Status AddShard(std::size_t rank, const LocalName& name, std::string_view state, DType dtype,
                  std::uint32_t array, std::uint64_t first);
  layout::Role RoleOf(std::size_t rank, std::uint32_t param, bool copy) const;
  std::vector<LocalName> NamesOf(std::size_t rank, std::size_t part, bool chained,
                                 std::optional<std::uint64_t> chunk) const;
  const std::string& NameOf(std::uint32_t file) const { return source_.files[file].name; }
  void NoteInferred(std::uint32_t param);

  const SourceSet& source_;
  const Reads reads_;
  Collector collector_;
  Args args_;
  std::vector<Stage> stages_;
  std::vector<RankFiles> ranks_;
  std::map<std::string, Spread> tensors_;
  std::vector<std::vector<std::vector<LocalName>>> local_;  // by rank and virtual chunk: trained
  Groups groups_;
  std::shared_ptr<RunState> own_ = std::make_shared<RunState>();
  bool has_optimizer_ = false;
};

}  // namespace shardwright::checkpoints::megatron
