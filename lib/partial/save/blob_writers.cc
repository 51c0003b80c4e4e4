// SPDX-License-Identifier: Apache-2.0
#include "partial/save/blob_writers.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "partial/select/sharding/sharding.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

/// One cut of a checkpoint: experts and modules of PlanSave, or blob by blob.
class Cut {
 public:
  Cut(const ExpertMap& map, std::span<const ModuleBlobs> modules, std::uint32_t ranks,
      std::uint64_t ideal, bool by_expert)
      : map_(map), modules_(modules), ranks_(ranks), by_expert_(by_expert) {
    selection_.resize(map.rank.size());
    for (const auto& layer : map.rank) bytes_.emplace_back(layer.size());
    for (std::uint32_t i = 0; i < modules.size(); ++i) Add(i, ideal);
  }

  Result<BlobWriters> Make() const {
    BlobWriters writers;
    writers.ep = by_expert_ ? map_.ep : 0;
    writers.rank.resize(modules_.size());
    std::vector<ShardPiece> pieces;
    if (by_expert_) {
      SW_TRY_ASSIGN(const SavePlan plan,
                    PlanSave(map_, selection_, bytes_, {}, item_bytes_, {ranks_, {}}, {}));
      pieces = plan.nonexpert.pieces;
      writers.rank_bytes = plan.rank_bytes;
      for (std::size_t i = 0; i < modules_.size(); ++i) {
        if (AsExpert(i)) writers.rank[i].fill(OwnerOf(plan, modules_[i].id));
      }
    } else {
      const std::vector<std::uint64_t> start(ranks_, 0);
      SW_TRY_ASSIGN(const ShardPlan plan, ShardModules(item_bytes_, start, 0, {}));
      pieces = plan.pieces;
      writers.rank_bytes = plan.rank_bytes;
    }
    for (const ShardPiece& piece : pieces) {
      const Item& item = items_[piece.module];
      for (std::size_t c = item.first; c < item.last; ++c)
        writers.rank[item.module][c] = piece.rank;
    }
    writers.bottleneck = *std::max_element(writers.rank_bytes.begin(), writers.rank_bytes.end());
    return writers;
  }

 private:
  /// Components [first, last) of a module.
  struct Item {
    std::uint32_t module = 0;
    std::size_t first = 0;
    std::size_t last = kComponents;
  };

  bool AsExpert(std::size_t module) const {
    return by_expert_ && modules_[module].selected && !split_[module];
  }

  void Add(std::uint32_t module, std::uint64_t ideal) {
    const ModuleBlobs& blobs = modules_[module];
    const std::uint64_t whole =
        std::accumulate(blobs.bytes.begin(), blobs.bytes.end(), std::uint64_t{0});
    split_.push_back(!by_expert_ || whole > ideal);
    if (AsExpert(module)) {
      const auto m = static_cast<std::size_t>(blobs.id.layer);
      selection_[m].push_back(static_cast<std::uint32_t>(blobs.id.expert));
      bytes_[m][static_cast<std::size_t>(blobs.id.expert)].cut = whole;
    } else if (split_.back()) {
      for (std::size_t c = 0; c < kComponents; ++c) AddItem({module, c, c + 1}, blobs.bytes[c]);
    } else {
      AddItem({module}, whole);
    }
  }

  void AddItem(const Item& item, std::uint64_t bytes) {
    if (bytes == 0) return;
    items_.push_back(item);
    item_bytes_.push_back(bytes);
  }

  static std::uint32_t OwnerOf(const SavePlan& plan, const ModuleId& id) {
    const auto found =
        std::lower_bound(plan.experts.begin(), plan.experts.end(), id,
                         [](const ExpertOwner& a, const ModuleId& b) { return a.module < b; });
    SW_CHECK(found != plan.experts.end() && found->module == id);
    return found->rank;
  }

  const ExpertMap& map_;
  std::span<const ModuleBlobs> modules_;
  std::uint32_t ranks_;
  bool by_expert_;
  std::vector<bool> split_;  // by module
  Selection selection_;
  PerExpert<ExpertBytes> bytes_;
  std::vector<Item> items_;
  std::vector<std::uint64_t> item_bytes_;
};

}  // namespace

Result<BlobWriters> AssignBlobs(const ExpertMap& map, std::span<const ModuleBlobs> modules,
                                std::uint32_t ranks) {
  SW_CHECK(ranks > 0);
  std::uint64_t total = 0;
  std::uint64_t largest = 0;
  for (const ModuleBlobs& module : modules) {
    for (const std::uint64_t bytes : module.bytes) {
      SW_TRY_ASSIGN(total, CheckedAdd(total, bytes));
      largest = std::max(largest, bytes);
    }
  }
  const std::uint64_t ideal = CeilDiv(total, ranks);
  SW_TRY_ASSIGN(BlobWriters best, Cut(map, modules, ranks, ideal, false).Make());
  if (!map.rank.empty() && ranks % map.ep == 0) {
    SW_TRY_ASSIGN(BlobWriters cut, Cut(map, modules, ranks, ideal, true).Make());
    if (cut.bottleneck <= best.bottleneck) best = std::move(cut);
  }
  best.bound = std::max(ideal, largest);
  return best;
}

}  // namespace shardwright::partial
