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

/// Copies units to device memory. Gathers a unit in pinned memory while a
/// stream copies other units. Threads share the slots of the pinned memory.
class Staging final : public exec::UnitSink {
 public:
  /// Returns the address of a unit in device memory.
  using Place = std::function<std::byte*(const plan::Unit&)>;

  /// \param threads  number of gathering threads; each gets two slots of a unit's size
  /// \pre device and stream outlive it
  /// \error as Device::Allocate
  static Result<std::unique_ptr<Staging>> Make(device::Device& device, device::Stream& stream,
                                               unsigned threads, Place place);

  /// Returns the number of bytes of pinned memory that it uses.
  static std::uint64_t Bytes(unsigned threads);

  /// Waits for queued copies, which read the slots.
  ~Staging() override { static_cast<void>(stream_.Synchronize()); }

  bool sums() const override { return false; }
  Result<std::span<std::byte>> Buffer(const plan::Unit& unit, std::uint64_t bytes) override;
  Status Put(const exec::UnitInHand& unit) override;
  Status Drain() override { return stream_.Synchronize(); }

 private:
  struct Slot {
    std::unique_ptr<device::Buffer> memory;
    std::unique_ptr<device::Event> copied;  // null: nothing was copied from it yet
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

/// Gathers units directly at their final address in host memory.
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
