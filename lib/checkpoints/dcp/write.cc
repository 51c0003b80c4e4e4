// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "checkpoints/dcp/write_internal.h"
#include "checkpoints/pickled/document.h"
#include "checkpoints/pickled/wrappers.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/mesh_rule.h"
#include "engine/layout/shard_map.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {

namespace file_format = shardwright::dcp;
using layout::MeshSplit;
using pickle::Node;

file_format::Entry EntryOf(const std::vector<std::string>& above,
                           const std::vector<PathStep>& parts) {
  file_format::Entry entry;
  const auto add = [&](const std::string& text, bool is_index) {
    if (!entry.path.empty()) entry.name += '.';
    entry.name += text;
    entry.path.push_back({static_cast<std::uint32_t>(entry.name.size()), is_index});
  };
  for (const std::string& text : above) add(text, false);
  for (const PathStep& part : parts) add(part.text, part.is_index);
  if (entry.path.size() == 1) entry.path.clear();
  return entry;
}

void FolderWriter::OpenFolders() {
  const std::uint64_t count = layout_.files == 0 ? ranks_ : layout_.files;
  const Naming& naming = layout_.naming;
  const auto open = [&](const std::string& prefix) {
    folders_.push_back(std::make_unique<FolderBuilder>(&builder_, layouts_, prefix, count));
  };
  open(naming.pair ? naming.model_folder + "/" : "");
  if (naming.pair && HasOptimizer()) open(naming.optimizer_folder + "/");
}

namespace {

/// Returns the placement of a rule for one axis. The sub-tensors of a stack count as one box,
/// because DCP loaders can read any box.
MeshSplit PlacementOf(const layout::SplitRule& rule, const Param& param) {
  const bool cuts = rule.split == layout::Split::kDim || rule.split == layout::Split::kSub;
  return cuts && rule.view.empty() && rule.dim < param.shape.size() ? MeshSplit::Shard(rule.dim)
                                                                    : MeshSplit::Replicate();
}

}  // namespace

/// Shards a parameter as FSDP2 and tensor parallelism do. Without a tensor-parallel rule, and if
/// the ranks do not form the mesh of the rule, it is replicated over tp. This is correct because
/// DCP loaders can read any box.
Splits FolderWriter::SplitsOf(const Param& param) const {
  const Mesh& mesh = layout_.mesh;
  Splits splits;
  const bool plain = param.kind == ParamKind::kBuffer || param.shape.empty();
  const bool experts = mesh.ep > 1 && param.shape.size() >= 3 &&
                       param.name.find("expert") != std::string::npos &&
                       param.shape[0] % mesh.ep == 0;
  const std::uint64_t inner = experts ? mesh.ep : mesh.tp;
  // An expert is not sharded by tensor parallelism; all tp ranks take part in sharding the stack.
  const std::uint64_t outer = experts ? mesh.dp_shard * mesh.tp / mesh.ep : mesh.dp_shard;
  splits.sizes = {mesh.dp_replicate, outer};
  if (plain) {
    splits.sizes.push_back(inner);
    splits.splits.assign(3, MeshSplit::Replicate());
    return splits;
  }
  std::vector<std::uint64_t> inner_sizes = {inner};
  std::vector<MeshSplit> inner_splits = {MeshSplit::Replicate()};
  const layout::SplitRule& rule = param.rule;
  if (experts) {
    inner_splits = {MeshSplit::Shard(0)};
  } else if (mesh.tp > 1 && rule.split == layout::Split::kMesh) {
    if (auto sizes = layout::MeshSizes(rule, mesh.tp)) {
      inner_sizes = *std::move(sizes);
      inner_splits.clear();
      for (const layout::SplitRule& axis : rule.axes) {
        inner_splits.push_back(PlacementOf(axis, param));
      }
    }
  } else if (mesh.tp > 1) {
    inner_splits = {PlacementOf(rule, param)};
  }
  const std::uint32_t dim = experts && outer > 1 && param.shape[1] % outer == 0 ? 1 : 0;
  splits.splits = {MeshSplit::Replicate(), layout::FullyShard(dim, inner_sizes, inner_splits)};
  splits.sizes.insert(splits.sizes.end(), inner_sizes.begin(), inner_sizes.end());
  splits.splits.insert(splits.splits.end(), inner_splits.begin(), inner_splits.end());
  return splits;
}

