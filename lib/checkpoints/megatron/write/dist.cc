// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <set>

#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/integrity.h"
#include "checkpoints/megatron/keys.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/rules.h"
#include "checkpoints/megatron/stages.h"
#include "checkpoints/megatron/write/items.h"
#include "checkpoints/megatron/write/shards.h"
#include "checkpoints/megatron/write/write_internal.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

/// Number of layers, and of experts in each, that a key represents.
struct Stack {
  std::uint64_t layers = 1;
  std::uint64_t experts = 1;
};

class DistWriter {
 public:
  DistWriter(const Checkpoint& source, const MegatronLayout& to)
      : writing_(source, to),
        source_(source),
        to_(to),
        args_(writing_.args),
        builder_(writing_.builder),
        items_(writing_.items) {}

  Result<Written> Run();

 private:
  /// A box of a tensor that becomes an item.
  struct Box {
    std::uint32_t param = 0;
    std::size_t entry = 0;  // in the index
    std::string state;
    DType dtype = DType::kF32;
    Shape offsets;
    Shape sizes;
    Rank rank;
    bool again = false;  // another key has the same elements

    std::uint64_t bytes() const { return Elems(sizes) * ItemSize(dtype); }
  };

  /// A parameter in a gradient bucket, or a gap before it. Becomes an item.
  struct Piece {
    std::size_t entry = 0;  // in the index
    std::optional<std::uint32_t> array;
    std::uint64_t first = 0;
    std::uint64_t elems = 0;
    Rank rank;
  };

  Status Prepare();
  Status AddParam(std::uint32_t index);
  Status AddState(std::uint32_t index, const std::string& text, std::string_view state, DType dtype,
                  bool again);
  Status AddBoxes();
  Status AddBox(const Box& what);
  Status AddBuffers();
  Status AddBuffersOf(Shards* shards, BucketKey key, const Rank& rank);
  Status AddState(Shards* shards, BucketKey key, const StateBuffer& one, const std::string& state,
                  const Rank& rank);
  Status AddGroupObjects(BucketKey key, const std::vector<StateBuffer>& buffers, const Rank& rank);
  Status AddPieces();
  Status AddExtraStates();
  Status AddRandomStates();
  Status AddObject(const std::string& key, const Document& document, Rank rank);
  Status AddCommon();
  void AddIntegrity();
  Status AddIndex();

  std::uint64_t NumberOf(const Rank& rank) const;
  std::uint32_t FileOf(const Rank& rank);
  std::uint32_t FileNumber(const Rank& rank) const { return file_numbers_.at(NumberOf(rank)); }
  Result<Rank> RankOf(const ParamName& name) const;
  std::size_t EntryOf(const std::string& key, DType dtype, const Shape& shape);
  std::string PathOf(std::string_view name) const { return writing_.tag + "/" + std::string(name); }

  Writing writing_;
  const Checkpoint& source_;
  const MegatronLayout& to_;
  const Args& args_;
  plan::TargetBuilder& builder_;
  Items& items_;
  std::vector<Box> boxes_;
  std::vector<Piece> pieces_;
  std::optional<double> step_;
  std::vector<Stage> stages_;
  std::map<std::string, std::uint64_t> layers_;  // by stack
  std::map<std::string, Stack> stacks_;          // by key
  dcp::Index index_;
  std::map<std::string, std::size_t> entries_;
  std::map<std::uint64_t, std::uint32_t> files_;         // by rank: items' file
  std::map<std::uint64_t, std::uint32_t> file_numbers_;  // by rank: in the index
  Written out_;
};

std::uint64_t DistWriter::NumberOf(const Rank& rank) const {
  return (rank.p * to_.mesh.ep + rank.e) * std::max(to_.mesh.tp, to_.etp) + rank.t;
}

std::uint32_t DistWriter::FileOf(const Rank& rank) {
  const std::uint64_t number = NumberOf(rank);
  const auto [at, fresh] = files_.try_emplace(number, 0);
  if (fresh) {
    const std::string name = "__" + std::to_string(number) + "_0.distcp";
    at->second = items_.AddFile(PathOf(name));
    file_numbers_[number] = index_.FileNumber(name);
  }
  return at->second;
}

