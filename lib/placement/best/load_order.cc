// SPDX-License-Identifier: Apache-2.0
#include "placement/best/load_order_internal.h"

#include <algorithm>

namespace shardwright::placement::internal {

void LoadOrder::Assign(std::vector<double> loads) {
  load_ = std::move(loads);
  leaves_.assign(load_.size(), 0);
  order_.clear();
  for (std::uint32_t d = 0; d < load_.size(); ++d) order_.emplace_back(load_[d], d);
  std::sort(order_.begin(), order_.end());
}

void LoadOrder::Change(std::span<const DeviceLoad> changed) {
  constexpr std::size_t kFew = 8;  // faster one by one
  if (changed.size() > kFew) {
    Merge(changed);
  } else {
    for (const DeviceLoad& to : changed) Move(to);
  }
  for (const auto& [load, d] : changed) load_[d] = load;
}

// Moves one device to its new place, and the devices between both places by one.
void LoadOrder::Move(const DeviceLoad& to) {
  const DeviceLoad from(load_[to.second], to.second);
  const auto at = std::lower_bound(order_.begin(), order_.end(), from);
  if (to < from) {
    const auto place = std::lower_bound(order_.begin(), at, to);
    std::move_backward(place, at, at + 1);
    *place = to;
  } else {
    const auto end = std::lower_bound(at + 1, order_.end(), to);
    *std::move(at + 1, end, at) = to;
  }
}

void LoadOrder::Merge(std::span<const DeviceLoad> changed) {
  sorted_.assign(changed.begin(), changed.end());
  std::sort(sorted_.begin(), sorted_.end());
  for (const auto& [load, d] : changed) leaves_[d] = 1;
  merged_.clear();
  auto next = sorted_.begin();
  for (const DeviceLoad& stays : order_) {
    if (leaves_[stays.second] != 0) continue;
    while (next != sorted_.end() && *next < stays) merged_.push_back(*next++);
    merged_.push_back(stays);
  }
  merged_.insert(merged_.end(), next, sorted_.end());
  order_.swap(merged_);
  for (const auto& [load, d] : changed) leaves_[d] = 0;
}

}  // namespace shardwright::placement::internal
