// SPDX-License-Identifier: Apache-2.0
// lib/engine/device: the memory of a rank's device, and operations that move its bytes.
// One interface has two backends. The host backend (host.h) is always available:
// ordinary and shared memory, and collectives over lib/support/comm. The CUDA
// backend (cuda/) is a plugin loaded on request, so no program links CUDA or NCCL.
// Callers rely only on the weaker guarantees of the CUDA backend: queued work may
// run late, and bytes may be accessed only after the matching wait returned.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device {

enum class Kind : std::uint8_t { kHost, kCuda };

/// Returns the name of a kind: "host", "cuda".
std::string_view Name(Kind kind);

/// Inverse of Name. \error kUsage  the name is unknown; the message lists the valid names
Result<Kind> ParseKind(std::string_view name);

enum class Place : std::uint8_t {
  kPageable,  ///< ordinary memory of this process
  kPinned,    ///< memory of this process that the device copies from and to directly
  kShared,    ///< device memory that other processes may map: Device::Export
  kDevice,    ///< device memory; on the host backend ordinary memory
};

/// Memory that its destructor frees. Queued work that accesses it must have ended before.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  virtual ~Buffer() = default;

  virtual Place place() const = 0;
  /// Returns the first byte, aligned to 256 bytes. Only the device can access kDevice memory.
  virtual std::byte* data() const = 0;
  virtual std::uint64_t size() const = 0;
};

/// Identifies a shared buffer to another process that maps it. On the host backend it is a
/// descriptor that the caller must pass to that process; on the CUDA backend it is a token.
struct Handle {
  Kind kind = Kind::kHost;
  std::uint64_t bytes = 0;
  int descriptor = -1;  ///< owned by the exported buffer; Import takes ownership of its copy
  std::string token;
};

/// A point in a stream. It may outlive the stream.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;

  /// Waits until all work queued before the event has ended.
  /// \error kIo  the work failed, or exceeded the deadline of its device
  virtual Status Wait() const = 0;
};

/// Runs work in order. A call queues work and returns. Its memory must stay
/// valid until a wait for the stream. An error of queued work is returned by a
/// later call, at the latest by Synchronize. For one thread at a time. Local.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  /// Waits for all queued work.
  virtual ~Stream() = default;

  /// Copies bytes between memory of any place.
  virtual Status Copy(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;

  virtual Result<std::unique_ptr<Event>> Record() = 0;

  /// Waits for all queued work. \error kIo  some of it failed or exceeded the deadline
  virtual Status Synchronize() = 0;
};

/// The ranks of one group, each with a device. All ranks of the communicator that it was made from
/// must make the same calls in the same order, each for its own group, with sizes that match on all
/// ranks. Calls queue work on a stream like other work and use memory of the device. On the CUDA
/// backend a failure on one rank ends the calls of the others with an error: at once if NCCL
/// reports it to them, otherwise at their deadline. Collective.
class Collective {
 public:
  Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;
  virtual ~Collective() = default;

  virtual int rank() const = 0;  ///< in the group
  virtual int size() const = 0;  ///< of the group

  /// Concatenates the parts of all ranks in `to`, in rank order; rank r
  /// contributes bytes[r]. A rank's own part may already be at its place in `to`.
  /// \pre bytes.size() == size()
  virtual Status AllGather(Stream& stream, std::byte* to, const std::byte* from,
                           std::span<const std::uint64_t> bytes) = 0;
};

struct DeviceOptions {
  /// Index of the device on this node. If absent, the number of ranks
  /// of this node before this one, modulo the number of devices.
  std::optional<int> ordinal;
  /// Maximum duration of a wait for queued work, including collectives, before it fails.
  std::chrono::milliseconds deadline = std::chrono::minutes(5);
};

/// A device. All objects that it creates must be destroyed before it.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual Kind kind() const = 0;
  /// Returns a name for messages: "host", "cuda:3 NVIDIA H100 80GB HBM3".
  virtual std::string name() const = 0;

  /// Returns the free bytes of device memory. \error kIo
  virtual Result<std::uint64_t> FreeBytes() const = 0;

  /// \pre bytes > 0
  /// \error kLimit  out of memory; the message has the requested and the free bytes
  virtual Result<std::unique_ptr<Buffer>> Allocate(Place place, std::uint64_t bytes) = 0;

  /// Makes a handle for other processes of this node and user. \pre the place is kShared
  virtual Result<Handle> Export(const Buffer& buffer) = 0;

  /// Maps a buffer that another process has exported.
  /// \error kBadInput  a handle of another kind or size; kIo  the exporting process has ended
  virtual Result<std::unique_ptr<Buffer>> Import(Handle handle) = 0;

  virtual Result<std::unique_ptr<Stream>> MakeStream() = 0;

  /// Makes the collectives of this rank's group.
  /// \param group  group number of every rank of `comm`; ranks
  ///        with the same number form a group, in rank order
  /// \pre group.size() == comm.size(), the same on all ranks; `comm` outlives the result
  /// Collective.
  virtual Result<std::unique_ptr<Collective>> MakeCollective(comm::Comm& comm,
                                                             std::span<const int> group) = 0;
};

/// Opens a device. For CUDA, loads the plugin from SHARDWRIGHT_CUDA
/// if it is set, otherwise from the folder of the library or program.
/// \error kNotFound  the message names the missing part (plugin, driver or
///        device) and the place of the search; kUsage  no device has that ordinal
/// Collective, because the ranks of a node share its devices.
Result<std::unique_ptr<Device>> OpenDevice(Kind kind, comm::Comm& comm,
                                           const DeviceOptions& options = {});

}  // namespace shardwright::device
