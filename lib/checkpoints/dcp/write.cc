// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "checkpoints/dcp/dcp.h"
#include "checkpoints/dcp/folder_internal.h"
#include "checkpoints/dcp/pieces_internal.h"
#include "checkpoints/pickled/document.h"
#include "checkpoints/pickled/hyper.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/shard_map.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dcp {
namespace {

namespace file_format = shardwright::dcp;
using layout::MeshSplit;
using pickle::Node;

/// Sharding of a tensor over the mesh of ranks.
struct Splits {
  std::vector<std::uint64_t> sizes;
  std::vector<MeshSplit> splits;
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
  Status AddTensorValue(file_format::Entry entry, const Scalar& scalar);
  Status AddTuple(file_format::Entry entry, const Group& group, const std::string& key,
                  const Node* value);
  Status AddOption(const Group& group, const std::string& key, const Node* value,
                   std::vector<PathStep> steps);
  Status AddGroups();
  Status AddExtras();
  Status AddExtra(const Extra& extra);
  Status AddTrainState();
  Result<std::uint32_t> AddTensor(FolderBuilder* folder, file_format::Entry entry,
                                  const Param& param, std::string_view state, DType dtype,
                                  std::optional<std::uint32_t> known);
  Status AddObject(FolderBuilder* folder, file_format::Entry entry, const Node* value);

  file_format::Entry SlotEntry(const std::string& param, const std::string& key) const;
  bool IsDropped(const Extra& extra) const;
  bool HasOptimizer() const { return !source_.groups.empty(); }
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
  bool masters_ = false;
  plan::TargetBuilder builder_;
  std::shared_ptr<ItemLayouts> layouts_ = std::make_shared<ItemLayouts>();
  std::vector<std::unique_ptr<FolderBuilder>> folders_;
  PieceCuts cuts_;
  std::map<std::pair<Shape, std::string>, std::vector<Share>> shares_;
  pickle::Arena arena_;
  std::set<std::string> left_options_;
  std::vector<std::string> left_;
  bool stepped_ = false;
};

void FolderWriter::OpenFolders() {
  const std::uint64_t count = layout_.files == 0 ? ranks_ : layout_.files;
  const Naming& naming = layout_.naming;
  const auto open = [&](const std::string& prefix) {
    folders_.push_back(std::make_unique<FolderBuilder>(&builder_, layouts_, prefix, count));
  };
  open(naming.pair ? naming.model_folder + "/" : "");
  if (naming.pair && HasOptimizer()) open(naming.optimizer_folder + "/");
}

/// Shards a parameter as FSDP2 and tensor parallelism do. Without a tensor-parallel rule
/// it is replicated over tp, which is correct because DCP loaders can read any box.
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
  splits.sizes = {mesh.dp_replicate, outer, inner};
  if (plain) {
    splits.splits.assign(3, MeshSplit::Replicate());
    return splits;
  }
  MeshSplit parallel = MeshSplit::Replicate();
  const layout::SplitRule& rule = param.rule;
  const bool cuts = rule.split == layout::Split::kDim || rule.split == layout::Split::kSub;
  if (experts) {
    parallel = MeshSplit::Shard(0);
  } else if (mesh.tp > 1 && cuts && rule.view.empty() && rule.dim < param.shape.size()) {
    parallel = MeshSplit::Shard(rule.dim);
  }
  const std::uint32_t dim = experts && outer > 1 && param.shape[1] % outer == 0 ? 1 : 0;
  const std::vector<std::uint64_t> inner_sizes = {inner};
  const std::vector<MeshSplit> inner_splits = {parallel};
  splits.splits = {MeshSplit::Replicate(), layout::FullyShard(dim, inner_sizes, inner_splits),
                   parallel};
  return splits;
}

Result<const std::vector<Share>*> FolderWriter::SharesOf(const Param& param) {
  const Splits splits = SplitsOf(param);
  auto key = std::pair(param.shape, layout::Explain(splits.splits));
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
  struct Held {
    const Param* param = nullptr;
    std::uint32_t tensor = 0;
  };
  std::unordered_map<std::string_view, Held> holders;  // parameters that have aliases
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) holders.try_emplace(param.alias_of);
  }
  const auto add = [&](const Param& param, const Param& holder,
                       std::optional<std::uint32_t> known) {
    const bool trained = holder.kind == ParamKind::kTrainable;
    const std::string_view state = holder.kind == ParamKind::kBuffer   ? layout::kBuffer
                                   : holder.kind == ParamKind::kFrozen ? layout::kFrozen
                                   : masters_                          ? layout::kMaster
                                                                       : layout::kWeight;
    const DType dtype = trained && masters_ ? DType::kF32 : holder.dtype;
    return AddTensor(model(), EntryOf(layout_.naming.model, {{param.name}}), holder, state, dtype,
                     known);
  };
  // Writes parameters with data before their aliases, independent of the model's order.
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(const std::uint32_t tensor, add(param, param, std::nullopt));
    const auto held = holders.find(param.name);
    if (held != holders.end()) held->second = {&param, tensor};
  }
  for (const Param& param : source_.params) {
    if (param.alias_of.empty()) continue;
    const Held& held = holders.at(param.alias_of);
    if (held.param == nullptr) {
      return Fail(Errc::kBadInput, Quoted(param.name), " is tied to ", Quoted(param.alias_of),
                  ", which is not there");
    }
    SW_TRY(add(param, *held.param, held.tensor));
  }
  return {};
}

