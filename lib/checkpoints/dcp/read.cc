// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "checkpoints/dcp/parts_internal.h"
#include "checkpoints/dcp/reader_internal.h"
#include "checkpoints/pickled/wrappers.h"
#include "checkpoints/tp_rules/quantized.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {

namespace file_format = shardwright::dcp;
using file_format::Entry;
using pickle::Node;

namespace {

/// Returns true for the buffers of PyTorch's BatchNorm, which no module has as parameters.
bool IsStatistic(std::string_view name) {
  const std::string_view last = name.substr(name.rfind('.') + 1);
  return last == "running_mean" || last == "running_var" || last == "num_batches_tracked";
}

}  // namespace

Status FolderReader::SortEntries() {
  std::vector<const file_format::Index*> indexes;
  for (const Folder& folder : folders_) indexes.push_back(&folder.index);
  const Optimizers optimizers = only_weights_ ? Optimizers::kAny : Optimizers::kOne;
  const std::string_view asked =
      folders_chosen_ ? std::string_view() : std::string_view(source_.weights_of);
  SW_TRY_ASSIGN(Sorting sorting, Sort(indexes, optimizers, asked, &sorted_));
  own_->naming = std::move(sorting.naming);
  Naming& naming = own_->naming;
  for (const Folder& folder : folders_) {
    if (folder.name.empty()) continue;
    const std::string name = folder.name.substr(0, folder.name.size() - 1);
    naming.pair = true;
    (IsModelFolder(name) ? naming.model_folder : naming.optimizer_folder) = name;
  }
  const bool accelerate = naming.model_folder != "model" && naming.optimizer_folder != "optimizer";
  if (naming.pair && accelerate) {
    own_->flavour = Flavour::kAccelerate;
  } else if (naming.model.empty() && naming.flat) {
    own_->flavour = Flavour::kTorchtitan;
  }
  for (std::uint32_t f = 0; f < folders_.size(); ++f) {
    for (std::uint32_t e = 0; e < sorted_[f].size(); ++e) {
      const Sorted& sorted = sorted_[f][e];
      const EntryRef ref{f, e};
      if (sorted.kind == Sorted::Kind::kModel) {
        const auto fresh =
            by_name_.emplace(sorted.name, static_cast<std::uint32_t>(model_.size())).second;
        if (!fresh)
          return Fail(Errc::kBadInput, Where(ref),
                      " is in the model folder and in the optimizer folder");
        model_.push_back(ref);
        continue;
      }
      if (sorted.kind == Sorted::Kind::kExtra) continue;
      if (only_weights_) {
        const auto other = sorting.model_names.find(sorted.name);
        const bool same = other == sorting.model_names.end();
        if (!sorted.name.empty()) trained_.insert(same ? sorted.name : other->second);
        continue;
      }
      if (sorted.kind == Sorted::Kind::kOption && !naming.flat) {
        group_options_[sorted.group].emplace_back(sorted.key, ref);
        continue;
      }
      const auto other = sorting.model_names.find(sorted.name);
      const std::string_view name =
          other == sorting.model_names.end() ? sorted.name : other->second;
      if (name != sorted.name) {
        own_->optimizer_names.emplace(name, sorted.name);
        model_names_.emplace(sorted.name, name);
      }
      const auto [at, fresh] = kept_.try_emplace(name);
      if (fresh) kept_order_.push_back(name);
      (sorted.kind == Sorted::Kind::kSlot ? at->second.slots : at->second.options)
          .emplace_back(sorted.key, ref);
    }
  }
  // Only PyTorch Lightning numbers the optimizers within one folder.
  const bool numbered = naming.optimizer.size() == 1 &&
                        naming.optimizer.front().starts_with("optimizer_") &&
                        IsOptimizerFolder(naming.optimizer.front());
  const bool lightning = !naming.pair && numbered;
  if (lightning) out_.facts.emplace(kLightningFact, "");
  TakeSets(std::move(sorting.sets), sorting.chosen_by_name);
  return {};
}