/// Returns the stage and the expert rank that have a parameter.
Result<Rank> DistWriter::RankOf(const ParamName& name) const {
  Rank rank;
  if (name.layer) {
    for (std::uint64_t chunk = 0; chunk < stages_.size(); ++chunk) {
      const Stage& stage = stages_[chunk];
      if (*name.layer >= stage.begin && *name.layer < stage.begin + stage.count) {
        rank.p = chunk % to_.mesh.pp;
      }
    }
  } else if (!name.rest.starts_with("embedding.")) {
    rank.p = to_.mesh.pp - 1;
  }
  if (name.expert) {
    rank.e = *name.expert / std::max<std::uint64_t>(args_.experts / to_.mesh.ep, 1);
  }
  return rank;
}

Status DistWriter::Prepare() {
  if (args_.layers > 0) {
    SW_TRY_ASSIGN(stages_, StagesOf(args_));
  } else {
    stages_.resize(args_.pp * args_.vpp);
  }
  for (const Param& param : source_.params) {
    const ParamName name = ParseName(param.name);
    if (name.layer) layers_[name.stack] = std::max(layers_[name.stack], *name.layer + 1);
  }
  for (const Param& param : source_.params) {
    if (!param.alias_of.empty()) continue;
    const Key key = KeyOf(param.name, args_);
    Stack stack;
    if (key.layers) stack.layers = layers_.at(key.name.stack);
    if (key.experts) stack.experts = args_.experts;
    stacks_.emplace(KeyText(key), stack);
  }
  return {};
}

std::size_t DistWriter::EntryOf(const std::string& key, DType dtype, const Shape& shape) {
  const auto [at, fresh] = entries_.try_emplace(key, index_.entries.size());
  if (fresh) {
    dcp::Entry entry;
    entry.name = key;
    entry.is_tensor = true;
    entry.dtype = dtype;
    entry.shape = shape;
    index_.entries.push_back(std::move(entry));
  }
  return at->second;
}

Status DistWriter::AddParam(std::uint32_t index) {
  const Param& param = source_.params[index];
  if (!param.alias_of.empty()) return {};
  const Key key = KeyOf(param.name, args_);
  const std::string text = KeyText(key);
  if (param.kind != ParamKind::kTrainable) {
    const bool buffer = param.kind == ParamKind::kBuffer;
    return AddState(index, text, buffer ? layout::kBuffer : layout::kFrozen, param.dtype, false);
  }
  const bool full = param.dtype == DType::kF32;
  SW_TRY(AddState(index, text, full && writing_.has_optimizer ? layout::kMaster : layout::kWeight,
                  param.dtype, false));
  if (!writing_.has_optimizer || to_.optimizer == OptimizerForm::kDpReshardable) return {};
  const bool distributed = to_.optimizer != OptimizerForm::kNone;
  const std::string start = "optimizer.state.";
  if (!full || distributed) {
    SW_TRY(AddState(index, start + (distributed ? "param." : "fp32_param.") + text, layout::kMaster,
                    DType::kF32, full));
  }
  for (const std::string& state : source_.states) {
    const layout::LogicalTensor* tensor = writing_.SourceTensor(param.name, state);
    if (tensor == nullptr) continue;
    SW_TRY(AddState(index, Joined(std::vector<std::string>{start + state, text}, "."), state,
                    tensor->dtype, false));
  }
  return {};
}

