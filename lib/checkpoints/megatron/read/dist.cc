// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/read/dist_internal.h"

#include <map>
#include <memory>

#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/integrity.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

constexpr std::string_view kState = "optimizer.state.";
constexpr std::string_view kCommonKey = "common_state/shard_0_1";

/// Removes a prefix like "chained_1.".
std::string_view WithoutChain(std::string_view key) {
  constexpr std::string_view kChained = "chained_";
  if (!key.starts_with(kChained)) return key;
  const std::size_t dot = key.find('.');
  return dot == std::string_view::npos ? key : key.substr(dot + 1);
}

}  // namespace

/// Finds the container of every item. Identifies containers by their
/// order, because a catalogue can store the payloads at other offsets.
Status Dist::Locate() {
  auto index = dcp::ReadIndex(source_.manifest);
  if (!index) return Within(tag() + "/" + std::string(dcp::kIndexName), index.error());
  index_ = *std::move(index);
  if (Status whole = dcp::CheckVolumes(index_); !whole) {
    return Within(tag() + "/" + std::string(dcp::kIndexName), whole.error());
  }
  containers_.resize(index_.files.size());
  const auto note = [&](const dcp::Place& at) -> Status {
    if (at.transforms != 0) {
      return Fail(Errc::kUnsupported, index_.files[at.file],
                  ": transformed items are not supported");
    }
    containers_[at.file].emplace(at.offset, 0);
    return {};
  };
  for (const dcp::Entry& entry : index_.entries) {
    if (!entry.is_tensor) SW_TRY(note(entry.at));
    for (const dcp::Chunk& chunk : entry.chunks) SW_TRY(note(chunk.at));
  }
  std::map<std::string_view, std::uint32_t> by_name;
  for (std::uint32_t i = 0; i < source_.files.size(); ++i) by_name[source_.files[i].name] = i;
  std::vector<std::string> missing;
  for (std::size_t file = 0; file < index_.files.size(); ++file) {
    const auto found = by_name.find(index_.files[file]);
    files_.push_back(found == by_name.end() ? 0 : found->second);
    if (containers_[file].empty()) continue;
    if (found == by_name.end()) {
      missing.push_back(index_.files[file]);
      continue;
    }
    const std::size_t count = source_.files[found->second].containers.size();
    if (count != containers_[file].size()) {
      return Fail(Errc::kBadInput, index_.files[file], ": ", containers_[file].size(),
                  " items expected by the index, found ", count);
    }
    std::uint32_t number = 0;
    for (auto& [offset, container] : containers_[file]) container = number++;
  }
  if (missing.empty()) return {};
  return Fail(Errc::kNotFound, tag(),
              ": files listed in the index are missing: ", FirstFew(missing),
              ": an incomplete copy or save");
}

Result<Object> Dist::ObjectAt(const dcp::Place& at) {
  Object object;
  object.file = files_[at.file];
  object.container = containers_[at.file].at(at.offset);
  const SourceFile& file = source_.files[object.file];
  auto document = torch_pt::Parse(*file.containers[object.container].metadata);
  if (!document) return Within(file.name, document.error());
  object.document = std::make_shared<const torch_pt::Document>(*std::move(document));
  object.value = object.document->root;
  return object;
}

Value Dist::ValueAt(const Object& object) {
  return ValueOf(collector_.map, object.file, object.container, object.document, object.value);
}

/// Returns the value of an object that was saved as a list of one.
Result<Object> Dist::OnlyOf(const std::string& name, const dcp::Place& at) {
  SW_TRY_ASSIGN(Object object, ObjectAt(at));
  if (!object.value->is_list() || object.value->items.size() != 1) {
    return Fail(Errc::kBadInput, "\"", name, "\": a list of one expected, found ",
                pickle::Describe(object.value));
  }
  object.value = object.value->items[0];
  return object;
}

Result<Place> Dist::TensorAt(const dcp::Entry& entry, const dcp::Chunk& chunk) {
  SW_TRY_ASSIGN(const Object object, ObjectAt(chunk.at));
  const std::string what = "tensor \"" + entry.name + "\"";
  SW_TRY_ASSIGN(const Place place, collector_.map.PlaceOf(object.file, object.container,
                                                          *object.document, object.value, what));
  const pickle::Tensor& tensor = *object.value->tensor;
  // The stored shape may lack leading axes of extent 1.
  Shape shape = chunk.sizes;
  while (shape.size() > tensor.shape.size() && shape.front() == 1) shape.erase(shape.begin());
  if (shape == tensor.shape && tensor.dtype == entry.dtype) return place;
  return Fail(Errc::kBadInput, source_.files[object.file].name, ": ", what, ": ", Name(entry.dtype),
              " ", ToString(chunk.sizes), " expected, found ", pickle::Describe(object.value));
}