void FolderReader::MakeParams() {
  const bool trained = !kept_.empty() || !group_options_.empty() ||
                       std::any_of(trained_.begin(), trained_.end(),
                                   [&](std::string_view name) { return by_name_.contains(name); });
  bool parts = false;  // the optimizer has modules that the model saves in several parts
  for (const std::string_view name : kept_order_) {
    parts = parts || (!by_name_.contains(name) && !kept_.at(name).slots.empty());
  }
  std::vector<NamedTensor> all;
  all.reserve(model_.size());
  for (const EntryRef ref : model_) {
    const Entry& entry = At(ref);
    all.push_back({sorted_[ref.folder][ref.entry].name, entry.dtype, entry.shape});
  }
  const auto scales = QuantizationTensors(all);
  if (!scales.empty() && (!trained || parts))
    out_.warnings.push_back(KeptWithWeights(scales.size()));
  for (const EntryRef ref : model_) {
    const Sorted& sorted = sorted_[ref.folder][ref.entry];
    Param param;
    param.name = sorted.name;
    param.shape = At(ref).shape;
    param.dtype = At(ref).dtype;
    const bool kept = kept_.contains(sorted.name) || trained_.contains(sorted.name);
    const bool guess =
        (!trained || parts) && CanBeTrained(param.dtype) && !scales.contains(param.name);
    param.kind = kept || guess ? ParamKind::kTrainable : ParamKind::kBuffer;
    out_.params.push_back(std::move(param));
  }
  for (const std::string_view name : kept_order_) {
    if (by_name_.contains(name)) continue;
    Param param;
    param.name = name;
    out_.fused.push_back(std::move(param));
  }
  if (parts) WarnOfUnmatched();
}