/// \param again  as Box::again
Status DistWriter::AddState(std::uint32_t index, const std::string& text, std::string_view state,
                            DType dtype, bool again) {
  const Param& param = source_.params[index];
  const ParamName name = ParseName(param.name);
  const Key key = KeyOf(param.name, args_);
  const Stack& stack = stacks_.at(KeyText(key));
  const Whole whole = writing_.WholeFor(param);
  Param ruled = param;
  ruled.rule = whole.rule;
  Shape shape;
  Shape at;
  if (key.layers) shape.push_back(stack.layers);
  if (key.layers) at.push_back(*name.layer);
  if (key.experts) shape.push_back(stack.experts);
  if (key.experts) at.push_back(*name.expert);
  shape.insert(shape.end(), whole.shape.begin(), whole.shape.end());
  if (whole.rule.padded) {
    shape.back() = whole.shape.back();
    shape[at.size()] = whole.shape[0] + whole.padding;
    writing_.vocab_rows = shape[at.size()];
  }
  const std::size_t number = EntryOf(text, dtype, shape);
  const dcp::Entry* entry = &index_.entries[number];
  if (entry->shape != shape || entry->dtype != dtype) {
    return Fail(Errc::kUnsupported, "\"", param.name, "\": ", Name(dtype), " ", ToString(shape),
                ", another layer has ", Name(entry->dtype), " ", ToString(entry->shape));
  }
  SW_TRY_ASSIGN(Rank rank, RankOf(name));
  const bool whole_one = whole.rule.split == layout::Split::kReplicated;
  const std::uint64_t ranks = name.expert ? to_.etp : to_.mesh.tp;
  for (rank.t = 0; rank.t < (whole_one ? 1 : ranks); ++rank.t) {
    if (whole.rule.padded) {
      if (shape[0] % ranks != 0) {
        return Fail(Errc::kUnsupported, "\"", param.name, "\": ", shape[0],
                    " rows do not divide by tp=", ranks);
      }
      Shape offsets(shape.size(), 0);
      Shape sizes = shape;
      sizes[0] = shape[0] / ranks;
      offsets[0] = rank.t * sizes[0];
      boxes_.push_back({index, number, std::string(state), dtype, offsets, sizes, rank, again});
      continue;
    }
    auto cut = CutOf(ruled, whole_one ? 1 : ranks, rank.t);
    if (!cut) return tl::unexpected<Error>(cut.error());
    if (cut->view() != whole.shape) {
      return Fail(
          Errc::kUnsupported,
          "\"" + param.name + "\": cut in a way that Megatron does not know: " + cut->Explain());
    }
    for (const layout::Box& box : cut->boxes()) {
      Shape offsets = at;
      Shape sizes(at.size(), 1);
      offsets.insert(offsets.end(), box.at_view.begin(), box.at_view.end());
      sizes.insert(sizes.end(), box.sizes.begin(), box.sizes.end());
      boxes_.push_back({index, number, std::string(state), dtype, offsets, sizes, rank, again});
    }
  }
  return {};
}

/// Writes small items first, as torch does.
Status DistWriter::AddBoxes() {
  std::stable_sort(boxes_.begin(), boxes_.end(),
                   [](const Box& a, const Box& b) { return a.bytes() < b.bytes(); });
  for (const Box& box : boxes_) SW_TRY(AddBox(box));
  return {};
}

/// Adds one item: a box of the key's tensor.
Status DistWriter::AddBox(const Box& what) {
  const auto& [index, number, state, dtype, offsets, sizes, rank, again] = what;
  const Param& param = source_.params[index];
  if (Elems(sizes) == 0) return {};
  dcp::Entry* entry = &index_.entries[number];
  const std::size_t axes = sizes.size() - param.shape.size();
  const std::uint32_t file = FileOf(rank);
  const std::uint32_t array = builder_.AddArray(dtype, 1);
  SW_TRY_ASSIGN(dcp::Place place, items_.AddTensor(file, dtype, sizes, array, entry->name));
  place.file = FileNumber(rank);
  entry->chunks.push_back({offsets, sizes, place});

  const auto first = static_cast<std::ptrdiff_t>(axes);
  const Shape at(what.offsets.begin() + first, what.offsets.end());
  const Shape box(what.sizes.begin() + first, what.sizes.end());
  const auto add = [&](bool padding, const Shape& shape, std::uint64_t skip,
                       std::uint64_t count) -> Status {
    if (count == 0) return {};
    layout::Box one{at, Shape(box.size(), 0), box};
    if (!box.empty()) {
      one.at_view[0] = at[0] + skip - (padding ? param.shape[0] : 0);
      one.sizes[0] = count;
    }
    Shape shard = one.sizes;
    SW_TRY_ASSIGN(layout::Cut cut, layout::Cut::Make(shape, std::move(shard), {std::move(one)}));
    layout::Fragment fragment;
    fragment.cut = std::make_shared<const layout::Cut>(std::move(cut));
    fragment.at.array = array;
    Shape before = box;
    if (!before.empty()) before[0] = skip;
    fragment.at.vector_offset = before.empty() ? 0 : Elems(before);
    fragment.role = what.again ? layout::Role::kReplica : layout::Role::kOwner;
    builder_.AddFragment(writing_.TensorOf(param.name, padding, what.state, what.dtype, shape),
                         std::move(fragment));
    return {};
  };
  if (box.empty()) return add(false, param.shape, 0, 1);
  const std::uint64_t real = at[0] >= param.shape[0] ? 0 : std::min(box[0], param.shape[0] - at[0]);
  SW_TRY(add(false, param.shape, 0, real));
  if (real == box[0]) return {};
  Shape padding = param.shape;
  padding[0] = entry->shape[axes] - param.shape[0];
  if (!writing_.KeepsPadding(param, what.state, padding)) return {};
  return add(true, padding, real, box[0] - real);
}

