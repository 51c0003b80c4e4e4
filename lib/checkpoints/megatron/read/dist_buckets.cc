// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "checkpoints/megatron/names.h"
#include "checkpoints/megatron/read/dist_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"

// dp_reshardable: each bucket of each gradient buffer is a tensor of one dimension. The
// reader computes the positions of parameters from the model, and the weights confirm them.

namespace shardwright::checkpoints::megatron {

using pickle::Node;

namespace {

/// Formats the types of a buffer's parameters as "(torch.bfloat16, torch.float32)".
std::string TypesText(const Node* key) {
  std::string text;
  for (const Node* item : key->items) text += (text.empty() ? "(" : ", ") + item->text;
  return text + ")";
}

std::optional<DType> ParamType(std::string_view types) {
  constexpr std::string_view kTorch = "(torch.";
  if (!types.starts_with(kTorch)) return std::nullopt;
  types.remove_prefix(kTorch.size());
  return DTypeFromName(types.substr(0, types.find(',')));
}

}  // namespace

Status Dist::ReadBuckets() {
  if (form_ != OptimizerForm::kDpReshardable) {
    if (buckets_.empty()) return {};
    return Fail(Errc::kUnsupported, "\"", buckets_.begin()->first,
                "\": a bucket, but the optimizer's state has another form");
  }
  if (args_.hybrid) {
    return Fail(Errc::kUnsupported, tag(),
                ": buckets of hybrid models (layers of several kinds) are not supported");
  }
  if (Status stages = CheckMtpStages(args_); !stages) return Within(tag(), stages.error());
  BucketKey key;
  key.chained = FindInt(common_.value->Find("optimizer"), 0) != nullptr;
  order_ = ModelOrder(collector_.out.params);
  std::uint64_t read = 0;
  for (key.part = 0; key.part < (key.chained ? 2U : 1U); ++key.part) {
    key.group = 0;
    for (const Rank& rank : BufferRanks(args_, key.part == 1)) {
      SW_TRY(ReadBufferGroup(key, key.part == 1, rank));
      ++key.group;
      ++read;
    }
  }
  std::set<std::pair<std::uint64_t, std::uint64_t>> there;
  for (const auto& [name, entry] : buckets_) {
    const BucketKey found = *ParseBucketKey(name);
    there.insert({found.part, found.group});
  }
  if (there.size() != read) {
    return Fail(Errc::kBadInput, tag(), ": buckets of ", read,
                " ranks expected by the run arguments, found ", there.size());
  }
  Inferred& inferred = collector_.out.inferred;
  std::sort(inferred.params.begin(), inferred.params.end());
  inferred.params.erase(std::unique(inferred.params.begin(), inferred.params.end()),
                        inferred.params.end());
  return {};
}

/// Returns a rank's parameters of a virtual chunk, in model order.
Result<std::vector<Buffered>> Dist::BufferedOf(bool chained, bool experts, const Rank& rank,
                                               std::uint64_t chunk) {
  SW_TRY_ASSIGN(const std::vector<Stage> stages, StagesOf(args_));
  const std::vector<Param>& params = collector_.out.params;
  std::vector<Buffered> all;
  for (const Holding& held : HoldingsOf(args_, stages, params, order_, rank, chunk)) {
    const Param& param = params[held.param];
    if (param.kind != ParamKind::kTrainable) continue;
    if (chained && IsExpert(param) != experts) continue;
    Buffered one;
    one.param = held.param;
    one.ranks = RanksOf(args_, param.name);
    one.rank = rank.t;
    one.copy = held.copy;
    SW_TRY_ASSIGN(const std::vector<Part> parts,
                  PartsOf(collector_.wholes[held.param], one.ranks, one.rank));
    for (const Part& part : parts) one.what.elems += part.cut->shard_elems();
    one.what.shared = held.shared;
    all.push_back(one);
  }
  return all;
}

Status Dist::ReadBufferGroup(BucketKey key, bool experts, const Rank& rank) {
  for (std::uint64_t chunk = 0; chunk < args_.vpp; ++chunk) {
    SW_TRY_ASSIGN(const std::vector<Buffered> params,
                  BufferedOf(key.chained, experts, rank, chunk));
    std::vector<DType> types;
    types.reserve(params.size());
    for (const Buffered& one : params) types.push_back(collector_.out.params[one.param].dtype);
    for (const BufferOf& buffer : BuffersOf(types)) {
      std::vector<Buffered> same;
      for (const std::size_t i : buffer.params) same.push_back(params[i]);
      SW_TRY(ReadBuffer(key, same));
      ++key.buffer;
    }
  }
  return {};
}

/// Reads the numbers of elements in a buffer's buckets from the checkpoint.
/// \param key  buffer to read; its types must match
Result<std::vector<std::uint64_t>> Dist::BucketSizes(const BucketKey& key) {
  BucketKey object = key;
  object.dtypes.clear();
  object.slot = "per_bucket_numel_unpadded";
  const std::string name = BucketKeyText(object) + "/shard_0_1";
  const auto found = objects_.find(name);
  if (found == objects_.end())
    return Fail(Errc::kUnsupported, tag(), ": \"", name, "\" is missing");
  SW_TRY_ASSIGN(const Object sizes, ObjectAt(found->second->at));
  const auto item = [](const Node* list, std::uint64_t at) -> const Node* {
    return list != nullptr && list->is_list() && at < list->items.size() ? list->items[at]
                                                                         : nullptr;
  };
  const Node* buffer = item(item(sizes.value, 0), key.buffer);
  const bool one = buffer != nullptr && buffer->is_dict() && buffer->entry_count() == 1;
  if (!one || buffer->key(0)->kind != pickle::Kind::kTuple) {
    return Fail(Errc::kBadInput, "\"", name, "\": no sizes of buffer ", key.buffer);
  }
  if (TypesText(buffer->key(0)) != key.dtypes) {
    return Fail(Errc::kUnsupported, "\"", name, "\": buffer ", key.buffer, ": types ", key.dtypes,
                " expected, found ", TypesText(buffer->key(0)));
  }
  auto shape = pickle::AsShape(buffer->value(0));
  if (!shape) return Within("\"" + name + "\"", shape.error());
  return *std::move(shape);
}

Status Dist::ReadBuffer(const BucketKey& wanted, std::span<const Buffered> params) {
  BucketKey key = wanted;
  const DType dtype = collector_.out.params[params.front().param].dtype;
  std::map<std::uint64_t, std::vector<std::pair<std::string, const dcp::Entry*>>> slots;
  for (const auto& [name, entry] : buckets_) {
    BucketKey parsed = *ParseBucketKey(name);
    if (parsed.part != key.part || parsed.group != key.group || parsed.buffer != key.buffer) {
      continue;
    }
    key.dtypes = parsed.dtypes;
    slots[parsed.bucket].emplace_back(std::move(parsed.slot), entry);
  }
  if (slots.empty() || ParamType(key.dtypes) != dtype) {
    return Fail(Errc::kBadInput, tag(), ": no buckets for parameters of ", Name(dtype), " of rank ",
                key.group, ", buffer ", key.buffer);
  }
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> sizes, BucketSizes(key));
  std::vector<BufferParam> what;
  for (const Buffered& one : params) what.push_back(one.what);
  auto buffer = LayOutIn(what, sizes);
  if (!buffer) {
    return Within(StrCat(tag(), ": rank ", key.group, " of the distributed optimizer"),
                  buffer.error());
  }
  for (std::uint64_t bucket = 0; bucket < sizes.size(); ++bucket) {
    for (const auto& [slot, entry] : slots[bucket]) {
      if (entry->shape != Shape{sizes[bucket]}) {
        return Fail(Errc::kBadInput, "\"", entry->name, "\": [", sizes[bucket],
                    "] expected, found ", ToString(entry->shape));
      }
      SW_TRY(ReadBucket(*entry, slot, bucket, params, *buffer));
    }
  }
  return {};
}