Status FolderReader::DecideRules() {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (const Param& param : out_.params) {
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  const Patterns chosen = patterns_.ForModel(names, shapes);
  for (Param& param : out_.params) {
    SW_TRY_ASSIGN(Ruled ruled, DecideRule({}, chosen, param.name, std::span(&param.shape, 1)));
    param.rule = std::move(ruled.rule);
  }
  return {};
}

Status FolderReader::AddTensor(const std::string& name, std::string_view state, EntryRef ref) {
  const Entry& entry = At(ref);
  layout::LogicalTensor logical;
  logical.name = name;
  logical.state = state;
  logical.dtype = entry.dtype;
  logical.shape = entry.shape;
  logical.fragments.reserve(entry.chunks.size());
  const auto add = [&](std::uint32_t c, const StoredItem& held, layout::Role role) -> Status {
    if (entry.chunks[c].is_empty()) return {};
    if (held.node == nullptr || held.node->tensor == nullptr) {
      return Fail(Errc::kInternal, Where(ref), ": an item without a tensor");
    }
    const pickle::Tensor& tensor = *held.node->tensor;
    auto stored = cuts_.Stored(entry.shape, entry.chunks[c].offsets, tensor,
                               StorageOf(held, tensor.storage).bytes / ItemSize(tensor.dtype));
    if (!stored) return Within(Where(ref), stored.error());
    layout::Fragment fragment;
    fragment.cut = stored->cut;
    fragment.at.array =
        map_.AddWhole({.member = map_.MemberOf(held.file, 0, held.item.storage + tensor.storage),
                       .offset = stored->first * ItemSize(tensor.dtype),
                       .elems = stored->elems,
                       .dtype = tensor.dtype});
    fragment.role = role;
    logical.fragments.push_back(std::move(fragment));
    return {};
  };
  for (std::uint32_t c = 0; c < entry.chunks.size(); ++c) {
    SW_TRY(add(c, ItemOf(ref, c), layout::Role::kOwner));
  }
  const auto [first_copy, last_copy] = folders_[ref.folder].CopiesOf(ref.entry);
  for (std::uint32_t copy = first_copy; copy < last_copy; ++copy) {
    SW_TRY(add(folders_[ref.folder].index.copies[copy].chunk, CopyOf(ref.folder, copy),
               layout::Role::kReplica));
  }
  out_.map.tensors.push_back(std::move(logical));
  return {};
}

Status FolderReader::AddModel() {
  for (std::uint32_t i = 0; i < out_.params.size(); ++i) {
    const Param& param = out_.params[i];
    const bool stepped = param.kind == ParamKind::kTrainable && param.dtype == DType::kF32 &&
                         (kept_.contains(param.name) || (param.group >= 0 && !kept_.empty()));
    const std::string_view state = param.kind == ParamKind::kBuffer   ? layout::kBuffer
                                   : param.kind == ParamKind::kFrozen ? layout::kFrozen
                                   : stepped                          ? layout::kMaster
                                                                      : layout::kWeight;
    SW_TRY(AddTensor(param.name, state, model_[i]));
  }
  return {};
}

Status FolderReader::AddSlot(Param* param, std::string_view slot, EntryRef ref, bool in_model) {
  const Entry& entry = At(ref);
  if (!entry.is_tensor) {
    const Node* value = ObjectOf(ref);
    if (value == nullptr) {
      out_.bound.push_back(
          Where(ref) + ": value of an unknown class, which cannot be written in another layout");
      return {};
    }
    Scalar scalar;
    scalar.state = slot;
    scalar.value = value;
    param->scalars.push_back(std::move(scalar));
    return {};
  }
  const bool whole = in_model ? entry.shape == param->shape : !entry.shape.empty();
  if (whole && !(entry.shape.empty() && slot == layout::kStep)) {
    if (std::find(out_.states.begin(), out_.states.end(), slot) == out_.states.end()) {
      out_.states.emplace_back(slot);
    }
    if (!in_model) param->shape = entry.shape;
    return AddTensor(param->name, slot, ref);
  }
  const std::uint64_t elems = Elems(entry.shape);
  if (elems != 1 || entry.chunks.size() != 1) {
    out_.bound.push_back(StrCat(Where(ref), ": optimizer state ", ToString(entry.shape),
                                " differs in shape from its parameter ", ToString(param->shape),
                                ", and cannot be written in another layout"));
    return {};
  }
  Scalar scalar;
  scalar.state = slot;
  scalar.is_tensor = true;
  scalar.dtype = entry.dtype;
  scalar.shape = entry.shape;
  auto bytes = BytesOf(ItemOf(ref, 0));
  if (!bytes) return Within(Where(ref), bytes.error());
  scalar.bytes = *std::move(bytes);
  param->scalars.push_back(std::move(scalar));
  return {};
}

Status FolderReader::AddSlots() {
  for (Param& param : out_.params) {
    const auto kept = kept_.find(param.name);
    if (kept == kept_.end()) continue;
    for (const auto& [slot, ref] : kept->second.slots) SW_TRY(AddSlot(&param, slot, ref, true));
  }
  for (Param& param : out_.fused) {
    for (const auto& [slot, ref] : kept_.at(param.name).slots) {
      SW_TRY(AddSlot(&param, slot, ref, false));
    }
  }
  std::sort(out_.states.begin(), out_.states.end());
  return {};
}

void FolderReader::AddExtras() {
  for (std::uint32_t f = 0; f < folders_.size(); ++f) {
    const std::string& folder = folders_[f].name;
    for (std::uint32_t e = 0; e < sorted_[f].size(); ++e) {
      if (sorted_[f][e].kind != Sorted::Kind::kExtra) continue;
      const EntryRef ref{f, e};
      // Weights that were not selected must not replace the selected ones.
      if (others_left_out_ && sorted_[f][e].set) continue;
      Extra extra;
      extra.entry = At(ref);
      extra.set = sorted_[f][e].set;
      extra.with_optimizer =
          !folder.empty() && IsOptimizerFolder(folder.substr(0, folder.size() - 1));
      const std::size_t count = extra.entry.is_tensor ? extra.entry.chunks.size() : 1;
      extra.raw = !extra.entry.is_tensor && ObjectOf(ref) == nullptr;
      for (std::uint32_t c = 0; c < count; ++c) {
        extra.values.push_back(ValueOf(ItemOf(ref, c)));
      }
      own_->extras.push_back(std::move(extra));
    }
  }
}

/// Reads the iteration from train_state.step or step, or derives it from the parameters' steps.
void FolderReader::FindIteration() {
  for (const Extra& extra : own_->extras) {
    if (extra.raw || extra.entry.is_tensor) continue;
    if (extra.entry.name != "train_state.step" && extra.entry.name != "step") continue;
    if (const auto count = pickle::AsCount(extra.values.front().document.root)) {
      out_.iteration = *count;
      return;
    }
  }
  std::optional<float> steps;
  for (const Param& param : out_.params) {
    for (const Scalar& scalar : param.scalars) {
      if (scalar.state != layout::kStep) continue;
      const std::optional<double> number = NumberOf(scalar);
      if (!number) continue;
      const auto value = static_cast<float>(*number);
      if (steps && *steps != value) return;
      steps = value;
    }
  }
  if (steps && *steps >= 0 && *steps < 1e15F) out_.iteration = static_cast<std::uint64_t>(*steps);
}

/// Returns true if FSDP has sharded every trained parameter that it
/// can shard. FSDP also shards frozen parameters, but not buffers.
bool FolderReader::ShardsParameters() const {
  bool any = false;
  for (std::size_t i = 0; i < out_.params.size(); ++i) {
    const Param& param = out_.params[i];
    if (param.kind != ParamKind::kTrainable || param.shape.empty() || param.shape[0] < 2) continue;
    if (At(model_[i]).chunks.size() < 2) return false;
    any = true;
  }
  return any;
}

void FolderReader::Finish() {
  FindIteration();
  // A folder does not distinguish frozen parameters from buffers, and may lack them: that of an
  // adapter, or one saved with ignore_frozen_params. DeepSpeed's loader expects an entry for each
  // frozen one in its list, but accepts a checkpoint without this list.
  out_.frozen_unknown = true;
  for (const auto& [name, full] : own_->optimizer_names) {
    if (IsWithAdapter(full, name)) out_.running_names.emplace(name, full);
  }
  std::map<DType, std::uint64_t> elems;
  const bool shards = ShardsParameters();
  for (std::size_t i = 0; i < out_.params.size(); ++i) {
    Param& param = out_.params[i];
    if (param.kind == ParamKind::kTrainable) elems[param.dtype] += Elems(param.shape);
    // Tensor parallelism replicates some parameters, and their names end in "weight" or "bias".
    const bool whole = shards && !param.shape.empty() && param.shape[0] > 1 &&
                       At(model_[i]).chunks.size() == 1 && !param.name.ends_with("weight") &&
                       !param.name.ends_with("bias");
    const bool counts = param.dtype == DType::kI64 || param.dtype == DType::kBool;
    param.undecided =
        param.kind == ParamKind::kBuffer && !IsStatistic(param.name) && !whole && !counts;
  }
  const auto most = std::max_element(
      elems.begin(), elems.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != elems.end()) out_.layout.dtype = most->first;
  const Node* decoupled =
      out_.groups.empty() ? nullptr : out_.groups.front().options->Find("decoupled_weight_decay");
  if (decoupled != nullptr && decoupled->kind == pickle::Kind::kBool) {
    out_.optimizer = decoupled->integer != 0 ? "adamw" : "adam";
  }
  auto layout = std::make_shared<FolderLayout>();
  std::set<std::uint32_t> used;
  for (const Folder& folder : folders_) {
    if (folder.source.size() > used.size()) used = {folder.source.begin(), folder.source.end()};
  }
  layout->mesh.dp_shard = std::max<std::uint64_t>(1, used.size());
  layout->flavour = own_->flavour;
  layout->naming = own_->naming;
  out_.layout.mesh = layout->mesh;
  out_.layout.own = std::move(layout);
  out_.own = own_;
}

Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns) {
  return FolderReader(source, patterns, false).Run();
}

Result<Checkpoint> ReadWeights(const SourceSet& source, const Patterns& patterns) {
  SW_TRY_ASSIGN(Checkpoint read, FolderReader(source, patterns, true).Run());
  read.only_weights = OnlyWeights{};  // the files contain no weights except those of the model
  return read;
}

}  // namespace shardwright::checkpoints::dcp
