// SPDX-License-Identifier: Apache-2.0
#include "partial/restore/replay_bytes.h"

#include <algorithm>
#include <cstring>

#include "partial/store/read_blobs.h"

namespace shardwright::partial::restore {
ReplayBytes::ReplayBytes(std::unique_ptr<exec::ByteSource> blobs, const layout::ShardMap& map,
                         std::shared_ptr<const ReplayLog> log,
                         std::map<std::uint32_t, ReplayedMember> members, unsigned threads,
                         std::uint64_t room)
    : blobs_(std::move(blobs)),
      map_(map),
      log_(std::move(log)),
      members_(std::move(members)),
      threads_(threads),
      room_(room),
      reads_(log_->log) {
  // In the order of members, which is that of modules.
  std::map<const ReplayedModule*, std::size_t> numbers;
  std::vector<std::pair<const ReplayedModule*, std::map<Component, std::uint32_t>>> modules;
  for (const auto& [number, member] : members_) {
    const auto [found, news] = numbers.emplace(member.module.get(), modules.size());
    if (news) {
      modules.push_back({member.module.get(), {}});
      proofs_.push_back(std::make_unique<Proof>());
    }
    modules[found->second].second[member.component] = number;
    proofs_[found->second]->members.push_back(number);
    module_of_[number] = found->second;
  }
  for (std::size_t i = 0; i < modules.size(); ++i)
    AddModule(*modules[i].first, i, modules[i].second);
}

void ReplayBytes::AddModule(const ReplayedModule& module, std::size_t number,
                            const std::map<Component, std::uint32_t>& members) {
  for (std::size_t p = 0; p < module.params.size(); ++p) {
    const ReplayedParam& param = module.params[p];
    if (param.elems == 0) continue;
    Lane lane;
    lane.module = number;
    lane.elems = param.elems;
    lane.place = lanes_.empty() ? 0 : lanes_.back().place + lanes_.back().elems;
    lane.arrays.emplace_back(members.at(param.param.component), param.param.offset);
    for (const BlobTensor& state : param.states) {
      lane.arrays.emplace_back(members.at(state.component), state.offset);
    }
    for (std::size_t array = 0; array < lane.arrays.size(); ++array) {
      stretches_[lane.arrays[array].first].push_back(
          {lane.arrays[array].second, lanes_.size(), array});
    }
    lane.steps = StepsOf(module, p, *log_);
    // Each thread computes one with its gradient, and one may be cached.
    const std::uint64_t bytes = (lane.arrays.size() + 1) * sizeof(float) * (threads_ + 1);
    lane.range_elems = RangeOf(module, p, room_ / bytes);
    lanes_.push_back(std::move(lane));
  }
  for (const auto& [component, member] : members) {
    std::ranges::sort(stretches_[member], {}, &LanePosition::offset);
  }
}

const ReplayBytes::LanePosition* ReplayBytes::ByteRangeAt(std::uint32_t member,
                                                          std::uint64_t offset) const {
  const auto found = stretches_.find(member);
  if (found == stretches_.end()) return nullptr;
  const auto after = std::ranges::upper_bound(found->second, offset, {}, &LanePosition::offset);
  if (after == found->second.begin()) return nullptr;
  const LanePosition& stretch = *std::prev(after);
  const std::uint64_t bytes = lanes_[stretch.lane].elems * sizeof(float);
  return offset < stretch.offset + bytes ? &stretch : nullptr;
}

std::optional<std::uint64_t> ReplayBytes::PlaceOf(std::uint32_t member, std::uint64_t offset) {
  const LanePosition* const stretch = ByteRangeAt(member, offset);
  if (stretch == nullptr) return std::nullopt;
  return lanes_[stretch->lane].place + (offset - stretch->offset) / sizeof(float);
}

Status ReplayBytes::Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) {
  if (!members_.contains(member)) return blobs_->Read(member, offset, out);
  while (!out.empty()) {
    const LanePosition* const stretch = ByteRangeAt(member, offset);
    if (stretch == nullptr) {
      // These bytes are in no replayed tensor: verify the blob, then read it.
      SW_TRY(Prove(*proofs_[module_of_.at(member)]));
      const auto& all = stretches_.at(member);
      const auto next = std::ranges::upper_bound(all, offset, {}, &LanePosition::offset);
      const std::uint64_t count = next == all.end()
                                      ? out.size()
                                      : std::min<std::uint64_t>(out.size(), next->offset - offset);
      SW_TRY(blobs_->Read(member, offset, out.first(count)));
      offset += count;
      out = out.subspan(count);
      continue;
    }
    const Lane& lane = lanes_[stretch->lane];
    const std::uint64_t range_bytes = lane.range_elems * sizeof(float);
    const std::uint64_t at = offset - stretch->offset;
    SW_TRY_ASSIGN(const std::shared_ptr<const Range> range, Get({stretch->lane, at / range_bytes}));
    const std::uint64_t from = at % range_bytes;
    const std::uint64_t count =
        std::min<std::uint64_t>(out.size(), range->count * sizeof(float) - from);
    const auto values =
        std::as_bytes(std::span(range->values.get() + stretch->array * range->count, range->count));
    std::memcpy(out.data(), values.data() + from, count);
    offset += count;
    out = out.subspan(count);
  }
  return {};
}

