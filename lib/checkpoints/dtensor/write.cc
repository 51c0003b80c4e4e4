// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "checkpoints/dtensor/dtensor.h"
#include "checkpoints/dtensor/write_internal.h"
#include "checkpoints/pickled/pickled_file.h"
#include "engine/plan/target_builder.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

/// Lays out files and adds their payloads to the target's shard map.
class Writer {
 public:
  explicit Writer(std::shared_ptr<const FilesPlan> plan) : plan_(std::move(plan)) {}

  Result<Written> Run() {
    AddTensors();
    AddFlat();
    for (std::uint64_t rank = 0; rank < plan_->layout.ranks(); ++rank) SW_TRY(AddRank(rank));
    SW_TRY(AddTable());
    return Written{std::move(builder_).Take(), plan_->not_carried};
  }

 private:
  void AddTensors();
  void AddFlat();
  Status AddRank(std::uint64_t rank);
  Status AddTable();
  void AddPiece(std::uint64_t rank, std::uint32_t file, std::uint64_t offset, std::uint32_t number,
                const torch_pt::StorageSpec& spec, const std::string& what);

  std::shared_ptr<const FilesPlan> plan_;
  plan::TargetBuilder builder_;
  std::vector<std::uint32_t> tensors_;            // by FilesPlan::tensors: in the target
  std::vector<std::vector<std::uint32_t>> flat_;  // by unit and state, then by copy: arrays
  Status failed_ = {};
};

void Writer::AddTensors() {
  for (const StateTensor& tensor : plan_->tensors) {
    const Param& param = plan_->params[tensor.param].param;
    tensors_.push_back(builder_.AddTensor(param.name, tensor.state, tensor.dtype, param.shape));
  }
}

/// Adds the arrays of flat vectors, and each parameter's position in them.
void Writer::AddFlat() {
  const std::uint64_t shards = plan_->shards();
  const std::uint64_t copies = plan_->layout.ranks() / shards;
  for (std::size_t u = 0; u < plan_->units.size(); ++u) {
    const FlatUnit& unit = plan_->units[u];
    const std::size_t states = plan_->params[plan_->flat[unit.params.front()]].states.size();
    for (std::size_t s = 0; s < states; ++s) {
      std::vector<std::uint32_t>& arrays = flat_.emplace_back();
      for (std::uint64_t copy = 0; copy < copies; ++copy) {
        const auto number_of = [&](std::uint32_t at) {
          return plan_->params[plan_->flat[at]].states[s];
        };
        const DType dtype = plan_->tensors[number_of(unit.params.front())].dtype;
        arrays.push_back(builder_.AddArray(dtype, shards));
        for (std::size_t i = 0; i < unit.params.size(); ++i) {
          const Shape& shape = plan_->params[plan_->flat[unit.params[i]]].param.shape;
          layout::Fragment fragment;
          fragment.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(shape));
          fragment.at = {arrays.back(), unit.offsets[i], plan_->FlatLength(u), 0};
          fragment.role = copy == 0 ? layout::Role::kOwner : layout::Role::kReplica;
          if (fragment.cut->shard_elems() == 0) continue;
          builder_.AddFragment(tensors_[number_of(unit.params[i])], std::move(fragment));
        }
      }
    }
  }
}

void Writer::AddPiece(std::uint64_t rank, std::uint32_t file, std::uint64_t offset,
                      std::uint32_t number, const torch_pt::StorageSpec& spec,
                      const std::string& what) {
  if (number >= kFlatTensors) {
    const std::uint64_t shards = plan_->shards();
    const std::uint32_t array = flat_[number - kFlatTensors][rank / shards];
    builder_.AddElements(file, offset, array, rank % shards, spec.elems, what);
    return;
  }
  const PlannedParam& param = plan_->params[plan_->tensors[number].param];
  layout::Piece piece{std::vector<std::uint64_t>(param.param.shape.size(), 0), param.param.shape};
  if (!param.plain) {
    auto mine = plan_->PieceOf(param, rank);
    if (!mine) {
      failed_ = tl::unexpected<Error>(std::move(mine).error());
      return;
    }
    piece = *std::move(mine);
  }
  auto cut = layout::CutOf(param.param.shape, piece);
  if (!cut) {
    failed_ = tl::unexpected<Error>(std::move(cut).error());
    return;
  }
  layout::Fragment fragment;
  fragment.cut = std::make_shared<const layout::Cut>(*std::move(cut));
  fragment.at.array = builder_.AddArray(spec.dtype, 1);
  fragment.role = plan_->Owns(param, rank) ? layout::Role::kOwner : layout::Role::kReplica;
  builder_.AddElements(file, offset, fragment.at.array, 0, spec.elems, what);
  builder_.AddFragment(tensors_[number], std::move(fragment));
}

Status Writer::AddRank(std::uint64_t rank) {
  const FilesLayout& layout = plan_->layout;
  const auto add = [&](std::uint32_t file, std::uint64_t offset, std::uint32_t number,
                       const torch_pt::StorageSpec& spec, std::size_t storage) {
    AddPiece(rank, file, offset, number, spec, "data/" + std::to_string(storage));
  };
  const auto name = [&](const std::string& item) {
    return RankFileName(layout.trainer, item, layout.ranks(), rank);
  };
  SW_TRY(AddPickledFile(
      &builder_, name(layout.model_item),
      [plan = plan_, rank] { return ModelDocument(*plan, rank); }, add));
  if (plan_->has_optimizer) {
    SW_TRY(AddPickledFile(
        &builder_, name(layout.optimizer_item),
        [plan = plan_, rank] { return OptimizerDocument(*plan, rank); }, add));
  }
  for (std::size_t i = 0; plan_->own != nullptr && i < plan_->own->items.size(); ++i) {
    SW_TRY(AddPickledFile(
        &builder_, name(plan_->own->items[i].name),
        [plan = plan_, i, rank] { return OwnDocument(*plan, i, rank); }, add));
  }
  return failed_;
}

Status Writer::AddTable() {
  const FilesLayout& layout = plan_->layout;
  if (layout.trainer == Trainer::kVerl) {
    builder_.AddText(std::string(kVerlConfig),
                     "{\n    \"FSDP_version\": " + std::to_string(layout.fsdp_version) +
                         ",\n    \"world_size\": " + std::to_string(layout.ranks()) + "\n}");
  } else if (layout.trainer == Trainer::kTorchCheckpointing) {
    SW_TRY_ASSIGN(std::string bytes, ItemTableBytes(*plan_));
    builder_.AddText(std::string(kItemTable), std::move(bytes));
  }
  return {};
}

}  // namespace

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const auto* own = dynamic_cast<const FilesLayout*>(layout.own.get());
  SW_CHECK(own != nullptr);
  SW_TRY(
      CheckDecided(source, "parameters are sharded and every other tensor is whole on each rank"));
  SW_TRY_ASSIGN(FilesPlan plan, MakePlan(source, *own));
  return Writer(std::make_shared<const FilesPlan>(std::move(plan))).Run();
}

}  // namespace shardwright::checkpoints::dtensor