/// Sorts the index entries by purpose.
Status Dist::SortEntries() {
  Entries others;
  for (const dcp::Entry& entry : index_.entries) {
    if (!entry.is_tensor) {
      objects_.emplace(entry.name, &entry);
      continue;
    }
    const std::string_view bare = WithoutChain(entry.name);
    if (bare.starts_with(kState)) {
      const std::string_view rest = bare.substr(kState.size());
      const std::size_t dot = rest.find('.');
      if (dot == std::string_view::npos) {
        return Fail(Errc::kBadInput, "\"", entry.name, "\": not a valid key of optimizer state");
      }
      states_.emplace_back(rest.substr(0, dot), &entry);
    } else if (ParseBucketKey(entry.name)) {
      buckets_.emplace(entry.name, &entry);
    } else if (bare.starts_with("optimizer.")) {
      if (reads_ == Reads::kOnlyWeights) continue;
      return Fail(Errc::kUnsupported, "\"", entry.name, "\": unknown form of optimizer state");
    } else {
      weights_.push_back(&entry);
    }
  }
  for (const dcp::Entry* entry : weights_) {
    if (!entry->name.ends_with(kEmbedding)) continue;
    const std::string before = entry->name.substr(0, entry->name.size() - kEmbedding.size());
    if (before == "module." || before == "model.") prefix_ = before;
  }
  has_optimizer_ = reads_ == Reads::kAll && (!states_.empty() || !buckets_.empty());
  return CheckGrids();
}

/// Checks that the objects of one name fill a grid.
Status Dist::CheckGrids() const {
  std::map<std::string, std::pair<std::vector<std::uint64_t>, std::uint64_t>> grids;
  for (const auto& [name, entry] : objects_) {
    SW_TRY_ASSIGN(const ObjectKey key, ParseObjectKey(name));
    const auto [at, fresh] = grids.try_emplace(key.name, key.shape, 0);
    if (!fresh && at->second.first != key.shape) {
      return Fail(Errc::kBadInput, "\"", name, "\": objects of this name in different grids, ",
                  ToString(at->second.first), " and ", ToString(key.shape));
    }
    ++at->second.second;
  }
  for (const auto& [name, grid] : grids) {
    SW_TRY_ASSIGN(const std::uint64_t wanted, CountElems(grid.first));
    if (wanted == grid.second) continue;
    return Fail(Errc::kBadInput, "\"", name, "\": ", wanted, " objects expected in a grid of ",
                ToString(grid.first), ", found ", grid.second);
  }
  return {};
}

/// Reads arguments, schedule and so on, from a separate file or from an item.
Status Dist::ReadCommon() {
  for (std::uint32_t i = 0; i < source_.files.size(); ++i) {
    if (source_.files[i].name != kCommonFile) continue;
    auto document = torch_pt::Parse(*source_.files[i].containers.front().metadata);
    if (!document) return Within(source_.files[i].name, document.error());
    common_.file = i;
    common_.document = std::make_shared<const torch_pt::Document>(*std::move(document));
    common_.value = common_.document->root;
  }
  const auto item = objects_.find(std::string(kCommonKey));
  if (common_.value == nullptr) {
    if (item == objects_.end()) {
      return Fail(Errc::kBadInput, tag(), ": neither ", kCommonFile, " nor an item \"", kCommonKey,
                  "\" found");
    }
    SW_TRY_ASSIGN(common_, OnlyOf(item->first, item->second->at));
  }
  if (!common_.value->is_dict()) {
    return Fail(Errc::kBadInput, tag(), ": common state: dict expected, found ",
                pickle::Describe(common_.value));
  }
  const Node* told = common_.value->Find("args");
  if (told == nullptr) return InferArgs();
  auto args = ReadArgs(told);
  if (!args) return Within(tag() + ": common state", args.error());
  args_ = *std::move(args);
  if (const Node* notes = common_.value->Find(kNotesKey); notes != nullptr) {
    auto parsed = ParseNotes(notes);
    if (!parsed) return Within(tag(), parsed.error());
    notes_ = *std::move(parsed);
    // Unlike Megatron, another trainer's checkpoint states the query groups only if they are known.
    const Node* attributes = AttributesOf(told);
    const bool known = attributes != nullptr && attributes->Find("num_query_groups") != nullptr;
    if (!known) args_.groups = 0;
    for (std::size_t i = 0; i < notes_->params.size(); ++i) {
      if (noted_.emplace(notes_->params[i].name, i).second) continue;
      return Fail(Errc::kBadInput, "\"", notes_->params[i].name,
                  "\": listed twice in the notes of Shardwright");
    }
  }
  return ReadForm();
}

