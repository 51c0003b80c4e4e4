// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <span>

#include "checkpoints/megatron/read/dist_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"
#include "support/base/text.h"

// Adds the parameters and their weights from the keys of the model.

namespace shardwright::checkpoints::megatron {
namespace {

/// Copies the properties of a parameter from Shardwright's notes.
void TakeNoted(const Param& noted, Param* param) {
  param->kind = noted.kind;
  param->group = noted.group;
  param->expert = noted.expert;
  param->scalars = noted.scalars;
}

/// Checks that a tensor's items are large enough for its elements.
/// Callers run this check before they allocate memory for each layer.
Status CheckStored(const dcp::Entry& entry, bool stacked) {
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(entry.shape));
  SW_TRY_ASSIGN(const std::uint64_t bytes, CheckedMul(elems, ItemSize(entry.dtype)));
  std::uint64_t stored = 0;
  for (const dcp::Chunk& chunk : entry.chunks) {
    SW_TRY_ASSIGN(stored, CheckedAdd(stored, chunk.at.bytes));
  }
  if (bytes <= stored && (elems > 0 || !stacked)) return {};
  return Fail(Errc::kBadInput, "\"", entry.name, "\" ", ToString(entry.shape), ": ", bytes,
              " bytes expected, its items have ", stored);
}

}  // namespace

std::string_view Dist::BareName(const dcp::Entry& entry) const {
  return std::string_view(entry.name).substr(entry.name.starts_with(prefix_) ? prefix_.size() : 0);
}

/// Sorts parameters in the order of Megatron's modules, or of Shardwright's notes.
Status Dist::OrderParams(std::vector<Found>* found) const {
  if (!notes_) {
    std::sort(found->begin(), found->end(),
              [](const Found& a, const Found& b) { return ModelOrderLess(a.name, b.name); });
    return {};
  }
  std::size_t there = 0;
  for (const Param& param : notes_->params) there += param.alias_of.empty() ? 1 : 0;
  const bool all = std::all_of(found->begin(), found->end(), [&](const Found& one) {
    const auto noted = noted_.find(one.name);
    return noted != noted_.end() && notes_->params[noted->second].alias_of.empty();
  });
  if (!all || there != found->size()) {
    return Fail(Errc::kBadInput, tag(), ": the notes of Shardwright describe other tensors");
  }
  std::sort(found->begin(), found->end(),
            [&](const Found& a, const Found& b) { return noted_.at(a.name) < noted_.at(b.name); });
  return {};
}

/// Adds all parameters.
Status Dist::AddParams() {
  SW_TRY(CheckLists());
  std::vector<Found> found;
  for (const dcp::Entry* entry : weights_) {
    const std::string_view name = BareName(*entry);
    const Key key = ParseKey(name, args_);
    if (entry->shape.size() < key.axes()) {
      return Fail(Errc::kBadInput, "\"", entry->name, "\": no layer axis in ",
                  ToString(entry->shape));
    }
    const std::uint64_t layers = key.layers ? entry->shape[0] : 1;
    const std::uint64_t experts = key.experts ? entry->shape[key.axes() - 1] : 1;
    if (key.layers && layers != args_.layers) {
      return Fail(Errc::kBadInput, "\"", entry->name, "\": ", args_.layers,
                  " layers expected by the run arguments, found ", layers);
    }
    if (key.experts && experts != args_.experts) {
      return Fail(Errc::kBadInput, "\"", entry->name, "\": ", args_.experts,
                  " experts expected by the run arguments, found ", experts);
    }
    SW_TRY(CheckStored(*entry, key.axes() > 0));
    const Shape shape(entry->shape.begin() + static_cast<std::ptrdiff_t>(key.axes()),
                      entry->shape.end());
    for (std::uint64_t layer = 0; layer < layers; ++layer) {
      for (std::uint64_t expert = 0; expert < experts; ++expert) {
        found.push_back({key.Text(layer, expert), shape, entry->dtype});
      }
    }
    by_weight_.emplace(name, entry);
  }
  SW_TRY(OrderParams(&found));
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  std::set<std::string_view> seen;
  for (const Found& one : found) {
    if (!seen.insert(one.name).second) {
      return Fail(Errc::kBadInput, "\"", one.name, "\": stored under two keys");
    }
    names.push_back(one.name);
    shapes.push_back(one.shape);
  }
  SW_TRY_ASSIGN(const bool gated, IsGated(names, shapes));
  if (common_.value->Find("args") == nullptr) args_.swiglu = gated;
  const Rules rules(args_, gated);
  for (const Found& one : found) {
    SW_TRY_ASSIGN(const std::uint32_t index,
                  collector_.AddParam(rules, args_, one.name, one.dtype, std::span(&one.shape, 1)));
    if (!notes_) continue;
    TakeNoted(notes_->params[noted_.at(one.name)], &collector_.out.params[index]);
  }
  return AddWeights();
}

