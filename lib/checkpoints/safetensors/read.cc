// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>

#include "checkpoints/safetensors/read_internal.h"
#include "checkpoints/tp_rules/quantized.h"
#include "checkpoints/tp_rules/rule_source.h"
#include "engine/layout/mesh_cut.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::safetensors {

namespace file_format = shardwright::safetensors;

/// Merges the notes of all files. Uses them only if they are complete and consistent.
void Reader::TakeNotes() {
  Notes all;
  std::uint32_t noted = 0;
  std::string wrong;
  std::vector<const std::string*> names;
  std::size_t first = 0;
  for (std::uint32_t file = 0; file < headers_.size() && wrong.empty(); ++file) {
    std::size_t last = first;
    names.clear();
    for (; last < tensors_.size() && tensors_[last].file == file; ++last) {
      names.push_back(&tensors_[last].entry.name);
    }
    const auto text = headers_[file].metadata.find(std::string(kNotesKey));
    if (text != headers_[file].metadata.end()) {
      auto notes = ParseNotes(text->second, names);
      if (!notes) {
        wrong = NameOf(file) + ": " + notes.error().message;
        break;
      }
      for (std::size_t i = first; i < last; ++i) tensors_[i].note = notes->tensors[i - first];
      all.tied.merge(notes->tied);
      all.experts.merge(notes->experts);
      notes->tied = std::move(all.tied);
      notes->experts = std::move(all.experts);
      const bool same = noted == 0 || (notes->state == all.state && notes->dtype == all.dtype &&
                                       notes->groups.size() == all.groups.size() &&
                                       notes->iteration == all.iteration);
      all = *std::move(notes);
      if (!same) wrong = NameOf(file) + ": its notes belong to another save";
      ++noted;
    }
    first = last;
  }
  if (noted == 0 && wrong.empty()) return;
  if (wrong.empty() && noted < headers_.size()) wrong = "only some files have notes";
  notes_ = std::move(all);
  if (wrong.empty() && !NotesAgree()) wrong = "the notes of the files contradict each other";
  if (wrong.empty()) return;
  notes_.reset();
  Warn(wrong + ": the notes of Shardwright are not used");
}

/// Checks that every position occurs once and that trained tensors have a trainable type.
bool Reader::NotesAgree() {
  std::set<std::uint64_t> places;
  for (const Tensor& tensor : tensors_) {
    if (!places.insert(tensor.note.place).second) return false;
    if (tensor.note.group >= 0 && !IsTrained(tensor.entry.dtype)) return false;
  }
  return std::all_of(notes_->tied.begin(), notes_->tied.end(), [&](const auto& tie) {
    return places.insert(tie.second.place).second && by_name_.contains(tie.second.holder) &&
           !by_name_.contains(tie.first);
  });
}

void Reader::MakeParams() {
  std::set<std::string, std::less<>> kept;
  if (!notes_) {  // otherwise the notes record which tensors are trained
    std::vector<NamedTensor> all;
    all.reserve(tensors_.size());
    for (const Tensor& one : tensors_) {
      all.push_back({one.entry.name, one.entry.dtype, one.entry.shape});
    }
    kept = QuantizationTensors(all);
    if (!kept.empty()) Warn(KeptWithWeights(kept.size()));
  }
  for (const Tensor& tensor : tensors_) {
    if (tensor.is_more) continue;
    Param param;
    param.name = tensor.entry.name;
    param.dtype = tensor.entry.dtype;
    const bool trained =
        notes_ ? tensor.note.group >= 0 : IsTrained(param.dtype) && !kept.contains(param.name);
    param.kind = trained ? ParamKind::kTrainable : ParamKind::kBuffer;
    if (notes_ && tensor.note.group == TensorNote::kFrozen) param.kind = ParamKind::kFrozen;
    if (trained && notes_) param.group = static_cast<std::int32_t>(tensor.note.group);
    if (trained && notes_ && notes_->state == layout::kMaster && notes_->dtype)
      param.dtype = *notes_->dtype;
    if (notes_) {
      const auto expert = notes_->experts.find(param.name);
      if (expert != notes_->experts.end()) param.expert = expert->second;
    }
    places_.push_back(tensor.note.place);
    out_.params.push_back(std::move(param));
  }
}