/// Adds the optimizer state in gradient buffers.
Status DistWriter::AddBuffers() {
  if (!writing_.has_optimizer || to_.optimizer != OptimizerForm::kDpReshardable) return {};
  SW_TRY(CheckBuffers(writing_));
  SW_TRY_ASSIGN(step_, StepOf(source_));
  Shards shards(writing_, stages_, ModelOrder(source_.params));
  BucketKey key;
  key.chained = shards.chained();
  for (key.part = 0; key.part < (key.chained ? 2U : 1U); ++key.part) {
    key.group = 0;
    for (const Rank& rank : BufferRanks(args_, key.part == 1)) {
      SW_TRY(AddBuffersOf(&shards, key, rank));
      ++key.group;
    }
  }
  return {};
}

Status DistWriter::AddBuffersOf(Shards* shards, BucketKey key, const Rank& rank) {
  std::vector<std::vector<Mine>> chunks;
  for (std::uint64_t chunk = 0; chunk < to_.vpp; ++chunk) {
    SW_TRY_ASSIGN(std::vector<Mine> mine, shards->MineOf(rank, chunk));
    chunks.push_back(std::move(mine));
  }
  const std::string where = "dp_reshardable: stage " + std::to_string(rank.p);
  auto buffers = shards->BuffersOf(rank, chunks, key.part == 1);
  if (!buffers) return Within(where, buffers.error());
  if (buffers->empty()) {
    return Fail(Errc::kUnsupported, where, " has no ", (key.part == 1 ? "experts" : "parameters"),
                ", so it has fewer optimizers than the others, which "
                "Megatron-Core cannot load");
  }
  SW_TRY(AddGroupObjects(key, *buffers, rank));
  for (const StateBuffer& one : *buffers) {
    key.dtypes = "(torch." + std::string(Name(one.dtype)) + ", torch." +
                 std::string(Name(one.gradient)) + ")";
    for (const std::string& state : one.states) {
      key.slot = SlotOf(state);
      SW_TRY(AddState(shards, key, one, state, rank));
    }
    ++key.buffer;
  }
  return {};
}

/// Adds one state of all parameters in a buffer. Each item is one parameter or gap,
/// so that data-parallel ranks read little more than they need, whatever their number.
Status DistWriter::AddState(Shards* shards, BucketKey key, const StateBuffer& one,
                            const std::string& state, const Rank& rank) {
  std::uint64_t at = 0;
  for (std::size_t i = one.mine.size(); i-- > 0;) {
    if (one.buffer.bucket_of[i] != key.bucket) at = 0;
    key.bucket = one.buffer.bucket_of[i];
    const std::uint64_t elems = Elems(one.mine[i].shape);
    const std::uint64_t first = one.buffer.offsets[i];
    const std::size_t entry =
        EntryOf(BucketKeyText(key), DType::kF32, {one.buffer.unpadded[key.bucket]});
    if (first > at) pieces_.push_back({entry, std::nullopt, at, first - at, rank});
    at = first + elems;
    if (elems > 0) {
      const std::uint32_t array = builder_.AddArray(DType::kF32, 1);
      SW_TRY(shards->AddShard(rank, one.mine[i], state, DType::kF32, array, 0));
      pieces_.push_back({entry, array, first, elems, rank});
    }
    // A gap before an embedding that two stages share ends the bucket.
    const bool ends = i == 0 || one.buffer.bucket_of[i - 1] != key.bucket;
    const std::uint64_t all = one.buffer.unpadded[key.bucket];
    if (ends && at < all) pieces_.push_back({entry, std::nullopt, at, all - at, rank});
  }
  return {};
}

