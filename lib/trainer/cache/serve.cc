// SPDX-License-Identifier: Apache-2.0
#include "trainer/cache/serve.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "support/base/bytes.h"
#include "support/base/system.h"
#include "support/base/text.h"
#include "support/comm/nodes.h"
#include "support/json/json.h"
#include "support/os/net/answer.h"
#include "trainer/cache/attach.h"
#include "trainer/cache/map_json.h"
#include "trainer/cache/server.h"
#include "trainer/load/load_result_json.h"

namespace shardwright::cache {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kServeTick(50);
/// Time limit for the processes of a cache to register their memory after loading.
constexpr std::chrono::seconds kMeet(60);
/// Time for attached trainers to disconnect, after a stop request and after a
/// signal. Launchers send SIGKILL soon after a signal; mpirun waits one second.
constexpr milliseconds kGrace(10'000);
constexpr milliseconds kSignalGrace(300);
/// Minimum time for which a cache answers. Clients retry every 100
/// ms, so that they receive the error even if loading fails at once.
constexpr milliseconds kHeard(2'000);

/// Time limit of a stop request. A cache that is still loading finishes that first.
constexpr std::chrono::hours kStopPatience(24);

std::string_view WhyText(End end) {
  return end == End::kAsked    ? "stop requested"
         : end == End::kSignal ? "signal"
                               : "deadline reached";
}

/// \error kUnsupported  the ranks run on several nodes; names two of them
/// Collective.
Status CheckOneNode(comm::Comm& comm) {
  SW_TRY_ASSIGN(const std::vector<comm::Node> nodes, comm::NodesOfRanks(comm));
  for (const comm::Node& one : nodes) {
    if (one == nodes.front()) continue;
    return Fail(Errc::kUnsupported, "ranks on nodes ", nodes.front().host, " and ", one.host,
                ": shared memory exists on one node only; start one cache on each node");
  }
  return {};
}

/// Exports this rank's memory to other processes, and seals host memory against further writes.
Result<device::Handle> Share(device::Device& device, const device::Buffer& buffer) {
  SW_TRY_ASSIGN(device::Handle handle, device.Export(buffer));
  if (handle.descriptor < 0) return handle;
#ifdef F_SEAL_FUTURE_WRITE
  if (::fcntl(handle.descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
    return FailErrno(Errc::kIo, errno, "shared memory cannot be sealed against writing");
  }
#endif
  return handle;
}

/// Makes the description that trainers receive: docs/formats/cache.md.
/// Collective.
Result<std::string> Describe(comm::Comm& comm, const ServeOptions& options,
                             const convert::Input& input, const Loaded& loaded,
                             const checkpoints::Format& format, const device::Handle& handle) {
  // MessagePack, because a token may have any bytes.
  const std::vector<std::uint8_t> mine =
      json::to_msgpack({{"bytes", handle.bytes}, {"token", handle.token}});
  SW_TRY_ASSIGN(const std::vector<comm::Bytes> all, comm.AllGather(std::as_bytes(std::span(mine))));
  json buffers = json::array();
  for (const comm::Bytes& bytes : all) {
    SW_TRY_ASSIGN(json buffer, shardwright::json::ParseMessagePack(bytes, "a rank"));
    buffers.push_back(std::move(buffer));
  }
  json files = json::array();
  for (std::size_t p = 0; p < loaded.where.parts.size(); ++p) {
    const Part& part = loaded.where.parts[p];
    json at = json::array();
    for (std::size_t i = 0; i < part.processes.size(); ++i) {
      at.push_back(json::array({part.processes[i], part.at[i]}));
    }
    files.push_back({{"bytes", loaded.where.target.files[p].bytes}, {"at", std::move(at)}});
  }
  const json out = {{"schema", 1},
                    {"device", Name(options.kind)},
                    {"format", format.name},
                    {"layout", json::parse(loaded.layout.Json())},
                    {"told", trainer::TellSource(input)},
                    {"buffers", std::move(buffers)},
                    {"files", std::move(files)},
                    {"map", ToJson(loaded.where.target.map)}};
  const std::vector<std::uint8_t> packed = json::to_msgpack(out);
  return std::string(packed.begin(), packed.end());
}

/// Runs a cache on one rank.
class Run {
 public:
  Run(comm::Comm& comm, const ServeOptions& options, const checkpoints::TargetSpec& spec,
      const checkpoints::Format& format, Sink& sink)
      : comm_(comm), options_(options), spec_(spec), format_(format), sink_(sink) {}

  Result<Served> Execute() {
    if (!options_.address.is_local()) {
      return Fail(Errc::kUsage, ToText(options_.address),
                  ": unix:PATH expected, because shared memory exists on one node only");
    }
    SW_TRY(CheckOneNode(comm_));
    SW_TRY_ASSIGN(secret_, comm_.OnRootText([] { return RandomHex(16); }));
    const auto heard = Clock::now() + kHeard;
    SW_TRY(comm_.OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(os::Listener listener, os::Listener::Open(options_.address));
      server_ = std::make_unique<Server>(std::move(listener), secret_, sink_);
      server_->Tell({{"source", options_.input.source_paths.front()},
                     {"device", Name(options_.kind)},
                     {"processes", comm_.size()}});
      return {};
    }));
    if (Status ready = Load(); !ready) {
      if (server_ != nullptr) {
        server_->Refuse(ready.error());
        while (!sink_.stop_requested() && Clock::now() < heard) {
          std::this_thread::sleep_for(kServeTick);
        }
      }
      return tl::unexpected<Error>(std::move(ready).error());
    }
    sink_.Pass("serve");
    Status over = comm_.rank() == 0 ? Answer() : Stay();
    if (server_ != nullptr) served_.attaches = server_->attaches();
    SW_TRY(comm_.Agree(std::move(over)));
    return std::move(served_);
  }

 private:
  Status Load();
  Status Meet(const device::Handle& handle);
  Status Answer();
  Status Stay();

  comm::Comm& comm_;
  const ServeOptions& options_;
  const checkpoints::TargetSpec& spec_;
  const checkpoints::Format& format_;
  Sink& sink_;
  std::string secret_;
  std::unique_ptr<device::Device> device_;
  Served served_;
  std::unique_ptr<Server> server_;  // on rank 0 only
  os::Connection lifeline_;         // on other ranks, to rank 0
};

Status Run::Load() {
  SW_TRY_ASSIGN(device_, device::OpenDevice(options_.kind, comm_));
  SW_TRY_ASSIGN(const std::unique_ptr<convert::Input> input,
                convert::OpenInput(comm_, options_.input, sink_));
  SW_TRY_ASSIGN(served_.loaded,
                cache::Load(comm_, *device_, *input, spec_, format_, options_.load, sink_));
  const Loaded& loaded = served_.loaded;
  served_.target = loaded.layout.Json();
  SW_TRY_ASSIGN(const device::Handle handle, comm_.Agree(Share(*device_, *loaded.buffer)));
  SW_TRY_ASSIGN(std::string description,
                Describe(comm_, options_, *input, loaded, format_, handle));
  SW_TRY(comm_.Agree(Meet(handle)));
  if (server_ == nullptr) return {};
  json status = {{"source", options_.input.source_paths.front()},
                 {"device", device_->name()},
                 {"processes", comm_.size()},
                 {"origin", input->checkpoint.origin},
                 {"format", format_.name},
                 {"target", json::parse(served_.target)},
                 {"step", nullptr},
                 {"bytes_read", loaded.bytes_read},
                 {"bytes_cached", loaded.bytes_cached}};
  if (input->checkpoint.iteration) status["step"] = *input->checkpoint.iteration;
  server_->Tell(std::move(status));
  server_->Publish(std::move(description));
  sink_.Note(StrCat("serving ", FormatBytes(loaded.bytes_cached), " on ", ToText(options_.address)),
             0);
  return {};
}

/// Sends the handle of this rank's memory to rank 0, which collects the handles of all processes.
Status Run::Meet(const device::Handle& handle) {
  const bool descriptor = handle.descriptor >= 0;
  if (server_ != nullptr) {
    const int mine = descriptor ? ::fcntl(handle.descriptor, F_DUPFD_CLOEXEC, 0) : -1;
    if (descriptor && mine < 0) {
      return FailErrno(Errc::kIo, errno, "a file descriptor cannot be duplicated");
    }
    server_->Hold(0, mine);
    const auto end = Clock::now() + kMeet;
    while (!server_->Await(static_cast<std::size_t>(comm_.size()), kServeTick)) {
      if (sink_.stop_requested()) return Fail(Errc::kStopped, "stopped on request");
      if (Clock::now() >= end) {
        return Fail(Errc::kIo, "not all processes have registered their memory in time");
      }
    }
    return {};
  }
  SW_TRY_ASSIGN(lifeline_, os::Connection::Open(options_.address, kMeet));
  SW_TRY(lifeline_.Send(
      StrCat("hand ", comm_.rank(), " ", secret_, " ", descriptor ? "1" : "0", "\n")));
  SW_TRY(os::ReceiveAnswer(lifeline_, "the cache"));
  if (descriptor) SW_TRY(lifeline_.SendDescriptor(handle.descriptor));
  SW_TRY(os::ReceiveAnswer(lifeline_, "the cache"));
  return {};
}

/// Waits for the end on rank 0.
Status Run::Answer() {
  const auto begun = Clock::now();
  Status outcome;
  for (;;) {
    if (const std::optional<Error> lost = server_->lost()) {
      outcome = tl::unexpected<Error>(*lost);
      break;
    }
    if (sink_.stop_requested()) {
      served_.end = End::kSignal;
      break;
    }
    if (server_->stop_asked()) break;
    if (options_.deadline && Clock::now() - begun >= *options_.deadline) {
      served_.end = End::kDeadline;
      break;
    }
    std::this_thread::sleep_for(kServeTick);
  }
  const auto grace = served_.end == End::kSignal ? kSignalGrace : kGrace;
  const auto end = Clock::now() + grace;
  while (outcome && server_->attached() > 0 && Clock::now() < end) {
    std::this_thread::sleep_for(kServeTick);
  }
  if (server_->attached() > 0) {
    sink_.Warn(StrCat(Plural(server_->attached(), "trainer rank"), " still attached at the end"));
  }
  sink_.Note(StrCat("ends: ", WhyText(served_.end)), 0);
  server_->End();
  return outcome;
}

/// Waits for the end on other ranks. Avoids MPI calls, because their waits keep processors busy.
Status Run::Stay() {
  bool told = false;
  for (;;) {
    if (sink_.stop_requested() && !std::exchange(told, true)) SW_TRY(lifeline_.Send("stop\n"));
    SW_TRY_ASSIGN(const bool something, lifeline_.HasLine(os::kLineBytes, kServeTick));
    if (!something) continue;
    SW_TRY_ASSIGN(const std::optional<std::string> line, lifeline_.ReceiveLine(os::kLineBytes));
    if (line == "end") return {};
    return Fail(Errc::kIo, "process 0 of the cache has ended");
  }
}

/// Requests a status. The reply is a number and a text of that length.
Result<json> ReceiveStatus(os::Connection& connection) {
  SW_TRY(connection.Send("status\n"));
  SW_TRY_ASSIGN(const std::string rest, os::ReceiveAnswer(connection, "a shared-memory cache"));
  SW_TRY_ASSIGN(const std::uint64_t bytes,
                os::ParseNumber(rest, std::uint64_t{1} << 24, connection.name() + ": length"));
  std::string text(bytes, '\0');
  SW_TRY(connection.Receive(std::as_writable_bytes(std::span(text))));
  SW_TRY_ASSIGN(json status, shardwright::json::Parse(text, connection.name()));
  if (status.is_object() && status.contains("state") && status["state"].is_string()) return status;
  return Fail(Errc::kBadInput, connection.name(),
              ": the status of a shared-memory cache expected, found something else");
}

}  // namespace

Result<Served> Serve(comm::Comm& comm, const ServeOptions& options,
                     const checkpoints::TargetSpec& spec, const checkpoints::Format& format,
                     Sink& sink) {
  return Run(comm, options, spec, format, sink).Execute();
}

Result<json> AskStatus(const os::Address& address, milliseconds wait, const os::Stop& stop) {
  const auto end = Clock::now() + wait;
  for (;;) {
    SW_TRY_ASSIGN(os::Connection connection, Reach(address, end, stop));
    Result<json> status = ReceiveStatus(connection);
    const bool loading = status && (*status)["state"] == "loading";
    if (wait.count() == 0 || (status && !loading)) return status;
    // A cache that just ended may be restarted.
    if (!status && status.error().code != Errc::kIo) return status;
    if (Clock::now() >= end) {
      return Fail(Errc::kNotFound, ToText(address), ": not ready after ", wait.count() / 1000,
                  " s");
    }
    std::this_thread::sleep_for(kServeTick);
  }
}

Status AskStop(const os::Address& address, const os::Stop& stop) {
  SW_TRY_ASSIGN(os::Connection connection, os::Connection::Open(address, kStopPatience, stop));
  SW_TRY(connection.Send("stop\n"));
  SW_TRY(os::ReceiveAnswer(connection, "a shared-memory cache"));
  const auto end = Clock::now() + kGrace;
  while (Clock::now() < end && os::Connection::Open(address, kMeet, stop)) {
    std::this_thread::sleep_for(kServeTick);
  }
  return {};
}

}  // namespace shardwright::cache