file_format::Entry FolderWriter::SlotEntry(const std::string& param, const std::string& key) const {
  const Naming& naming = layout_.naming;
  const std::string& name = own_ == nullptr ? param : own_->OptimizerName(param);
  if (naming.flat) return EntryOf(naming.optimizer, {{"state." + name + "." + key}});
  return EntryOf(naming.optimizer, {{"state"}, {name}, {key}});
}

Status FolderWriter::AddScalar(const Param& param, const Scalar& scalar) {
  file_format::Entry entry = SlotEntry(param.name, scalar.state);
  if (!scalar.is_tensor) {
    return AddObject(optimizer(), std::move(entry),
                     scalar.value != nullptr ? scalar.value : arena_.None());
  }
  return AddTensorValue(std::move(entry), scalar);
}

/// Adds an optimizer tensor of one known element.
Status FolderWriter::AddTensorValue(file_format::Entry entry, const Scalar& scalar) {
  entry.is_tensor = true;
  entry.dtype = scalar.dtype;
  entry.shape = scalar.shape;
  SW_TRY(optimizer()->Begin(std::move(entry)));
  return optimizer()->AddInline(Next(), Shape(scalar.shape.size(), 0), scalar.shape, scalar.bytes);
}

Status FolderWriter::AddScalars(const Param& param) {
  bool counts = index_.Find(param.name, layout::kFirstMoment).has_value();
  for (const Scalar& scalar : param.scalars) {
    const bool step = scalar.state == layout::kStep;
    counts = counts || step;
    if (step && own_ == nullptr) continue;
    SW_TRY(AddScalar(param, scalar));
  }
  stepped_ = stepped_ || counts;
  if (own_ != nullptr || !counts) return {};
  SW_TRY_ASSIGN(const float steps, TorchStep(source_, param));
  Scalar step;
  step.state = layout::kStep;
  step.is_tensor = true;
  step.bytes.assign(reinterpret_cast<const char*>(&steps), sizeof steps);
  return AddScalar(param, step);
}

Status FolderWriter::AddStates(const Param& param) {
  for (const std::string& state : source_.states) {
    const auto found = index_.Find(param.name, state);
    if (!found) continue;
    SW_TRY(AddTensor(optimizer(), SlotEntry(param.name, state), param, state,
                     source_.map.tensors[*found].dtype, std::nullopt));
  }
  return AddScalars(param);
}

/// Writes a tuple that contains tensors as one item, like PyTorch.
Status FolderWriter::AddTuple(file_format::Entry entry, const Group& group, const std::string& key,
                              const Node* value) {
  Document document;
  std::vector<const Node*> items = value->items;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Scalar* tensor =
        FindTensor(group.tensors, Joined(std::vector<std::string>{key, std::to_string(i)}, "."));
    if (tensor == nullptr) continue;
    items[i] = document.AddInline(tensor->bytes, tensor->dtype, tensor->shape);
  }
  document.root = document.arena.Tuple(std::move(items));
  SW_TRY(optimizer()->Begin(std::move(entry)));
  return optimizer()->AddDocument(Next(), {}, {}, document);
}