Result<const std::vector<Share>*> FolderWriter::SharesOf(const Param& param) {
  const Splits splits = SplitsOf(param);
  auto key = std::tuple(param.shape, Shape(splits.sizes), layout::Explain(splits.splits));
  const auto known = shares_.find(key);
  if (known != shares_.end()) return &known->second;
  std::vector<Share> shares;
  std::map<std::pair<std::vector<std::uint64_t>, Shape>, std::size_t> by_box;
  SW_TRY_ASSIGN(const auto order, layout::OrderOf(splits.sizes, splits.splits));
  for (std::uint64_t rank = 0; rank < ranks_; ++rank) {
    const auto coordinate = layout::CoordinateOf(splits.sizes, rank);
    SW_TRY_ASSIGN(layout::Piece piece,
                  layout::PieceAt(param.shape, splits.sizes, order, coordinate));
    if (piece.empty()) continue;
    const auto [at, fresh] = by_box.emplace(std::pair(piece.offset, piece.sizes), shares.size());
    if (fresh) {
      Share share;
      SW_TRY_ASSIGN(share.cut, cuts_.Of(param.shape, piece));
      share.piece = std::move(piece);
      shares.push_back(std::move(share));
    }
    shares[at->second].ranks.push_back(rank);
  }
  return &shares_.emplace(std::move(key), std::move(shares)).first->second;
}

/// Chooses the writer of replicated data: the rank with the fewest bytes so far.
std::uint64_t FolderWriter::Choose(const std::vector<std::uint64_t>& ranks, std::uint64_t bytes) {
  const auto least =
      std::min_element(ranks.begin(), ranks.end(),
                       [&](std::uint64_t a, std::uint64_t b) { return loads_[a] < loads_[b]; });
  loads_[*least] += bytes;
  return FileOf(*least);
}

/// \param known  the target's tensor to which this entry adds a name (tied parameters)
/// \returns the number of the tensor
Result<std::uint32_t> FolderWriter::AddTensor(FolderBuilder* folder, file_format::Entry entry,
                                              const Param& param, std::string_view state,
                                              DType dtype, std::optional<std::uint32_t> known) {
  SW_TRY_ASSIGN(const std::vector<Share>* shares, SharesOf(param));
  entry.is_tensor = true;
  entry.dtype = dtype;
  entry.shape = param.shape;
  SW_TRY(folder->Begin(std::move(entry)));
  const std::uint32_t tensor =
      known ? *known : builder_.AddTensor(param.name, state, dtype, param.shape);
  for (const Share& share : *shares) {
    const std::uint64_t bytes = Elems(share.piece.sizes) * ItemSize(dtype);
    const std::uint32_t array = builder_.AddArray(dtype, 1);
    SW_TRY(folder->AddElements(Choose(share.ranks, bytes), share.piece.offset, share.piece.sizes,
                               array));
    layout::Fragment fragment;
    fragment.cut = share.cut;
    fragment.at.array = array;
    fragment.role = known ? layout::Role::kReplica : layout::Role::kOwner;
    builder_.AddFragment(tensor, std::move(fragment));
  }
  return tensor;
}

Status FolderWriter::AddObject(FolderBuilder* folder, file_format::Entry entry, const Node* value) {
  SW_TRY(folder->Begin(std::move(entry)));
  return folder->AddValue(Next(), value);
}

Status FolderWriter::AddModel() {
  struct Owner {
    const Param* param = nullptr;
    std::uint32_t tensor = 0;
  };
  std::unordered_map<std::string_view, Owner> owners;  // parameters that have aliases
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) owners.try_emplace(param.alias_of);
  }
  const auto add = [&](const Param& param, const Param& holder,
                       std::optional<std::uint32_t> known) {
    const bool trained = holder.kind == ParamKind::kTrainable;
    const bool master = trained && masters_.contains(holder.name);
    const std::string_view state = holder.kind == ParamKind::kBuffer   ? layout::kBuffer
                                   : holder.kind == ParamKind::kFrozen ? layout::kFrozen
                                   : master                            ? layout::kMaster
                                                                       : layout::kWeight;
    const DType dtype = master ? DType::kF32 : holder.dtype;
    const std::string name = layout_.naming.peft ? PeftName(param.name) : param.name;
    return AddTensor(model(), EntryOf(layout_.naming.model, {{name}}), holder, state, dtype, known);
  };
  // Writes parameters with data before their aliases, independent of the model's order.
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(const std::uint32_t tensor, add(param, param, std::nullopt));
    const auto held = owners.find(param.name);
    if (held != owners.end()) held->second = {&param, tensor};
  }
  for (const Param& param : source_.params) {
    if (param.alias_of.empty()) continue;
    const Owner& held = owners.at(param.alias_of);
    if (held.param == nullptr) {
      return Fail(Errc::kBadInput, Quoted(param.name), " is tied to ", Quoted(param.alias_of),
                  ", which is missing");
    }
    SW_TRY(add(param, *held.param, held.tensor));
  }
  return {};
}

/// Drops dataloader state if the number of data-parallel ranks changes: loaders need other items.
bool FolderWriter::IsDropped(const Extra& extra) const {
  if (extra.entry.part(0) != "dataloader") return false;
  const auto ranks = std::count_if(own_->extras.begin(), own_->extras.end(), [](const Extra& one) {
    return one.entry.part(0) == "dataloader" && one.entry.part_count() > 1 &&
           one.entry.part(1).starts_with("dp_rank_");
  });
  return static_cast<std::uint64_t>(ranks) != layout_.mesh.dp();
}