/// Adds the objects of every rank's buffers: sizes of buckets, groups.
Status DistWriter::AddGroupObjects(BucketKey key, const std::vector<StateBuffer>& buffers,
                                   const Rank& rank) {
  const auto add = [&](const char* slot, Document document, const Node* value) -> Status {
    document.root = document.arena.List({value});
    key.slot = slot;
    return AddObject(ObjectKeyText(BucketKeyText(key), {0}, {1}), document, rank);
  };
  for (const bool padded : {true, false}) {
    Document document;
    pickle::Arena& arena = document.arena;
    std::vector<const Node*> all;
    for (const StateBuffer& one : buffers) {
      std::vector<const Node*> counts;
      for (const std::uint64_t count : padded ? one.buffer.padded : one.buffer.unpadded) {
        counts.push_back(arena.Int(static_cast<std::int64_t>(count)));
      }
      Node* sizes = arena.Dict();
      sizes->items = {TypesNode(arena, one), arena.List(std::move(counts))};
      all.push_back(sizes);
    }
    const Node* list = arena.List(std::move(all));
    SW_TRY(
        add(padded ? "per_bucket_numel" : "per_bucket_numel_unpadded", std::move(document), list));
  }
  Document document;
  std::vector<const Node*> groups;
  for (const TargetGroup& group :
       GroupsOf(document.arena, source_, key.chained, key.part == 1, step_)) {
    groups.push_back(group.options);
  }
  Node* optimizer = document.arena.Dict();
  Set(document.arena, optimizer, "param_groups", document.arena.List(std::move(groups)));
  SW_TRY(add("optimizer", std::move(document), optimizer));
  Document scaled;
  SW_TRY_ASSIGN(const Node* scaler, ScalerNode(&scaled, source_, key.part == 1));
  return scaler == nullptr ? Status() : add("grad_scaler", std::move(scaled), scaler);
}

Status DistWriter::AddPieces() {
  for (const Piece& piece : pieces_) {
    dcp::Entry& entry = index_.entries[piece.entry];
    const std::uint32_t file = FileOf(piece.rank);
    dcp::Place place;
    if (piece.array) {
      SW_TRY_ASSIGN(place,
                    items_.AddTensor(file, entry.dtype, {piece.elems}, *piece.array, entry.name));
    } else {
      Document gap;
      gap.root = gap.AddInline(std::string(piece.elems * ItemSize(entry.dtype), '\0'), entry.dtype,
                               {piece.elems});
      SW_TRY_ASSIGN(place, items_.AddObject(file, gap));
    }
    place.file = FileNumber(piece.rank);
    entry.chunks.push_back({{piece.first}, {piece.elems}, place});
  }
  return {};
}

Status DistWriter::AddObject(const std::string& key, const Document& document, Rank rank) {
  const std::uint32_t file = FileOf(rank);
  auto place = items_.AddObject(file, document);
  if (!place) return Within("\"" + key + "\"", place.error());
  place->file = FileNumber(rank);
  dcp::Entry entry;
  entry.name = key;
  entry.at = *place;
  index_.entries.push_back(std::move(entry));
  return {};
}

/// Adds extra states. Every linear layer needs an object, usually
/// None, or loading fails. Other modules have one if the source has it.
Status DistWriter::AddExtraStates() {
  std::set<std::string> names;
  if (const RunState* own = RunStateOf(source_)) {
    for (const auto& [name, value] : own->modules) {
      if (HasExtraState(source_, name)) names.insert(name);
    }
  }
  for (const Param& param : source_.params) {
    constexpr std::string_view kWeight = "weight";
    if (!param.name.ends_with("." + std::string(kWeight)) || !param.alias_of.empty()) continue;
    if (!IsOfLinear(ParseName(param.name))) continue;
    names.insert(param.name.substr(0, param.name.size() - kWeight.size()) +
                 std::string(kExtraState));
  }
  for (const std::string& text : names) {
    const ParamName name = ParseName(text);
    const Key key = KeyOf(text, args_);
    std::vector<std::uint64_t> offset;
    std::vector<std::uint64_t> shape;
    const auto layers = layers_.find(name.stack);
    if (key.layers && (layers == layers_.end() || *name.layer >= layers->second)) {
      return Fail(Errc::kUnsupported, "\"", text, "\": of a layer without parameters");
    }
    if (key.layers) offset.push_back(*name.layer);
    if (key.layers) shape.push_back(layers->second);
    if (key.experts) offset.push_back(*name.expert);
    if (key.experts) shape.push_back(args_.experts);
    if (shape.empty()) offset.push_back(0);
    if (shape.empty()) shape.push_back(1);
    Document document;
    SW_TRY_ASSIGN(const Node* state, ModuleNode(&document, source_, text));
    document.root = document.arena.List({state});
    SW_TRY_ASSIGN(const Rank rank, RankOf(name));
    SW_TRY(AddObject(ObjectKeyText(KeyText(key), offset, shape), document, rank));
  }
  return {};
}

