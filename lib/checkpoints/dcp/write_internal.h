// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/dcp/folder_internal.h"
#include "checkpoints/dcp/pieces_internal.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/shard_map.h"

namespace shardwright::checkpoints::dcp {

/// Sharding of a tensor over the mesh of ranks.
struct Splits {
  std::vector<std::uint64_t> sizes;
  std::vector<layout::MeshSplit> splits;
};

/// A box of a tensor and the ranks that store it.
struct Share {
  layout::Piece piece;
  layout::CutPtr cut;
  std::vector<std::uint64_t> ranks;
};

/// A component of an entry's path.
struct PathStep {
  std::string text;
  bool is_index = false;
};

/// Returns an entry without chunks.
/// \param above  components of its path above `parts`
shardwright::dcp::Entry EntryOf(const std::vector<std::string>& above,
                                const std::vector<PathStep>& parts);

/// Builds the folders of a checkpoint.
class FolderWriter {
 public:
  FolderWriter(const Checkpoint& source, const FolderLayout& layout)
      : source_(source),
        layout_(layout),
        own_(dynamic_cast<const DcpState*>(source.own.get())),
        index_(source.map),
        ranks_(layout.mesh.dp() * layout.mesh.tp),
        loads_(ranks_, 0) {}

  Result<Written> Run();

 private:
  void OpenFolders();
  Status AddModel();
  Status AddOptimizer();
  Status AddStates(const Param& param);
  Status AddScalars(const Param& param);
  Status AddScalar(const Param& param, const Scalar& scalar);
  Status AddTensorValue(shardwright::dcp::Entry entry, const Scalar& scalar);
  Status AddTuple(shardwright::dcp::Entry entry, const Group& group, const std::string& key,
                  const pickle::Node* value);
  Status AddOption(const Group& group, const std::string& key, const pickle::Node* value,
                   std::vector<PathStep> steps);
  Status AddGroups();
  Status AddExtras();
  Status AddExtra(const Extra& extra);
  Status AddTrainState();
  Result<std::uint32_t> AddTensor(FolderBuilder* folder, shardwright::dcp::Entry entry,
                                  const Param& param, std::string_view state, DType dtype,
                                  std::optional<std::uint32_t> known);
  Status AddObject(FolderBuilder* folder, shardwright::dcp::Entry entry, const pickle::Node* value);

  /// Returns the optimizer's name for a parameter of the model.
  const std::string& OptimizerName(const std::string& param) const;
  shardwright::dcp::Entry SlotEntry(const std::string& param, const std::string& key) const;
  bool IsDropped(const Extra& extra) const;
  bool HasOptimizer() const { return !source_.groups.empty(); }
  /// \error kUnsupported  the ranks do not form the mesh of the parameter's rule; names both
  Splits SplitsOf(const Param& param) const;
  Result<const std::vector<Share>*> SharesOf(const Param& param);
  std::uint64_t FileOf(std::uint64_t rank) const {
    return layout_.files == 0 ? rank : rank * layout_.files / ranks_;
  }
  std::uint64_t Choose(const std::vector<std::uint64_t>& ranks, std::uint64_t bytes);
  std::uint64_t Next() { return FileOf(next_++ % ranks_); }
  FolderBuilder* model() { return folders_.front().get(); }
  FolderBuilder* optimizer() { return folders_.back().get(); }
  void TellWhatIsLeft();
  void Leave(std::string what) { left_.push_back(std::move(what)); }

  const Checkpoint& source_;
  const FolderLayout& layout_;
  const DcpState* own_;
  layout::TensorIndex index_;
  std::uint64_t ranks_;
  std::vector<std::uint64_t> loads_;
  std::uint64_t next_ = 0;
  std::unordered_set<std::string_view> masters_;  // parameters with master weights
  plan::TargetBuilder builder_;
  std::shared_ptr<ItemLayouts> layouts_ = std::make_shared<ItemLayouts>();
  std::vector<std::unique_ptr<FolderBuilder>> folders_;
  PieceCuts cuts_;
  std::map<std::tuple<Shape, Shape, std::string>, std::vector<Share>> shares_;
  pickle::Arena arena_;
  std::set<std::string> left_options_;
  std::vector<std::string> left_;
  bool stepped_ = false;
};

}  // namespace shardwright::checkpoints::dcp