Status FolderWriter::AddExtra(const Extra& extra) {
  FolderBuilder* folder = extra.with_optimizer ? optimizer() : model();
  file_format::Entry entry = extra.entry;
  entry.chunks.clear();
  SW_TRY(folder->Begin(std::move(entry)));
  for (std::size_t c = 0; c < extra.values.size(); ++c) {
    if (extra.entry.is_tensor && extra.entry.chunks[c].is_empty()) continue;
    const Extra::Value& value = extra.values[c];
    if (extra.raw) {
      folder->AddRaw(Next(), value.members.front(), value.document.storages.front().bytes);
      continue;
    }
    Document document;
    Graft graft(document, value.document, value.members);
    auto taken = graft.Take(value.document.root);
    if (!taken) return Within(extra.entry.name, taken.error());
    document.root = *taken;
    if (!extra.entry.is_tensor && document.storages.empty()) {
      SW_TRY(folder->AddValue(Next(), value.document.root));
      continue;
    }
    const bool tensor = extra.entry.is_tensor;
    SW_TRY(folder->AddDocument(Next(), tensor ? extra.entry.chunks[c].offsets : Shape(),
                               tensor ? extra.entry.chunks[c].sizes : Shape(), document));
  }
  return {};
}

Status FolderWriter::AddExtras() {
  if (own_ == nullptr) return {};
  std::vector<std::string> dropped;
  for (const Extra& extra : own_->extras) {
    if (IsDropped(extra)) {
      dropped.push_back(extra.entry.name);
      continue;
    }
    SW_TRY(AddExtra(extra));
  }
  if (!dropped.empty()) {
    Leave(
        "the data loader's state, which was saved for a different number of data-parallel ranks: " +
        FirstFew(dropped));
  }
  return {};
}

/// Writes the entries that torchtitan requires in addition to model and optimizer.
Status FolderWriter::AddTrainState() {
  if (layout_.flavour != Flavour::kTorchtitan) return {};
  const bool has = own_ != nullptr &&
                   std::any_of(own_->extras.begin(), own_->extras.end(), [](const Extra& extra) {
                     return extra.entry.part(0) == "train_state";
                   });
  if (has) return {};
  if (!source_.iteration) {
    Leave("train_state: the source does not record the iteration");
    return {};
  }
  const Node* steps = arena_.Int(static_cast<std::int64_t>(*source_.iteration));
  SW_TRY(AddObject(model(), EntryOf({}, {{"train_state"}, {"step"}}), steps));
  SW_TRY(AddObject(model(), EntryOf({}, {{"train_state"}, {"ntokens_seen"}}), arena_.Int(0)));
  const bool scheduled =
      own_ != nullptr && std::any_of(own_->extras.begin(), own_->extras.end(), [](const auto& one) {
        return one.entry.name == "lr_scheduler.last_epoch";
      });
  if (scheduled) return {};
  return AddObject(model(), EntryOf({}, {{"lr_scheduler"}, {"last_epoch"}}), steps);
}

void FolderWriter::TellWhatIsLeft() {
  if (!left_options_.empty()) {
    Leave("optimizer options that PyTorch does not have: " +
          FirstFew({left_options_.begin(), left_options_.end()}));
  }
  if (own_ != nullptr) return;
  bool rounded = false;
  bool experts = false;
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) continue;
    rounded = rounded || (masters_.contains(param.name) && param.dtype != DType::kF32);
    experts = experts || param.expert.has_value();
  }
  if (rounded) {
    Leave("the type of the compute weights, " + std::string(Name(source_.layout.dtype)) +
          ": the model's tensors are the master weights, and trainers round them to the type that "
          "they are configured for");
  }
  if (source_.iteration && !stepped_ && layout_.flavour != Flavour::kTorchtitan) {
    Leave(StrCat("the iteration, ", *source_.iteration));
  }
  if (source_.consumed_samples) {
    Leave(StrCat("the number of samples, ", *source_.consumed_samples));
  }
  if (experts) Leave("the distinction of expert parameters from others");
  if (source_.own == nullptr) return;
  for (std::string& one : source_.own->Contents()) Leave(std::move(one));
}

Result<Written> FolderWriter::Run() {
  for (const layout::LogicalTensor& one : source_.map.tensors) {
    if (one.state == layout::kMaster) masters_.insert(one.name);
  }
  OpenFolders();
  SW_TRY(AddModel());
  SW_TRY(AddOptimizer());
  SW_TRY(AddExtras());
  SW_TRY(AddTrainState());
  for (const auto& folder : folders_) SW_TRY(folder->Finish());
  TellWhatIsLeft();
  Written written;
  written.target = std::move(builder_).Take();
  written.not_carried = std::move(left_);
  return written;
}

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const auto* own = dynamic_cast<const FolderLayout*>(layout.own.get());
  SW_CHECK(own != nullptr);
  return FolderWriter(source, *own).Run();
}

}  // namespace shardwright::checkpoints::dcp