Status DistWriter::AddRandomStates() {
  if (!writing_.keeps_random) return {};
  const RunState* own = RunStateOf(source_);
  for (const auto& [place, value] : own->random) {
    if (place.first >= to_.mesh.pp || place.second >= to_.mesh.tp) continue;
    Document document;
    Graft graft(document, *value.document, value.members);
    SW_TRY_ASSIGN(const Node* state, graft.Take(value.root));
    document.root = document.arena.List({state});
    Rank rank;
    rank.p = place.first;
    rank.t = place.second;
    SW_TRY(AddObject(
        ObjectKeyText("rng_state", {place.first, place.second}, {to_.mesh.pp, to_.mesh.tp}),
        document, rank));
  }
  return {};
}

Status DistWriter::AddCommon() {
  SW_TRY_ASSIGN(const Document document, CommonState(writing_));
  const std::uint32_t file = items_.AddFile(PathOf(kCommonFile));
  SW_TRY(items_.AddObject(file, document));
  return {};
}

/// Adds integrity.json. Megatron-Core writes it on request; the target has it if the source does.
void DistWriter::AddIntegrity() {
  plan::DigestList list;
  std::vector<std::string> names;
  const std::string folder = PathOf("");
  for (std::uint32_t i = 0; i < builder_.file_count(); ++i) {
    const std::string& path = builder_.target().files[i].path;
    if (!path.starts_with(folder)) continue;
    list.files.push_back(i);
    names.push_back(path.substr(folder.size()));
  }
  list.text = [names = std::move(names)](std::span<const std::string> sha256) {
    FileSums sums;
    for (std::size_t i = 0; i < names.size(); ++i) sums.emplace(names[i], sha256[i]);
    return IntegrityText(sums);
  };
  builder_.AddDigests(PathOf(kIntegrity), std::move(list));
}

Status DistWriter::AddIndex() {
  SW_TRY_ASSIGN(std::string index, dcp::DumpIndex(index_));
  builder_.AddText(PathOf(dcp::kIndexName), std::move(index));
  builder_.AddText(PathOf("metadata.json"),
                   "{\"sharded_backend\": \"torch_dist\", \"sharded_backend_version\": 1, "
                   "\"common_backend\": \"torch\", \"common_backend_version\": 1}");
  if (!source_.digests.empty()) AddIntegrity();
  builder_.AddText(std::string(kTracker),
                   std::to_string(source_.iteration ? *source_.iteration : 0));
  return {};
}

Result<Written> DistWriter::Run() {
  SW_TRY(Prepare());
  for (std::uint32_t i = 0; i < source_.params.size(); ++i) SW_TRY(AddParam(i));
  SW_TRY(AddExtraStates());
  SW_TRY(AddRandomStates());
  SW_TRY(AddBuffers());
  SW_TRY(AddBoxes());
  SW_TRY(AddPieces());
  SW_TRY(AddCommon());
  items_.Finish();
  SW_TRY(AddIndex());
  out_.not_carried = writing_.Left();
  out_.target = std::move(builder_).Take();
  return std::move(out_);
}

}  // namespace

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const auto* to = dynamic_cast<const MegatronLayout*>(layout.own.get());
  SW_CHECK(to != nullptr);
  SW_TRY(CheckUnbound(source));
  if (const std::vector<std::string> names = StatelessNames(source); !names.empty()) {
    return Fail(Errc::kUnsupported, source.tag,
                ": Megatron-Core has a state of every trained parameter, and ",
                Plural(names.size(), "parameter"), " have none yet: ", FirstFew(names),
                "; save after gradients have reached them, or write another format");
  }
  if (to->files == Files::kTorch) return WriteLegacy(source, *to);
  return DistWriter(source, *to).Run();
}

}  // namespace shardwright::checkpoints::megatron
