// SPDX-License-Identifier: Apache-2.0
#include "engine/device/host.h"

#include <cstring>
#include <utility>

namespace shardwright::device {
namespace {

/// An event of a host stream: the work has ended before the event is created.
class PastEvent final : public Event {
 public:
  Status Wait() const override { return {}; }
};

class HostStream final : public Stream {
 public:
  Status Copy(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
    return {};
  }

  Result<std::unique_ptr<Event>> Record() override {
    return std::unique_ptr<Event>(std::make_unique<PastEvent>());
  }
  Status Synchronize() override { return {}; }
};

class HostDevice final : public Device {
 public:
  Kind kind() const override { return Kind::kHost; }
  std::string name() const override { return "host"; }
  Result<std::uint64_t> FreeBytes() const override { return FreeHostBytes(); }
  Result<std::unique_ptr<Buffer>> Allocate(Place place, std::uint64_t bytes) override {
    return AllocateHost(place, bytes);
  }
  Result<Handle> Export(const Buffer& buffer) override { return ExportHost(buffer); }
  Result<std::unique_ptr<Buffer>> Import(Handle handle) override { return ImportHost(handle); }
  Result<std::unique_ptr<Stream>> MakeStream() override {
    return std::unique_ptr<Stream>(std::make_unique<HostStream>());
  }
  Result<std::unique_ptr<Collective>> MakeCollective(comm::Comm& comm,
                                                     std::span<const int> group) override {
    return MakeHostCollective(comm, group);
  }
};

}  // namespace

Result<std::unique_ptr<Device>> OpenHostDevice(comm::Comm& comm, const DeviceOptions& options) {
  Status there;
  if (options.ordinal.value_or(0) != 0) {
    there =
        Fail(Errc::kUsage, "device host:", *options.ordinal, ": the only host device is number 0");
  }
  SW_TRY(comm.Agree(std::move(there)));
  return std::unique_ptr<Device>(std::make_unique<HostDevice>());
}

}  // namespace shardwright::device