/// Writes an option of a group. Like PyTorch, writes a list that contains tensors per item.
/// \param steps  the option's path below the optimizer
Status FolderWriter::AddOption(const Group& group, const std::string& key, const Node* value,
                               std::vector<PathStep> steps) {
  const auto add = [&](const Scalar* tensor, const Node* plain) -> Status {
    file_format::Entry entry = EntryOf(layout_.naming.optimizer, steps);
    if (tensor == nullptr) return AddObject(optimizer(), std::move(entry), plain);
    return AddTensorValue(std::move(entry), *tensor);
  };
  const Scalar* tensor = FindTensor(group.tensors, key);
  // Schedulers start from the current learning rate, in the form in which it is stored.
  const bool begins = key == "initial_lr" && FindIn(group.options, key) == nullptr;
  if (begins) tensor = FindTensor(group.tensors, "lr");
  const bool list = value->kind == pickle::Kind::kTuple || value->kind == pickle::Kind::kList;
  const bool parted =
      list && std::any_of(group.tensors.begin(), group.tensors.end(),
                          [&](const Scalar& one) { return one.state.starts_with(key + "."); });
  if (!parted) return add(tensor, value);
  if (value->kind == pickle::Kind::kTuple) {
    return AddTuple(EntryOf(layout_.naming.optimizer, steps), group, key, value);
  }
  for (std::size_t i = 0; i < value->items.size(); ++i) {
    const std::string number = std::to_string(i);
    steps.push_back({number, true});
    SW_TRY(add(FindTensor(group.tensors, Joined(std::vector<std::string>{key, number}, ".")),
               value->items[i]));
    steps.pop_back();
  }
  return {};
}

Status FolderWriter::AddGroups() {
  const Naming& naming = layout_.naming;
  for (std::size_t g = 0; g < source_.groups.size(); ++g) {
    const Group& group = source_.groups[g];
    const Node* options = own_ != nullptr && group.options != nullptr
                              ? group.options
                              : TorchOptions(source_, group, &arena_, &left_options_);
    std::vector<std::string> names;
    if (own_ != nullptr) {
      names = own_->groups[g];
    } else {
      for (const std::uint32_t i : group.params) names.push_back(source_.params[i].name);
      for (const Param& param : source_.fused) {
        if (param.group == static_cast<std::int32_t>(g)) names.push_back(param.name);
      }
    }
    for (std::size_t k = 0; k < options->entry_count(); ++k) {
      const std::string& key = options->key(k)->text;
      if (!naming.flat) {
        SW_TRY(AddOption(group, key, options->value(k),
                         {{"param_groups"}, {std::to_string(g), true}, {key}}));
        continue;
      }
      for (const std::string& name : names) {
        SW_TRY(AddOption(
            group, key, options->value(k),
            {{Joined(std::vector<std::string>{"param_groups", name, std::string(key)}, ".")}}));
      }
    }
    if (naming.flat) continue;
    std::vector<const Node*> list;
    list.reserve(names.size());
    for (const std::string& name : names) list.push_back(arena_.String(name));
    SW_TRY(AddObject(
        optimizer(),
        EntryOf(naming.optimizer, {{"param_groups"}, {std::to_string(g), true}, {"params"}}),
        arena_.List(std::move(list))));
  }
  return {};
}

Status FolderWriter::AddOptimizer() {
  if (!HasOptimizer()) return {};
  for (const Param& param : source_.params) {
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    SW_TRY(AddStates(param));
  }
  for (const Param& param : source_.fused) SW_TRY(AddStates(param));
  return AddGroups();
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
    Leave("the data loader's state, which is of another number of data-parallel ranks: " +
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
    Leave("train_state: the source does not tell the iteration");
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
    Leave("options of the optimizer that PyTorch's do not have: " +
          FirstFew({left_options_.begin(), left_options_.end()}));
  }
  if (own_ != nullptr) return;
  bool rounded = false;
  bool experts = false;
  std::vector<std::string> frozen;
  std::vector<std::string> tied;
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) continue;
    rounded =
        rounded || (masters_ && param.kind == ParamKind::kTrainable && param.dtype != DType::kF32);
    experts = experts || param.expert.has_value();
  }
  if (rounded) {
    Leave("the type of the compute weights, " + std::string(Name(source_.layout.dtype)) +
          ": the model's tensors are the masters, and trainers round them as they are told");
  }
  if (source_.iteration && !stepped_ && layout_.flavour != Flavour::kTorchtitan) {
    Leave("the iteration, " + std::to_string(*source_.iteration));
  }
  if (source_.consumed_samples) {
    Leave("the number of samples, " + std::to_string(*source_.consumed_samples));
  }
  if (!frozen.empty()) Leave("that parameters are frozen and no buffers: " + FirstFew(frozen));
  if (!tied.empty()) Leave("that names are tied, each of which has the data: " + FirstFew(tied));
  if (experts) Leave("which parameters are those of experts");
  if (source_.own == nullptr) return;
  for (std::string& one : source_.own->Contents()) Leave(std::move(one));
}

Result<Written> FolderWriter::Run() {
  masters_ =
      std::any_of(source_.map.tensors.begin(), source_.map.tensors.end(),
                  [](const layout::LogicalTensor& one) { return one.state == layout::kMaster; });
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

}  // namespace

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const auto* own = dynamic_cast<const FolderLayout*>(layout.own.get());
  SW_CHECK(own != nullptr);
  return FolderWriter(source, *own).Run();
}

}  // namespace shardwright::checkpoints::dcp