/// Adds tied names without data, from our notes or from the
/// metadata entries that save_model of safetensors writes.
void Reader::AddTied() {
  std::map<std::string, TieNote> tied;
  if (notes_) {
    tied = notes_->tied;
  } else {
    for (const file_format::Header& header : headers_) {
      for (const auto& [key, value] : header.metadata) {
        if (key != "format" && !by_name_.contains(key) && by_name_.contains(value)) {
          tied.emplace(key, TieNote{value, 0});
        }
      }
    }
  }
  for (const auto& [name, tie] : tied) {
    Param param = out_.params[by_name_.at(tie.holder)];
    param.name = name;
    param.alias_of = tie.holder;
    param.expert.reset();
    places_.push_back(tie.place);
    out_.params.push_back(std::move(param));
  }
}

/// Sorts parameters in the order of the notes, or by name if there are none.
void Reader::Order() {
  std::vector<std::uint32_t> order(out_.params.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (notes_) return places_[a] < places_[b];
    return NaturalLess(out_.params[a].name, out_.params[b].name);
  });
  std::vector<Param> params;
  params.reserve(order.size());
  for (const std::uint32_t i : order) params.push_back(std::move(out_.params[i]));
  out_.params = std::move(params);
  if (!notes_) {
    out_.order_unknown =
        "safetensors files record neither the order of the parameters nor which of them are "
        "trained, unless Shardwright wrote them";
  }
}

/// Returns the shape of a tensor. For a tensor in pieces, the shape that covers all pieces.
Result<Shape> Reader::WholeShape(const Tensor& first) const {
  SW_TRY_ASSIGN(Shape whole, file_format::ElemShape(first.entry));
  if (!first.offsets) return whole;
  std::vector<const Tensor*> pieces = {&first};
  for (const std::uint32_t i : first.more) pieces.push_back(&tensors_[i]);
  for (const Tensor* piece : pieces) {
    SW_TRY_ASSIGN(const Shape shape, file_format::ElemShape(piece->entry));
    if (shape.size() != whole.size() || piece->entry.dtype != first.entry.dtype) {
      return Fail(Errc::kBadInput, "tensor ", Quoted(first.entry.name), ": its pieces in ",
                  NameOf(first.file), " and ", NameOf(piece->file),
                  " have different types or numbers of dimensions");
    }
    for (std::size_t dim = 0; dim < whole.size(); ++dim) {
      SW_TRY_ASSIGN(const std::uint64_t end, CheckedAdd((*piece->offsets)[dim], shape[dim]));
      whole[dim] = std::max(whole[dim], end);
    }
  }
  SW_TRY(CountElems(whole));
  return whole;
}

Status Reader::DecideRules() {
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  for (Param& param : out_.params) {
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(param.shape, WholeShape(tensors_[by_name_.at(param.name)]));
    names.push_back(param.name);
    shapes.push_back(param.shape);
  }
  const Patterns chosen = patterns_.ForModel(names, shapes);
  std::unordered_map<std::string, std::uint32_t> holders;
  for (std::uint32_t i = 0; i < out_.params.size(); ++i) {
    Param& param = out_.params[i];
    if (!param.alias_of.empty()) continue;
    SW_TRY_ASSIGN(Ruled ruled, DecideRule({}, chosen, param.name, std::span(&param.shape, 1)));
    param.rule = std::move(ruled.rule);
    holders.emplace(param.name, i);
  }
  for (Param& param : out_.params) {
    if (param.alias_of.empty()) continue;
    const Param& holder = out_.params[holders.at(param.alias_of)];
    param.shape = holder.shape;
    param.rule = holder.rule;
  }
  return {};
}

