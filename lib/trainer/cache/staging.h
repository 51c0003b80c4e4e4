// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/device/device.h"
#include "engine/exec/units.h"
#include "support/base/result.h"

namespace shardwright::cache {

/// Brings units to the memory of a device: gathered in pinned memory, copied by a stream while
/// others are gathered. Threads share the slots of that memory.
class Staging final : public exec::UnitSink {
 public:
  /// Where a unit goes, in memory of the device.
  using Place = std::function<std::byte*(const plan::Unit&)>;

  /// \param threads  that gather; there are two slots of a unit's size for each
  /// \pre device and stream outlive it
  /// \error as Device::Allocate
  static Result<std::unique_ptr<Staging>> Make(device::Device& device, device::Stream& stream,
                                               unsigned threads, Place place);

  /// Bytes of pinned memory that it takes.
  static std::uint64_t Bytes(unsigned threads);

  bool sums() const override { return false; }
  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override;
  Status Put(const exec::UnitInHand& unit) override;
  Status Drain() override { return stream_.Synchronize(); }

 private:
  struct Slot {
    std::unique_ptr<device::Buffer> memory;
    std::unique_ptr<device::Event> copied;  // null: nothing was copied out of it
    bool filling = false;
    std::uint64_t since = 0;
  };
  Staging(device::Stream& stream, Place place) : stream_(stream), place_(std::move(place)) {}

  device::Stream& stream_;
  const Place place_;
  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::uint64_t count_ = 0;
};

/// Units that are gathered where they stay.
class InPlace final : public exec::UnitSink {
 public:
  explicit InPlace(Staging::Place place) : place_(std::move(place)) {}
  bool sums() const override { return false; }
  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override {
    return std::span(place_(unit), bytes);
  }
  Status Put(const exec::UnitInHand&) override { return {}; }

 private:
  const Staging::Place place_;
};

}  // namespace shardwright::cache
