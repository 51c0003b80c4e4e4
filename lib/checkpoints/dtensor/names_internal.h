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

/// The program that writes a set of files, one for each rank and item.
enum class Trainer : std::uint8_t {
  kVerl,  ///< model_world_size_W_rank_R.pt, optim_..., extra_state_...
  /// pytorch_model_fsdp_0_rankR.bin and optimizer_0_rankR.bin. Without
  /// sharding (FULL_STATE_DICT): pytorch_model_fsdp.bin and optimizer.bin.
  kAccelerate,
  kTorchCheckpointing,  ///< ITEM_R.pt and metadata.pkl
};

inline constexpr std::string_view kVerlConfig = "fsdp_config.json";
inline constexpr std::string_view kItemTable = "metadata.pkl";

enum class Item : std::uint8_t { kModel, kOptimizer, kOther };

/// The parts of the file name of one rank's item.
struct RankFile {
  Trainer trainer = Trainer::kVerl;
  Item item = Item::kModel;
  std::string name;                    ///< name of the item: "model", "extra_state", "lr_scheduler"
  std::optional<std::uint64_t> world;  ///< number of ranks: verl's names, unsharded files
  std::uint64_t rank = 0;
};

/// Parses a file name. Returns nothing for other names.
std::optional<RankFile> ParseRankFile(std::string_view name);

/// \param stem  kAccelerate: stem of the model's files, because "_0" is optional
/// \param world  number of ranks
std::string RankFileName(Trainer trainer, std::string_view item, std::uint64_t world,
                         std::uint64_t rank);

/// The files of one item, by rank.
struct ItemFiles {
  std::string name;
  Item item = Item::kModel;
  std::vector<std::uint32_t> files;  ///< indices into SourceSet::files
};

/// The complete list of files of a checkpoint.
struct Family {
  Trainer trainer = Trainer::kVerl;
  std::uint64_t world = 0;
  std::vector<ItemFiles> items;     ///< the model, the optimizer, then other items by name
  std::optional<int> fsdp_version;  ///< kVerl, if its configuration records it
  /// If there are several models: all of them, with the one to read first. Otherwise empty.
  std::vector<WeightSet> sets;
  std::vector<std::string> left_out;  ///< phrases for models and optimizers that are not read

  /// Returns the files of an item, or null if there is none.
  const ItemFiles* Find(Item item) const;
};

/// Sorts files by item and rank and verifies that no rank is missing.
/// If there are several models, selects the one that `source.weights_of`
/// names, or else the only one with an optimizer of the same number.
/// \param only_weights  ignores all items except the model; their files may be missing
/// \error kNotFound  missing ranks, listed; kBadInput  ranks beyond the world size;
///        kUnsupported files of several worlds or trainers, or several models if
///        it is not clear which one was trained; kUsage  no model has that name
Result<Family> FamilyOf(const SourceSet& source, bool only_weights);

}  // namespace shardwright::checkpoints::dtensor
