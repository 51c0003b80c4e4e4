// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/buckets.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "support/base/checked.h"

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::uint64_t kParamMultiple = 64;
constexpr std::uint64_t kBucketMultiple = 128;
constexpr std::uint64_t kNetworkMultiple = 65536;
constexpr std::uint64_t kLeastElems = 40'000'000;
constexpr std::uint64_t kElemsPerRank = 1'000'000;

std::uint64_t RoundUp(std::uint64_t value, std::uint64_t multiple) {
  return CeilDiv(value, multiple) * multiple;
}

/// Lays out parameters one by one. `elems` counts the elements of the open bucket.
class Walk {
 public:
  Walk(std::size_t params, const BucketRule& rule) : rule_(rule) {
    out_.offsets.resize(params);
    out_.bucket_of.resize(params);
  }

  std::uint64_t elems() const { return at_; }
  std::size_t closed() const { return out_.unpadded.size(); }

  void Add(std::size_t param, const BufferParam& what) {
    at_ = RoundUp(at_, kParamMultiple);
    if (what.shared && any_) Close();
    out_.offsets[param] = at_;
    out_.bucket_of[param] = static_cast<std::uint32_t>(out_.unpadded.size());
    at_ += what.elems;
    any_ = true;
  }

  void Close() {
    if (!any_) return;
    out_.unpadded.push_back(at_);
    std::uint64_t multiple = std::lcm(std::max<std::uint64_t>(rule_.shards, 1), kBucketMultiple);
    if (rule_.pad_for_network) multiple = std::lcm(multiple, kNetworkMultiple);
    out_.padded.push_back(RoundUp(at_, multiple));
    at_ = 0;
    any_ = false;
  }

  Buffer Take() {
    Close();
    return std::move(out_);
  }

 private:
  const BucketRule& rule_;
  Buffer out_;
  std::uint64_t at_ = 0;
  bool any_ = false;
};

}  // namespace

std::uint64_t Buffer::stored() const {
  return std::accumulate(unpadded.begin(), unpadded.end(), std::uint64_t{0});
}

std::uint64_t Buffer::stored_offset(std::size_t param) const {
  const auto before = unpadded.begin() + bucket_of[param];
  return std::accumulate(unpadded.begin(), before, offsets[param]);
}

Buffer LayOut(std::span<const BufferParam> params, const BucketRule& rule) {
  Walk walk(params.size(), rule);
  for (std::size_t i = params.size(); i-- > 0;) {
    walk.Add(i, params[i]);
    if ((rule.elems && walk.elems() >= *rule.elems) || params[i].shared) walk.Close();
  }
  return walk.Take();
}

Result<Buffer> LayOutIn(std::span<const BufferParam> params,
                        std::span<const std::uint64_t> unpadded) {
  const BucketRule rule;
  Walk walk(params.size(), rule);
  for (std::size_t i = params.size(); i-- > 0;) {
    walk.Add(i, params[i]);
    const bool full = walk.closed() < unpadded.size() && walk.elems() >= unpadded[walk.closed()];
    if (full || params[i].shared) walk.Close();
  }
  Buffer buffer = walk.Take();
  if (std::equal(buffer.unpadded.begin(), buffer.unpadded.end(), unpadded.begin(),
                 unpadded.end())) {
    return buffer;
  }
  const auto text = [](std::span<const std::uint64_t> list) {
    std::string all;
    for (const std::uint64_t one : list) all += (all.empty() ? "" : ", ") + std::to_string(one);
    return "[" + all + "]";
  };
  return Fail(Errc::kBadInput, "the parameters require buckets of ", text(buffer.unpadded),
              " elements, found buckets of ", text(unpadded));
}

std::vector<BufferOf> BuffersOf(std::span<const DType> types) {
  std::vector<BufferOf> buffers;
  for (std::size_t i = 0; i < types.size(); ++i) {
    auto at = std::find_if(buffers.begin(), buffers.end(),
                           [&](const BufferOf& one) { return one.dtype == types[i]; });
    if (at == buffers.end()) at = buffers.insert(at, {types[i], {}});
    at->params.push_back(i);
  }
  return buffers;
}

DType GradientType(const Args& args, DType dtype) {
  return args.gradients_in_f32.value_or(dtype != DType::kF16) ? DType::kF32 : dtype;
}

Status CheckLoadable(std::span<const BufferParam> params, const Buffer& buffer,
                     std::uint64_t shards) {
  std::vector<std::vector<bool>> has(buffer.unpadded.size(), std::vector<bool>(shards, false));
  for (std::size_t i = 0; i < params.size(); ++i) {
    const std::uint32_t bucket = buffer.bucket_of[i];
    const std::uint64_t each = buffer.padded[bucket] / shards;
    const std::uint64_t end = buffer.offsets[i] + params[i].elems;
    for (std::uint64_t rank = buffer.offsets[i] / each; rank * each < end; ++rank) {
      has[bucket][rank] = true;
    }
  }
  for (std::size_t bucket = 0; bucket < has.size(); ++bucket) {
    const auto lacks = std::find(has[bucket].begin(), has[bucket].end(), false);
    if (lacks == has[bucket].end()) continue;
    return Fail(Errc::kUnsupported, "bucket ", bucket, " of ", buffer.unpadded[bucket],
                " elements: rank ", lacks - has[bucket].begin(), " of ", shards,
                " data-parallel ranks has no parameter in it, which Megatron-Core cannot "
                "load: choose another dp or bucket, or fully_reshardable");
  }
  return {};
}

BucketRule BucketRuleOf(const Args& args, std::uint64_t stage, std::uint64_t chunk,
                        std::uint64_t elems, bool experts) {
  const std::uint64_t ranks = args.dp * args.cp;
  BucketRule rule;
  rule.pad_for_network = args.pad_buckets;
  rule.shards = ranks;
  if (experts) rule.shards = std::max<std::uint64_t>(ranks * args.tp / (args.ep * args.etp), 1);
  if (!args.overlap_grad_reduce || args.unlimited_buckets || stage > 0 || chunk > 0) return rule;
  if (args.bucket_count && *args.bucket_count > 0) {
    rule.elems = elems / *args.bucket_count;
  } else {
    rule.elems = args.bucket_elems.value_or(std::max(kLeastElems, kElemsPerRank * ranks));
  }
  return rule;
}

}  // namespace shardwright::checkpoints::megatron