Status ReplayBytes::Prove(Proof& proof) {
  const std::lock_guard lock(proof.mutex);
  if (proof.done) return proof.status;
  for (const std::uint32_t number : proof.members) {
    const ReplayedMember& member = members_.at(number);
    const layout::Member& in = map_.members[number];
    proof.status = VerifyBlob(*blobs_, number, map_.files[in.file] + ": " + in.name, member.blob,
                              member.payloads);
    if (!proof.status) break;
  }
  proof.done = true;
  return proof.status;
}

std::shared_ptr<ReplayBytes::Range> ReplayBytes::Find(const Key& key) {
  const std::lock_guard lock(mutex_);
  if (const auto found = kept_.find(key); found != kept_.end()) {
    recent_.splice(recent_.begin(), recent_, found->second.recent);
    return found->second.range;
  }
  const Lane& lane = lanes_[key.first];
  auto range = std::make_shared<Range>();
  range->count = std::min(lane.range_elems, lane.elems - key.second * lane.range_elems);
  range->bytes = range->count * lane.arrays.size() * sizeof(float);
  // Readers share ownership of a range: an evicted one is freed when they are done.
  while (!recent_.empty() && kept_bytes_ + range->bytes > room_) {
    const auto oldest = kept_.find(recent_.back());
    kept_bytes_ -= oldest->second.range->bytes;
    kept_.erase(oldest);
    recent_.pop_back();
  }
  recent_.push_front(key);
  kept_bytes_ += range->bytes;
  kept_[key] = {range, recent_.begin()};
  return range;
}

Result<std::shared_ptr<const ReplayBytes::Range>> ReplayBytes::Get(const Key& key) {
  const std::shared_ptr<Range> range = Find(key);
  const std::lock_guard lock(range->mutex);
  if (!range->done) {
    range->status = Make(key, range.get());
    range->done = true;
  }
  if (!range->status) return tl::unexpected<Error>(range->status.error());
  return std::shared_ptr<const Range>(range);
}

Status ReplayBytes::Make(const Key& key, Range* range) {
  const Lane& lane = lanes_[key.first];
  SW_TRY(Prove(*proofs_[lane.module]));
  const std::uint64_t first = key.second * lane.range_elems;
  range->values = std::make_unique_for_overwrite<float[]>(range->count * lane.arrays.size());
  std::vector<std::span<float>> arrays;
  for (std::size_t i = 0; i < lane.arrays.size(); ++i) {
    const auto& [member, offset] = lane.arrays[i];
    arrays.emplace_back(range->values.get() + i * range->count, range->count);
    SW_TRY(blobs_->Read(member, offset + first * sizeof(float),
                        std::as_writable_bytes(arrays.back())));
  }
  return MakeSteps(lane.steps, first, arrays, reads_, &gradients_.local());
}

}  // namespace shardwright::partial::restore