Status Reader::AddFragment(const Tensor& tensor, MapBuilder* map, layout::LogicalTensor* logical) {
  SW_TRY_ASSIGN(const Shape sizes, file_format::ElemShape(tensor.entry));
  layout::Fragment fragment;
  if (tensor.offsets) {
    if (Elems(sizes) == 0 && Elems(logical->shape) > 0) return {};
    SW_TRY_ASSIGN(layout::Cut cut, layout::CutOf(logical->shape, {*tensor.offsets, sizes}));
    fragment.cut = std::make_shared<const layout::Cut>(std::move(cut));
  } else {
    fragment.cut = cuts_.Of(sizes);
  }
  fragment.at.array = map->AddWhole({.member = map->MemberOf(tensor.file, 0, tensor.storage),
                                     .offset = 0,
                                     .elems = Elems(sizes),
                                     .dtype = tensor.entry.dtype});
  logical->fragments.push_back(std::move(fragment));
  return {};
}

Status Reader::AddTensors() {
  MapBuilder map(source_, &out_.map);
  for (const Param& param : out_.params) {
    if (!param.alias_of.empty()) continue;
    const Tensor& tensor = tensors_[by_name_.at(param.name)];
    layout::LogicalTensor logical;
    logical.name = param.name;
    logical.state = param.kind == ParamKind::kFrozen   ? std::string(layout::kFrozen)
                    : param.kind == ParamKind::kBuffer ? std::string(layout::kBuffer)
                    : notes_                           ? notes_->state
                                                       : std::string(layout::kWeight);
    logical.dtype = tensor.entry.dtype;
    logical.shape = param.shape;
    SW_TRY(AddFragment(tensor, &map, &logical));
    for (const std::uint32_t i : tensor.more) SW_TRY(AddFragment(tensors_[i], &map, &logical));
    out_.map.tensors.push_back(std::move(logical));
  }
  return {};
}

void Reader::MakeGroups() {
  if (!notes_) return;
  for (const GroupNote& note : notes_->groups) {
    Group group;
    group.hyper = note.hyper;
    group.moe = note.moe;
    out_.groups.push_back(std::move(group));
  }
  for (std::uint32_t i = 0; i < out_.params.size(); ++i) {
    const Param& param = out_.params[i];
    if (param.kind != ParamKind::kTrainable || !param.alias_of.empty()) continue;
    out_.groups[static_cast<std::size_t>(param.group)].params.push_back(i);
  }
}

void Reader::MergeMetadata() {
  auto own = std::make_shared<FileMetadata>();
  std::set<std::string> differing;
  for (const file_format::Header& header : headers_) {
    for (const auto& [key, value] : header.metadata) {
      if (key == kNotesKey) continue;
      const auto [at, fresh] = own->values.emplace(key, value);
      if (!fresh && at->second != value) differing.insert(key);
    }
  }
  for (const std::string& key : differing) own->values.erase(key);
  if (!differing.empty()) {
    out_.left_out.push_back("metadata that differs from file to file: " +
                            FirstFew({differing.begin(), differing.end()}));
  }
  out_.own = std::move(own);
}

void Reader::Finish() {
  MergeMetadata();
  std::map<DType, std::uint64_t> elems;
  for (const Param& param : out_.params) {
    if (param.kind == ParamKind::kTrainable && param.alias_of.empty()) {
      elems[param.dtype] += Elems(param.shape);
    }
  }
  const auto most = std::max_element(
      elems.begin(), elems.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != elems.end()) out_.layout.dtype = most->first;
  if (!notes_) return;
  out_.optimizer = notes_->optimizer;
  if (notes_->iteration) out_.iteration = *notes_->iteration;
  out_.consumed_samples = notes_->consumed_samples;
}

Result<Checkpoint> Read(const SourceSet& source, const Patterns& patterns) {
  return Reader(source, patterns).Run();
}

}  // namespace shardwright::checkpoints::safetensors