/// Finds the form of the optimizer's state.
Status Dist::ReadForm() {
  if (reads_ == Reads::kOnlyWeights) return {};
  metadata_ = common_.value->Find("content_metadata");
  const Node* type = FindIn(metadata_, "distrib_optim_sharding_type");
  const Node* single = FindIn(metadata_, "singleton_local_shards");
  if (const auto flag = pickle::AsInt(single); flag && *flag != 0) {
    return Fail(Errc::kUnsupported, tag(),
                ": shards with separate names (singleton_local_shards) are not supported");
  }
  std::string name;
  if (type != nullptr && !type->is_none()) {
    SW_TRY_ASSIGN(name, pickle::AsString(type));
  } else if (!args_.distributed) {
    return {};
  } else if (metadata_ == nullptr) {
    name = args_.fully_parallel_save ? "fully_sharded_model_space" : "dp_zero_gather_scatter";
  }
  if (name == "dp_reshardable") {
    form_ = OptimizerForm::kDpReshardable;
  } else if (name == "fully_reshardable") {
    form_ = OptimizerForm::kFullyReshardable;
  } else if (name == "fully_sharded_model_space") {
    form_ = OptimizerForm::kFullyShardedModelSpace;
  } else if (has_optimizer_ || !name.empty()) {
    return Fail(Errc::kUnsupported, tag(), ": optimizer state as \"", name,
                "\" is not supported: save it once in the fully reshardable form");
  }
  return {};
}

/// Adds optimizer states stored under the keys of weights.
Status Dist::AddModelSpace() {
  for (const auto& [slot, entry] : states_) {
    const std::string_view rest = WithoutChain(entry->name).substr(kState.size() + slot.size() + 1);
    const std::string_view name = rest.substr(rest.starts_with(prefix_) ? prefix_.size() : 0);
    const auto weight = by_weight_.find(std::string(name));
    if (weight == by_weight_.end()) {
      return Fail(Errc::kBadInput, "\"", entry->name,
                  "\": state of a parameter that the model lacks");
    }
    const bool master = slot == "param" || slot == "fp32_param";
    // Float32 weights are their own master weights.
    if (master && weight->second->dtype == DType::kF32) continue;
    if (master) {
      const bool copied = form_ == OptimizerForm::kFullyReshardable;
      SW_TRY(CheckMasters(args_, entry->dtype, copied, "\"" + entry->name + "\""));
    }
    const std::string_view state = master ? layout::kMaster : std::string_view(slot);
    const Key key = ParseKey(name, args_);
    const bool flat = entry->shape.size() == weight->second->shape.size() + 1;
    if (entry->shape == weight->second->shape) {
      SW_TRY(AddTensors(*entry, key, state));
    } else if (form_ == OptimizerForm::kFullyShardedModelSpace && flat) {
      SW_TRY(AddFlat(*entry, weight->second->shape, key, state));
    } else {
      return Fail(Errc::kUnsupported, "\"", entry->name, "\": optimizer state of shape ",
                  ToString(entry->shape), ", the shape of the parameter is ",
                  ToString(weight->second->shape));
    }
  }
  return {};
}

