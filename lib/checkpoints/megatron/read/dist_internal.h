// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoints/megatron/buckets.h"
#include "checkpoints/megatron/holdings.h"
#include "checkpoints/megatron/keys.h"
#include "checkpoints/megatron/notes.h"
#include "checkpoints/megatron/read/read_internal.h"
#include "checkpoints/megatron/stages.h"
#include "files/dcp/index.h"

namespace shardwright::checkpoints::megatron {

/// An object in the checkpoint.
struct Object {
  std::uint32_t file = 0;
  std::uint32_t container = 0;
  std::shared_ptr<const torch_pt::Document> document;
  const pickle::Node* value = nullptr;  ///< the saved value, without the list around it
};

/// One parameter in the gradient buffer of a stage.
struct Buffered {
  std::uint32_t param = 0;
  BufferParam what;
  bool copy = false;        ///< the last stage's copy of a tied embedding
  std::uint64_t ranks = 1;  ///< number of tensor-parallel ranks that share it; `rank` is this one
  std::uint64_t rank = 0;
};

/// Reads a torch_dist checkpoint. Source: docs/formats/megatron.md, "Optimizer state".
class Dist {
 public:
  Dist(const SourceSet& source, const Patterns& patterns, Reads reads)
      : source_(source), reads_(reads), collector_(source, patterns) {}

  Result<Checkpoint> Run();

 private:
  using Entries = std::vector<const dcp::Entry*>;

  Status Locate();
  Result<Object> ObjectAt(const dcp::Place& at);
  Value ValueAt(const Object& object);
  Result<Object> OnlyOf(const std::string& name, const dcp::Place& at);
  Result<Place> TensorAt(const dcp::Entry& entry, const dcp::Chunk& chunk);
  Status SortEntries();
  Status CheckGrids() const;
  Status ReadCommon();
  Status ReadForm();

  // dist_args.cc
  std::string Program() const;
  void CountByKeys();
  Status InferArgs();
  Status InferForm(const std::string& program, bool ranks);
  void TakeSchedule(pickle::Node* common);
  bool IsFlat(const dcp::Entry& state) const;

  struct Found {
    std::string name;
    Shape shape;
    DType dtype = DType::kF32;
  };
  Status CheckLists();
  Status AddParams();
  Status OrderParams(std::vector<Found>* found) const;
  Status AddTied();
  Status AddWeights();
  std::string_view BareName(const dcp::Entry& entry) const;
  Status AddTensors(const dcp::Entry& entry, const Key& key, std::string_view state);
  Status AddChunk(const dcp::Entry& entry, const dcp::Chunk& chunk, const Key& key,
                  std::string_view state);
  Status AddFlat(const dcp::Entry& entry, const Shape& whole, const Key& key,
                 std::string_view state);
  Status AddModelSpace();

  // dist_groups.cc
  Status ReadGroups();
  Result<std::vector<const pickle::Node*>> PartsOfOptimizer();
  Status AddScaler(std::size_t part, bool chained, const pickle::Node* optimizer);
  Status SetGroups(std::size_t part, bool chained, const pickle::Node* inner);

  // dist_buckets.cc
  Status ReadBuckets();
  Status ReadBufferGroup(BucketKey key, bool experts, const Rank& rank);
  Status ReadBuffer(const BucketKey& wanted, std::span<const Buffered> params);
  Status ReadBucket(const dcp::Entry& entry, std::string_view slot, std::uint64_t bucket,
                    std::span<const Buffered> params, const Buffer& buffer);
  Result<std::vector<Buffered>> BufferedOf(bool chained, bool experts, const Rank& rank,
                                           std::uint64_t chunk);
  Result<std::vector<std::uint64_t>> BucketSizes(const BucketKey& key);

  Status ReadRunState();
  const std::string& tag() const { return source_.tag; }

  const SourceSet& source_;
  const Reads reads_;
  Collector collector_;
  dcp::Index index_;
  std::vector<std::uint32_t> files_;  // by file of the index: file of the source
  std::vector<std::map<std::uint64_t, std::uint32_t>> containers_;  // by file and offset
  Args args_;
  OptimizerForm form_ = OptimizerForm::kNone;
  std::string prefix_;      // of model keys
  std::string told_vocab_;  // vocabulary size, if a configuration has it
  Object common_;
  const pickle::Node* metadata_ = nullptr;  // content_metadata
  std::optional<Notes> notes_;
  std::map<std::string, std::size_t> noted_;  // by name: index into the notes
  Entries weights_;
  std::vector<std::pair<std::string, const dcp::Entry*>> states_;  // slot and entry
  std::map<std::string, const dcp::Entry*> buckets_;               // by key
  std::map<std::string, const dcp::Entry*> objects_;
  std::map<std::string, const dcp::Entry*> by_weight_;  // by key without prefix
  std::vector<std::uint32_t> order_;                    // of the model, for buckets
  Groups groups_;
  std::vector<std::shared_ptr<const torch_pt::Document>> kept_;  // own the groups' nodes
  std::vector<Value> scalers_;
  bool has_optimizer_ = false;
};

}  // namespace shardwright::checkpoints::megatron
