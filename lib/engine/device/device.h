// SPDX-License-Identifier: Apache-2.0
// lib/engine/device: the memory of the device that a rank drives, and what moves and changes bytes
// there. One seam with two twins. The host twin (host.h) is always there: ordinary memory, memory
// that other processes can map, collectives over lib/support/comm. The cuda twin (cuda/) is a
// plugin that is opened only when it is asked for: nothing links CUDA or NCCL. Code above the seam
// is written for the weaker promises of the cuda twin, and so is right on both: what is queued may
// run late, and bytes may be touched only after the wait that says so.

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

#include "engine/tensor/dtype.h"
#include "support/base/result.h"
#include "support/comm/comm.h"

namespace shardwright::device {

enum class Kind : std::uint8_t { kHost, kCuda };

/// "host", "cuda".
std::string_view Name(Kind kind);

/// The kind of such a name. \error kUsage  there is none; says which there are
Result<Kind> ParseKind(std::string_view name);

enum class Place : std::uint8_t {
  kPageable,  ///< ordinary memory of this process
  kPinned,    ///< memory of this process that a device copies from and to without a detour
  kShared,    ///< memory of the device that other processes may map: Device::Export
  kDevice,    ///< memory of the device; on the host twin ordinary memory
};

/// Memory, given back with the object. What is queued that touches it has to have ended by then.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  virtual ~Buffer() = default;

  virtual Place place() const = 0;
  /// Its first byte, aligned to 256 bytes. Of device memory an address that only the device reads.
  virtual std::byte* data() const = 0;
  virtual std::uint64_t size() const = 0;
};

/// What another process needs to map a shared buffer. Host twin: a descriptor, which has to reach
/// that process by itself; cuda twin: a token.
struct Handle {
  Kind kind = Kind::kHost;
  std::uint64_t bytes = 0;
  int descriptor = -1;  ///< belongs to the buffer that was exported; Import takes it over
  std::string token;
};

/// A point in a stream. It outlives the stream.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;

  /// True when all that was queued before it has ended. \error kIo  it has failed
  virtual Result<bool> Ended() const = 0;
  /// Waits for that. \error kIo  it has failed, or not ended within the deadline of its device
  virtual Status Wait() const = 0;
};

/// A run of bytes that moves: `bytes` from `from`, to `to`, each counted from its buffer's start.
struct Run {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::uint64_t bytes = 0;
};

/// Work in order. A call queues and returns; memory given to it has to stay until the stream was
/// waited for. An error of queued work shows at a later call, at the latest in Synchronize. One
/// thread at a time. Local.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  /// Waits for what is queued.
  virtual ~Stream() = default;

  /// Copies between memory of any place.
  virtual Status Copy(std::byte* to, const std::byte* from, std::uint64_t bytes) = 0;

  /// Moves runs that do not overlap at their targets: gather, scatter and transposition of blocks.
  /// Both sides are memory that the device reaches: not pageable memory on the cuda twin. The runs
  /// themselves may go when the call has returned.
  virtual Status CopyRuns(std::byte* to, const std::byte* from, std::span<const Run> runs) = 0;

  /// Converts elements, as shardwright::Convert bit for bit. Memory as of CopyRuns.
  /// \pre CanConvert(from_type, to_type)
  virtual Status Convert(DType to_type, std::byte* to, DType from_type, const std::byte* from,
                         std::uint64_t elems) = 0;

  virtual Result<std::unique_ptr<Event>> Record() = 0;

  /// What is queued from now on begins after the event, which may be of another stream.
  virtual Status WaitFor(const Event& event) = 0;

  /// Waits for all that is queued. \error kIo  some of it has failed, or not ended in time
  virtual Status Synchronize() = 0;
};

/// The ranks of one group, each with a device. Collective: all ranks of the communicator that it
/// was made of make the same calls in the same order, each for its own group, with the sizes that
/// the others expect. Calls queue on a stream like all other work; memory is the device's.
class Collective {
 public:
  Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;
  virtual ~Collective() = default;

  virtual int rank() const = 0;  ///< in the group
  virtual int size() const = 0;  ///< of the group

  /// `to` becomes what the ranks give, in the order of their ranks, bytes[r] of rank r. A rank's
  /// own part may lie where it belongs in `to` already.
  /// \pre bytes.size() == size()
  virtual Status AllGather(Stream& stream, std::byte* to, const std::byte* from,
                           std::span<const std::uint64_t> bytes) = 0;

  /// `data` becomes that of `root`.
  virtual Status Broadcast(Stream& stream, std::byte* data, std::uint64_t bytes, int root) = 0;

  /// Sends out[r] to rank r and fills in[r] with what it sends, all at once; empty ones do not
  /// move.
  /// \pre both have size() entries
  virtual Status Exchange(Stream& stream, std::span<const std::span<const std::byte>> out,
                          std::span<const std::span<std::byte>> in) = 0;

  /// Sums what all ranks give, in the order of their ranks on the host twin and in any order on the
  /// cuda twin; `to` becomes this rank's of size() equal parts.
  /// \param elems  of one part
  /// \pre dtype is float64, float32, float16 or bfloat16
  virtual Status ReduceScatter(Stream& stream, std::byte* to, const std::byte* from,
                               std::uint64_t elems, DType dtype) = 0;

  /// Ends what is under way on this rank; every later call fails. For a rank that has failed while
  /// the others wait for it.
  virtual void Abort() = 0;
};

struct DeviceOptions {
  /// Which device of the node; nothing: as many as ranks of this node come before this one, modulo
  /// the devices that there are.
  std::optional<int> ordinal;
  /// How long a wait for queued work, collectives included, may take before it fails.
  std::chrono::milliseconds deadline = std::chrono::minutes(5);
};

/// A device. Everything made by it is destroyed before it.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual Kind kind() const = 0;
  /// For people: "host", "cuda:3 NVIDIA H100 80GB HBM3".
  virtual std::string name() const = 0;

  /// Bytes of device memory that are free now. \error kIo
  virtual Result<std::uint64_t> FreeBytes() const = 0;

  /// \pre bytes > 0
  /// \error kLimit  no memory: says how much was asked for and how much is free
  virtual Result<std::unique_ptr<Buffer>> Allocate(Place place, std::uint64_t bytes) = 0;

  /// How other processes of this node and user map a buffer. \pre its place is kShared
  virtual Result<Handle> Export(const Buffer& buffer) = 0;

  /// Maps what another process has exported.
  /// \error kBadInput  a handle of another kind or size; kIo  its process is gone
  virtual Result<std::unique_ptr<Buffer>> Import(Handle handle) = 0;

  virtual Result<std::unique_ptr<Stream>> MakeStream() = 0;

  /// The collectives of this rank's group.
  /// \param group  of every rank of `comm`: a number; ranks with the same number are a group, in
  ///        the order of their ranks
  /// \pre group.size() == comm.size(), the same on all ranks; `comm` outlives what is made
  /// Collective.
  virtual Result<std::unique_ptr<Collective>> MakeCollective(comm::Comm& comm,
                                                             std::span<const int> group) = 0;
};

/// Opens a device. For cuda the plugin is looked for beside the library or program, under
/// SHARDWRIGHT_CUDA if that names one.
/// \error kNotFound  no plugin, no driver or no device: says which, and what of; kUsage  an ordinal
///        that is not there
/// Collective, as ranks of a node share its devices.
Result<std::unique_ptr<Device>> OpenDevice(Kind kind, comm::Comm& comm,
                                           const DeviceOptions& options = {});

}  // namespace shardwright::device
