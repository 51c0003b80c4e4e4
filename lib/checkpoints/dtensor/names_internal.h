// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/source.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// Who writes files of this kind, one for each rank and item.
enum class Trainer : std::uint8_t {
  kVerl,  ///< model_world_size_W_rank_R.pt, optim_..., extra_state_...
  /// pytorch_model_fsdp_0_rankR.bin, optimizer_0_rankR.bin; of the whole (FULL_STATE_DICT)
  /// pytorch_model_fsdp.bin, optimizer.bin
  kAccelerate,
  kTorchCheckpointing,  ///< ITEM_R.pt and metadata.pkl
};

inline constexpr std::string_view kVerlConfig = "fsdp_config.json";
inline constexpr std::string_view kItemTable = "metadata.pkl";

enum class Item : std::uint8_t { kModel, kOptimizer, kOther };

/// What the name of a file of one rank says.
struct RankFile {
  Trainer trainer = Trainer::kVerl;
  Item item = Item::kModel;
  std::string name;                    ///< of the item: "model", "extra_state", "lr_scheduler"
  std::optional<std::uint64_t> world;  ///< how many ranks there are: verl's, and files of the whole
  std::uint64_t rank = 0;
};

/// Nothing for other names.
std::optional<RankFile> ParseRankFile(std::string_view name);

/// \param stem   kAccelerate: of the model's files, since "_0" is not always there
/// \param world  how many ranks there are
std::string RankFileName(Trainer trainer, std::string_view item, std::uint64_t world,
                         std::uint64_t rank);

/// The files of one item, by rank.
struct ItemFiles {
  std::string name;
  Item item = Item::kModel;
  std::vector<std::uint32_t> files;  ///< into SourceSet::files
};

/// The files of a checkpoint, complete.
struct Family {
  Trainer trainer = Trainer::kVerl;
  std::uint64_t world = 0;
  std::vector<ItemFiles> items;     ///< the model, the optimizer, then others by name
  std::optional<int> fsdp_version;  ///< kVerl, where its configuration says it
  /// If there are several models: all of them, the one that is read first. Otherwise empty.
  std::vector<WeightSet> sets;
  std::vector<std::string> left_out;  ///< models and optimizers that are not read; a phrase each

  /// Null if there is no such item.
  const ItemFiles* Find(Item item) const;
};

/// Sorts files by item and rank and proves that every rank is there.
/// If there are several models, takes the one that `source.weights_of` names, otherwise the only
/// one with an optimizer of the same number.
/// \param only_weights  leaves out all items except the model; their files may be missing
/// \error kNotFound  ranks that are missing, named; kBadInput  ranks that the world does not have;
///        kUnsupported  files of several worlds or trainers, several models if the trained one
///        is not known; kUsage  no model of that name
Result<Family> FamilyOf(const SourceSet& source, bool only_weights);

}  // namespace shardwright::checkpoints::dtensor
