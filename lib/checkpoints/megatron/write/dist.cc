// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <set>
#include <span>

#include "checkpoints/megatron/folder.h"
#include "checkpoints/megatron/integrity.h"
#include "checkpoints/megatron/keys.h"
#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/rules.h"
#include "checkpoints/megatron/stages.h"
#include "checkpoints/megatron/write/dist_internal.h"
#include "checkpoints/pickled/torch_optimizer.h"
#include "engine/layout/states.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::megatron {

using pickle::Node;

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
      return Fail(Errc::kUnsupported, "\"", param.name,
                  "\": sharded in a way that Megatron does not support: ", cut->Explain());
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
      return Fail(Errc::kUnsupported, "\"", text, "\": belongs to a layer without parameters");
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
  builder_.AddText(std::string(kTracker), TrackerText(source_));
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
  out_.warnings = writing_.Warnings();
  out_.target = std::move(builder_).Take();
  return std::move(out_);
}

namespace {

/// Fails if a rule splits a parameter along several dimensions. Megatron's modules split one.
Status CheckRules(const Checkpoint& source, const MegatronLayout& to) {
  for (const Param& param : source.params) {
    const std::uint64_t ranks = ParseName(param.name).expert ? to.etp : to.mesh.tp;
    if (param.rule.split != layout::Split::kMesh || ranks == 1) continue;
    return Fail(Errc::kUnsupported, ParseName(param.name).expert ? "etp=" : "tp=", ranks, ": ",
                Quoted(param.name), " is sharded by ", layout::Explain(param.rule),
                "; Megatron shards a parameter along one dimension");
  }
  return {};
}

}  // namespace

Result<Written> Write(const Checkpoint& source, const Layout& layout) {
  const auto* to = dynamic_cast<const MegatronLayout*>(layout.own.get());
  SW_CHECK(to != nullptr);
  SW_TRY(CheckUnbound(source));
  SW_TRY(CheckRules(source, *to));
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
