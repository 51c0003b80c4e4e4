// SPDX-License-Identifier: Apache-2.0
#include "trainer/cache/staging.h"

#include <utility>

#include "engine/plan/plan.h"

namespace shardwright::cache {

constexpr unsigned kSlotsPerThread = 2;

std::uint64_t Staging::Bytes(unsigned threads) {
  return std::uint64_t{threads} * kSlotsPerThread * plan::kUnitBytes;
}

Result<std::unique_ptr<Staging>> Staging::Make(device::Device& device, device::Stream& stream,
                                               unsigned threads, Place place) {
  std::unique_ptr<Staging> staging(new Staging(stream, std::move(place)));
  for (unsigned i = 0; i < threads * kSlotsPerThread; ++i) {
    Slot slot;
    SW_TRY_ASSIGN(slot.memory, device.Allocate(device::Place::kPinned, plan::kUnitBytes));
    staging->slots_.push_back(std::move(slot));
  }
  return staging;
}

Result<std::span<std::byte>> Staging::Buffer(const plan::Unit&, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  // Each thread fills at most one slot, so at least half of the slots are not being filled.
  Slot* oldest = nullptr;
  for (Slot& slot : slots_) {
    if (!slot.filling && (oldest == nullptr || slot.since < oldest->since)) oldest = &slot;
  }
  if (oldest == nullptr) return Fail(Errc::kInternal, "more threads than staging slots");
  if (oldest->copied) SW_TRY(oldest->copied->Wait());
  oldest->copied.reset();
  oldest->filling = true;
  return std::span(oldest->memory->data(), bytes);
}

Status Staging::Put(const exec::UnitInHand& unit) {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    if (slot.memory->data() != unit.bytes.data()) continue;
    slot.filling = false;
    slot.since = ++count_;
    SW_TRY(stream_.Copy(place_(unit.unit), unit.bytes.data(), unit.bytes.size()));
    SW_TRY_ASSIGN(slot.copied, stream_.Record());
    return {};
  }
  return Fail(Errc::kInternal, "a unit is not in a staging slot");
}

}  // namespace shardwright::cache