/// Adds states stored in ranges of local shards. The shape has the
/// number of shards along each axis, then the elements of one shard.
Status Dist::AddFlat(const dcp::Entry& entry, const Shape& whole, const Key& key,
                     std::string_view state) {
  const std::size_t rank = whole.size();
  Shape local(rank);
  bool fits = true;
  for (std::size_t d = 0; d < rank && fits; ++d) {
    fits = entry.shape[d] > 0 && whole[d] % entry.shape[d] == 0;
    if (fits) local[d] = whole[d] / entry.shape[d];
  }
  if (!fits || Elems(local) != entry.shape[rank]) {
    return Fail(Errc::kBadInput, "\"", entry.name, "\": ", "shape ", ToString(entry.shape),
                " does not fit flattened shards of ", ToString(whole));
  }
  for (const dcp::Chunk& chunk : entry.chunks) {
    if (chunk.is_empty()) continue;
    for (std::size_t d = 0; d < rank; ++d) {
      if (chunk.sizes[d] == 1) continue;
      return Fail(Errc::kUnsupported, "\"", entry.name,
                  "\": one shard per chunk expected, found several");
    }
    SW_TRY_ASSIGN(const Place place, TensorAt(entry, chunk));
    layout::Placement at;
    at.array = collector_.map.AddWhole(place);
    const std::uint64_t first = chunk.offsets[rank];
    for (const layout::Box& box : BoxesOfRange(local, first, first + chunk.sizes[rank])) {
      dcp::Chunk part;
      part.sizes = box.sizes;
      part.offsets = box.at_view;
      for (std::size_t d = 0; d < rank; ++d) part.offsets[d] += chunk.offsets[d] * local[d];
      const auto axes = static_cast<std::ptrdiff_t>(key.axes());
      for (std::size_t d = 0; d < key.axes(); ++d) {
        if (part.sizes[d] == 1) continue;
        return Fail(Errc::kUnsupported, "\"", entry.name,
                    "\": one layer per shard expected, found several");
      }
      const std::string name = key.Text(key.layers ? part.offsets[0] : 0,
                                        key.experts ? part.offsets[key.axes() - 1] : 0);
      SW_TRY(collector_.AddBox(collector_.by_name.at(name), state, entry.dtype, at,
                               Shape(part.offsets.begin() + axes, part.offsets.end()),
                               Shape(part.sizes.begin() + axes, part.sizes.end())));
      at.vector_offset += Elems(part.sizes);
    }
  }
  return {};
}

Result<Checkpoint> Dist::Run() {
  SW_TRY(Locate());
  SW_TRY(SortEntries());
  SW_TRY(ReadCommon());
  SW_TRY(AddParams());
  if (has_optimizer_) {
    SW_TRY(AddModelSpace());
    if (!notes_) SW_TRY(ReadGroups());
    SW_TRY(ReadBuckets());
  }
  SW_TRY(AddTied());
  SW_TRY(ReadRunState());
  return collector_.Finish();
}

Status Dist::ReadRunState() {
  Checkpoint& out = collector_.out;
  auto own = std::make_shared<RunState>();
  Node* common = CopyDict(*out.arena, common_.value);
  pickle::Remove(common, "optimizer");
  pickle::Remove(common, "content_metadata");
  pickle::Remove(common, kNotesKey);
  TakeSchedule(common);
  own->common = ValueOf(collector_.map, common_.file, common_.container, common_.document, common);
  own->args = args_;
  own->kept = kept_;
  own->noted = notes_.has_value();
  own->scalers = scalers_;
  for (const auto& [name, entry] : objects_) {
    SW_TRY_ASSIGN(const ObjectKey key, ParseObjectKey(name));
    if (name == kCommonKey || ParseBucketKey(name)) continue;
    SW_TRY_ASSIGN(const Object object, OnlyOf(name, entry->at));
    if (key.name == "rng_state" && key.offset.size() == 2) {
      own->random[{key.offset[0], key.offset[1]}] = ValueAt(object);
      continue;
    }
    const std::string_view bare =
        std::string_view(key.name).substr(key.name.starts_with(prefix_) ? prefix_.size() : 0);
    const Key of = ParseKey(bare, args_);
    if (!key.name.ends_with(kExtraState) || key.offset.size() < of.axes()) {
      own->extra.push_back(name);
      continue;
    }
    AddModule(
        of.Text(key.offset[0], of.axes() > 0 ? key.offset[of.axes() - 1] : 0), object.value,
        [&] { return ValueAt(object); }, own.get());
  }
  const auto count = pickle::AsCount(common_.value->Find("iteration"));
  const auto steps = pickle::AsCount(common_.value->Find("global_step"));  // NeMo
  if (count || steps) {
    out.iteration = count ? *count : *steps;
  } else {
    out.iteration = Fail(Errc::kBadInput, tag(),
                         ": no \"iteration\" in the common state: give "
                         "--iteration");
  }
  out.consumed_samples = args_.samples;
  out.own = own;
  MegatronLayout layout;
  layout.files = Files::kTorchDist;
  layout.optimizer = form_;
  if (own->noted) layout.run = FindNewRun(common_.value);
  FillLayout(args_, layout, &out);
  if (!told_vocab_.empty()) out.facts.emplace("vocab_size", told_vocab_);
  return {};
}

Result<Checkpoint> ReadDist(const SourceSet& source, const Patterns& patterns, Reads reads) {
  SW_TRY_ASSIGN(Checkpoint read, Dist(source, patterns, reads).Run());
  SW_TRY_ASSIGN(read.digests, DigestsOf(source));
  return read;
}

}  // namespace shardwright::checkpoints::megatron
