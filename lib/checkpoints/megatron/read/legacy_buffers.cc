// SPDX-License-Identifier: Apache-2.0
#include <set>

#include "checkpoints/megatron/read/legacy_internal.h"
#include "engine/layout/states.h"

// Reads the gradient buffers that the distributed optimizer saves: the
// states of all parameters of a chunk, consecutive and without names.

namespace shardwright::checkpoints::megatron {
namespace {

using pickle::Node;

/// Returns the parameter type of a buffer: the first of its key (param, gradient).
std::optional<DType> ParamTypeOf(const Node* key) {
  if (key->kind != pickle::Kind::kTuple || key->items.empty()) return std::nullopt;
  const Node* first = key->items[0];
  constexpr std::string_view kTorch = "torch.";
  if (first->kind != pickle::Kind::kGlobal || !first->text.starts_with(kTorch)) return std::nullopt;
  return DTypeFromName(std::string_view(first->text).substr(kTorch.size()));
}

}  // namespace

Status Legacy::ReadBuffers(std::size_t rank, std::size_t part, bool experts) {
  const std::string& where = NameOf(*ranks_[rank].optimizer);
  const Node* root = ranks_[rank].optimizer_document->root;
  SW_TRY_ASSIGN(const std::vector<const Node*> parts, PartsOfOptimizer(rank));
  const bool chained = parts.size() > 1;
  if (root->is_list() != chained || (chained && root->items.size() != parts.size())) {
    return Fail(Errc::kBadInput, where, ": state of ", parts.size(), " optimizers expected, found ",
                pickle::Describe(root));
  }
  if (chained) root = root->items[part];
  if (root->is_none()) {
    if (!experts && ranks_[rank].e > 0) return {};  // the first expert rank has it
    return Fail(Errc::kNotFound, where, ": the state of an optimizer is missing");
  }
  if (!root->is_dict() || root->Find("buckets_coalesced") == nullptr) {
    return Fail(Errc::kUnsupported, where,
                ": buckets in the form used before April 2024 are not supported");
  }
  std::uint64_t elems = 0;
  for (const auto& chunk : local_[rank]) {
    for (const LocalName& name : chunk) elems += Elems(name.node->tensor->shape);
  }
  std::int64_t index = 0;
  for (std::uint64_t chunk = 0; chunk < args_.vpp; ++chunk) {
    const std::vector<LocalName> names = NamesOf(rank, part, chained, chunk);
    std::vector<DType> types;
    types.reserve(names.size());
    for (const LocalName& name : names) types.push_back(name.node->tensor->dtype);
    for (const BufferOf& buffer : BuffersOf(types)) {
      const DType dtype = buffer.dtype;
      const Node* entry = FindInt(root, index);
      const std::string at = where + ": buffer " + std::to_string(index);
      ++index;
      if (entry == nullptr || !entry->is_dict() || entry->entry_count() != 1) {
        return Fail(Errc::kBadInput, at, ": a dict of one entry expected, found ",
                    pickle::Describe(entry));
      }
      const auto found = ParamTypeOf(entry->key(0));
      if (!found || *found != dtype) {
        return Fail(Errc::kUnsupported, at, ": parameters of type ", Name(dtype),
                    " expected, found ", pickle::Describe(entry->key(0)));
      }
      std::vector<LocalName> same;
      for (const std::size_t i : buffer.params) same.push_back(names[i]);
      SW_TRY(ReadBuffer(rank, chunk, same, entry->value(0), experts, elems));
    }
  }
  if (FindInt(root, index) != nullptr) {
    return Fail(Errc::kBadInput, where, ": ", index, " buffers expected, found more");
  }
  return {};
}

Status Legacy::ReadBuffer(std::size_t rank, std::uint64_t chunk,
                          const std::vector<LocalName>& names, const Node* entry, bool experts,
                          std::uint64_t elems) {
  const RankFiles& files = ranks_[rank];
  const std::string& where = NameOf(*files.optimizer);
  std::vector<BufferParam> params;
  params.reserve(names.size());
  for (const LocalName& name : names) {
    params.push_back({Elems(name.node->tensor->shape), name.shared});
  }
  const Buffer buffer = LayOut(params, BucketRuleOf(args_, files.p, chunk, elems, experts));
  if (!entry->is_dict()) {
    return Fail(Errc::kBadInput, where, ": dict expected, found ", pickle::Describe(entry));
  }
  SW_TRY_ASSIGN(const std::uint64_t told, pickle::AsCount(entry->Find("numel_unpadded")));
  if (told != buffer.stored()) {
    return Fail(Errc::kUnsupported, where, ": a buffer of ", buffer.stored(),
                " elements expected, found ", told,
                ": the run arguments do not explain the positions of the parameters in it");
  }
  for (std::size_t i = 0; i < entry->entry_count(); ++i) {
    SW_TRY_ASSIGN(const std::string_view key, pickle::AsString(entry->key(i)));
    if (key == "numel_unpadded") continue;
    SW_TRY_ASSIGN(const Place place,
                  collector_.map.PlaceOf(*files.optimizer, *files.optimizer_document,
                                         entry->value(i), std::string(key)));
    if (place.elems != told) {
      return Fail(Errc::kBadInput, where, ": ", key, ": ", told, " elements expected, found ",
                  place.elems);
    }
    const std::string_view state = key == "param" ? layout::kMaster : key;
    if (state == layout::kMaster) SW_TRY(CheckMasters(args_, place.dtype, false, where));
    const std::uint32_t array = collector_.map.AddWhole(place);
    for (std::size_t n = 0; n < names.size(); ++n) {
      // Float32 weights are their own master weights.
      if (state == layout::kMaster && names[n].node->tensor->dtype == DType::kF32) continue;
      SW_TRY(AddShard(rank, names[n], state, place.dtype, array, buffer.stored_offset(n)));
      if (state == layout::kMaster && !names[n].copy) {
        NoteInferred(collector_.by_name.at(names[n].name));
      }
    }
  }
  return {};
}

}  // namespace shardwright::checkpoints::megatron