/// Assigns the chunks of a bucket to its parameters.
Status Dist::ReadBucket(const dcp::Entry& entry, std::string_view slot, std::uint64_t bucket,
                        std::span<const Buffered> params, const Buffer& buffer) {
  struct Begin {
    std::uint64_t first = 0;
    std::size_t param = 0;
  };
  std::vector<Begin> in_bucket;  // parameters, by start offset
  for (std::size_t i = 0; i < params.size(); ++i) {
    if (buffer.bucket_of[i] == bucket) in_bucket.push_back({buffer.offsets[i], i});
  }
  std::sort(in_bucket.begin(), in_bucket.end(),
            [](const Begin& a, const Begin& b) { return a.first < b.first; });
  const bool master = slot == "param";
  if (master) SW_TRY(CheckMasters(args_, entry.dtype, false, "\"" + entry.name + "\""));
  const std::string_view state = master ? layout::kMaster : slot;
  for (const dcp::Chunk& chunk : entry.chunks) {
    if (chunk.is_empty()) continue;
    const std::uint64_t first = chunk.offsets[0];
    const std::uint64_t last = first + chunk.sizes[0];
    auto next = std::upper_bound(in_bucket.begin(), in_bucket.end(), first,
                                 [](std::uint64_t at, const Begin& one) { return at < one.first; });
    if (next != in_bucket.begin()) --next;
    std::optional<layout::Placement> at;
    for (; next != in_bucket.end() && next->first < last; ++next) {
      const Buffered& one = params[next->param];
      const std::uint64_t from = std::max(first, next->first);
      const std::uint64_t to = std::min(last, next->first + one.what.elems);
      if (from >= to) continue;
      const Param& param = collector_.out.params[one.param];
      // Float32 weights are their own master weights. Of equal copies the first is sufficient.
      if (master && param.dtype == DType::kF32) continue;
      const auto& rule = collector_.wholes[one.param].rule;
      if (one.copy || layout::FirstCopy(rule, one.ranks, one.rank) != one.rank) continue;
      if (!at) {
        SW_TRY_ASSIGN(const Place place, TensorAt(entry, chunk));
        at.emplace();
        at->array = collector_.map.AddWhole(place);
      }
      layout::Placement here = *at;
      here.vector_offset += from - first;
      SW_TRY(collector_.AddRange(one.param, state, entry.dtype, here, one.ranks, one.rank,
                                 from - next->first, to - next->first));
      if (master) collector_.out.inferred.params.push_back(one.param);
    }
  }
  if (master)
    collector_.out.inferred.why =
        "gradient buckets have no parameter names, so parameters are expected in the reverse order "
        "of the model";
  return {};
}

}  // namespace shardwright::checkpoints::megatron
