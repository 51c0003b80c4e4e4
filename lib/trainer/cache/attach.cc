// SPDX-License-Identifier: Apache-2.0
#include "trainer/cache/attach.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <tbb/enumerable_thread_specific.h>

#include "engine/device/device.h"
#include "support/json/json.h"
#include "support/os/net/answer.h"
#include "trainer/cache/map_json.h"
#include "trainer/cache/server.h"

namespace shardwright::cache {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kReachTick(100);
/// Time limit for a cache that sends nothing during a transfer.
constexpr milliseconds kReachTimeout(60'000);

/// One copy of a file in memory: its process and its offset in the process's buffer.
struct Copy {
  std::uint32_t process = 0;
  std::uint64_t at = 0;
};

/// The parsed description of a cache.
struct Description {  // NOLINT(bugprone-exception-escape): JSON's moves do not throw
  device::Kind kind = device::Kind::kHost;
  json told;
  std::vector<device::Handle> buffers;  // by process, without descriptors
  std::vector<std::uint64_t> file_bytes;
  std::vector<std::vector<Copy>> copies;  // by file
  layout::ShardMap map;
};

/// Reads members directly from mapped memory.
class MappedBytes final : public exec::ByteSource {
 public:
  MappedBytes(const layout::ShardMap& map, std::unique_ptr<device::Device> device,
              std::vector<std::unique_ptr<device::Buffer>> buffers, std::vector<Copy> files)
      : map_(map),
        device_(std::move(device)),
        buffers_(std::move(buffers)),
        files_(std::move(files)) {}

  Status Read(std::uint32_t member, std::uint64_t offset, std::span<std::byte> out) override {
    const layout::Member& at = map_.members[member];
    const Copy& copy = files_[at.file];
    std::unique_ptr<device::Stream>& stream = streams_.local();
    if (stream == nullptr) {
      SW_TRY_ASSIGN(stream, device_->MakeStream());
    }
    SW_TRY(stream->Copy(out.data(), buffers_[copy.process]->data() + copy.at + at.offset + offset,
                        out.size()));
    SW_TRY(stream->Synchronize());
    bytes_.fetch_add(out.size(), std::memory_order_relaxed);
    return {};
  }
  std::uint64_t bytes_read() const override { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t files_read() const override { return 0; }

 private:
  const layout::ShardMap& map_;
  const std::unique_ptr<device::Device> device_;
  const std::vector<std::unique_ptr<device::Buffer>> buffers_;
  const std::vector<Copy> files_;
  tbb::enumerable_thread_specific<std::unique_ptr<device::Stream>> streams_;
  std::atomic<std::uint64_t> bytes_ = 0;
};

/// Parses the description that Serve wrote. nlohmann throws if a value has another type.
Result<Description> Understand(const json& from) {
  Description out;
  if (from.at("schema") != 1) {
    return Fail(Errc::kUnsupported, "schema ", from.at("schema").dump(), ", expected 1");
  }
  SW_TRY_ASSIGN(out.kind, device::ParseKind(from.at("device").get<std::string>()));
  out.told = from.at("told");
  for (const json& one : from.at("buffers")) {
    device::Handle handle;
    handle.kind = out.kind;
    handle.bytes = one.at("bytes");
    handle.token = one.at("token");
    out.buffers.push_back(std::move(handle));
  }
  for (const json& file : from.at("files")) {
    const std::uint64_t bytes = out.file_bytes.emplace_back(file.at("bytes"));
    std::vector<Copy>& copies = out.copies.emplace_back();
    for (const json& at : file.at("at")) {
      const Copy copy{at.at(0), at.at(1)};
      const std::uint64_t room =
          copy.process < out.buffers.size() ? out.buffers[copy.process].bytes : 0;
      if (copy.at > room || bytes > room - copy.at) {
        return Fail(Errc::kBadInput, "a part is outside its memory");
      }
      copies.push_back(copy);
    }
    if (copies.empty()) return Fail(Errc::kBadInput, "no process has a copy of a part");
  }
  SW_TRY_ASSIGN(out.map, ParseMap(from.at("map"), out.file_bytes));
  return out;
}

Result<Description> Receive(os::Connection& connection) {
  SW_TRY_ASSIGN(const std::string rest, os::ReceiveAnswer(connection, "a shared-memory cache"));
  SW_TRY_ASSIGN(const std::uint64_t bytes,
                os::ParseNumber(rest, kTextBytes, connection.name() + ": length"));
  std::vector<std::byte> packed(bytes);
  SW_TRY(connection.Receive(packed));
  try {
    SW_TRY_ASSIGN(const json parsed,
                  shardwright::json::ParseMessagePack(packed, connection.name() + ": description"));
    Result<Description> out = Understand(parsed);
    if (!out) return Within(connection.name() + ": description", std::move(out).error());
    return out;
  } catch (const json::exception& error) {
    return Fail(Errc::kBadInput, connection.name(), ": description: ", error.what());
  }
}

/// Maps the memory of all processes.
Result<std::vector<std::unique_ptr<device::Buffer>>> MapAll(device::Device& device,
                                                            std::vector<device::Handle> handles,
                                                            os::Connection& connection) {
  std::vector<std::unique_ptr<device::Buffer>> buffers;
  for (device::Handle& handle : handles) {
    if (handle.kind == device::Kind::kHost) {
      SW_TRY(connection.Send("memory " + std::to_string(buffers.size()) + "\n"));
      SW_TRY_ASSIGN(handle.descriptor, connection.ReceiveDescriptor());
    }
    Result<std::unique_ptr<device::Buffer>> mapped = device.Import(std::move(handle));
    if (!mapped) return Within(connection.name(), std::move(mapped).error());
    buffers.push_back(*std::move(mapped));
  }
  return buffers;
}

/// Makes a checkpoint from the description of a cache, with the names of tied parameters.
checkpoints::Checkpoint CheckpointOf(Description* from) {
  checkpoints::Checkpoint out;
  const json& told = from->told;
  out.origin = told.value("origin", "");
  out.tag = told.value("tag", "");
  const json holders = told.value("holders", json::object());
  for (const auto& [name, holder] : holders.items()) {
    checkpoints::Param param;
    param.name = name;
    param.alias_of = holder;
    out.params.push_back(std::move(param));
  }
  out.map = std::move(from->map);
  return out;
}

}  // namespace

Result<os::Connection> Reach(const os::Address& address, Clock::time_point end,
                             const os::Stop& stop) {
  if (!address.is_local()) {
    return Fail(Errc::kUsage, ToText(address),
                ": the address of a shared-memory cache is unix:PATH");
  }
  for (;;) {
    Result<os::Connection> connection = os::Connection::Open(address, kReachTimeout, stop);
    const int why = connection ? 0 : connection.error().sys;
    const bool may_come = why == ENOENT || why == ECONNREFUSED;
    if (connection || !may_come || Clock::now() >= end) return connection;
    if (stop && stop()) return Fail(Errc::kStopped, "stopped on request");
    std::this_thread::sleep_for(kReachTick);
  }
}

Result<Attached> Attach(comm::Comm& comm, const os::Address& address, milliseconds wait,
                        const Sink& sink) {
  const auto end = Clock::now() + wait;
  const os::Stop stop = [&sink] { return sink.stop_requested(); };
  Attached out;
  const auto reach = [&]() -> Result<Description> {
    SW_TRY_ASSIGN(os::Connection connection, Reach(address, end, stop));
    SW_TRY(connection.Send("attach\n"));
    for (bool there = false; !there;) {
      SW_TRY_ASSIGN(there, connection.HasLine(os::kLineBytes, kReachTick));
      if (!there && Clock::now() >= end) {
        return Fail(Errc::kNotFound, ToText(address), ": not ready after ", wait.count() / 1000,
                    " s");
      }
    }
    SW_TRY_ASSIGN(Description description, Receive(connection));
    out.connection = std::make_shared<os::Connection>(std::move(connection));
    return description;
  };
  SW_TRY_ASSIGN(Description from, comm.Agree(reach()));
  SW_TRY_ASSIGN(std::unique_ptr<device::Device> device, device::OpenDevice(from.kind, comm));
  SW_TRY_ASSIGN(std::vector<std::unique_ptr<device::Buffer>> buffers,
                comm.Agree(MapAll(*device, std::move(from.buffers), *out.connection)));
  // Choose the copy of this rank's process, by the distribution of ranks over processes.
  const std::size_t processes = buffers.size();
  const auto mine = static_cast<std::uint32_t>(static_cast<std::size_t>(comm.rank()) * processes /
                                               static_cast<std::size_t>(comm.size()));
  std::vector<Copy> files;
  for (const std::vector<Copy>& copies : from.copies) {
    const auto near = std::find_if(copies.begin(), copies.end(),
                                   [&](const Copy& copy) { return copy.process == mine; });
    files.push_back(near == copies.end() ? copies.front() : *near);
  }
  out.input = std::make_unique<convert::Input>();
  out.input->checkpoint = CheckpointOf(&from);
  out.told = std::move(from.told);
  out.input->bytes = std::make_unique<MappedBytes>(out.input->checkpoint.map, std::move(device),
                                                   std::move(buffers), std::move(files));
  return out;
}

Status Detach(comm::Comm& comm, const Attached& attached) {
  const auto detach = [&]() -> Status {
    SW_TRY(attached.connection->Send("detach\n"));
    SW_TRY(os::ReceiveAnswer(*attached.connection, "a shared-memory cache"));
    return {};
  };
  Status gone = detach();
  if (!gone) {
    gone = Fail(gone.error().code, attached.connection->name(),
                ": the cache ended while it was read: ", gone.error().message);
  }
  return comm.Agree(std::move(gone));
}

}  // namespace shardwright::cache