Status Dist::AddWeights() {
  for (const dcp::Entry* entry : weights_) {
    const Key key = ParseKey(BareName(*entry), args_);
    const auto first = collector_.by_name.find(key.Text(0, 0));
    if (first == collector_.by_name.end()) continue;  // no layers
    const ParamKind kind = collector_.out.params[first->second].kind;
    const bool master = has_optimizer_ && entry->dtype == DType::kF32;
    const std::string_view state = kind == ParamKind::kBuffer   ? layout::kBuffer
                                   : kind == ParamKind::kFrozen ? layout::kFrozen
                                   : master                     ? layout::kMaster
                                                                : layout::kWeight;
    SW_TRY(AddTensors(*entry, key, state));
  }
  return {};
}

/// Adds names that share the data of other names, if Shardwright's notes list them.
Status Dist::AddTied() {
  if (!notes_) return {};
  Checkpoint& out = collector_.out;
  std::vector<Param> params;
  for (const Param& noted : notes_->params) {
    const auto holder =
        collector_.by_name.find(noted.alias_of.empty() ? noted.name : noted.alias_of);
    if (holder == collector_.by_name.end()) {
      return Fail(Errc::kBadInput, "\"", noted.name, "\": tied to \"", noted.alias_of,
                  "\", which is missing");
    }
    Param param = out.params[holder->second];
    if (!noted.alias_of.empty()) {
      param.name = noted.name;
      param.alias_of = noted.alias_of;
      TakeNoted(noted, &param);
    }
    params.push_back(std::move(param));
  }
  out.params = std::move(params);
  out.groups = notes_->groups;
  out.optimizer = notes_->optimizer;
  out.order_unknown = notes_->order_unknown;
  return {};
}

Status Dist::AddTensors(const dcp::Entry& entry, const Key& key, std::string_view state) {
  // Tensors without elements have no items.
  const auto only = collector_.by_name.find(key.Text(0, 0));
  if (Elems(entry.shape) == 0 && only != collector_.by_name.end()) {
    collector_.TensorOf(only->second, state, entry.dtype);
  }
  for (const dcp::Chunk& chunk : entry.chunks) {
    if (!chunk.is_empty()) SW_TRY(AddChunk(entry, chunk, key, state));
  }
  return {};
}

/// Adds a chunk, which may be a box over several layers and experts.
Status Dist::AddChunk(const dcp::Entry& entry, const dcp::Chunk& chunk, const Key& key,
                      std::string_view state) {
  SW_TRY_ASSIGN(const Place place, TensorAt(entry, chunk));
  const auto axes = static_cast<std::ptrdiff_t>(key.axes());
  const Shape offsets(chunk.offsets.begin() + axes, chunk.offsets.end());
  const Shape sizes(chunk.sizes.begin() + axes, chunk.sizes.end());
  const auto range = [&](bool there, std::size_t axis) {
    return there ? std::pair(chunk.offsets[axis], chunk.sizes[axis])
                 : std::pair(std::uint64_t{0}, std::uint64_t{1});
  };
  const auto [first_layer, layers] = range(key.layers, 0);
  const auto [first_expert, experts] = range(key.experts, key.layers ? 1 : 0);
  layout::Placement at;
  at.array = collector_.map.AddWhole(place);
  for (std::uint64_t layer = first_layer; layer < first_layer + layers; ++layer) {
    for (std::uint64_t expert = first_expert; expert < first_expert + experts; ++expert) {
      const std::string name = key.Text(layer, expert);
      const auto param = collector_.by_name.find(name);
      if (param == collector_.by_name.end()) {
        return Fail(Errc::kBadInput, "\"", entry.name, "\": state of \"", name,
                    "\", which the model lacks");
      }
      SW_TRY(collector_.AddBox(param->second, state, entry.dtype, at, offsets, sizes));
      at.vector_offset += Elems(sizes);
    }
  }
  return {};
}

}  // namespace shardwright::checkpoints::megatron
