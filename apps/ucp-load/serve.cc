// SPDX-License-Identifier: Apache-2.0
#include "ucp-load/serve.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include <nlohmann/json.hpp>

#include "common/ucp.h"
#include "engine/device/device.h"
#include "support/base/bytes.h"
#include "support/base/stop.h"
#include "support/base/text.h"
#include "support/text/text.h"
#include "trainer/cache/serve.h"

namespace shardwright::apps {
namespace {

using cli::Shared;
using nlohmann::json;

constexpr std::uint64_t kSecondsMax = std::uint64_t{30} * 24 * 3600;

std::string_view EndText(cache::End end) {
  switch (end) {
    case cache::End::kAsked:
      return "stopped by a request";
    case cache::End::kSignal:
      return "stopped by a signal";
    case cache::End::kDeadline:
      break;
  }
  return "its deadline has passed";
}

void Show(cli::Context& context, const cache::Served& served) {
  const cache::Loaded& loaded = served.loaded;
  context.SetResult({{"target", json::parse(served.target)},
                     {"bytes_read", loaded.bytes_read},
                     {"bytes_gathered", loaded.bytes_gathered},
                     {"bytes_cached", loaded.bytes_cached},
                     {"members_verified", loaded.members_verified},
                     {"attaches", served.attaches},
                     {"end", EndText(served.end)}});
  context.out() << FormatBytes(loaded.bytes_read) << " read, " << FormatBytes(loaded.bytes_cached)
                << " served, trainer ranks attached " << served.attaches << " times; "
                << EndText(served.end) << "\n";
}

}  // namespace

int ServeMain(int argc, const char* const* argv) {
  cli::App app(
      "ucp-load serve",
      "Keep a checkpoint in shared memory of this node, in the layout of a trainer. Trainers load "
      "it with shardwright.load(engine, \"unix:PATH\").",
      {{"ckpt/ unix:/run/user/1/load.sock --target zero=2,dp=4",
        "Serves four ranks with ZeRO stage 2. Under mpirun, each process loads a share."}});
  SourceFlags source;
  FormatFlags format;
  format.for_ranks = true;
  std::string address;
  std::string device = "host";
  std::optional<std::uint64_t> deadline;
  app.AddInput(&source.input, "checkpoint, catalogue, folder of atoms or .safetensors file");
  app.AddInput(&address, "address for trainers, unix:PATH", "ADDRESS");
  app.Use({Shared::kVerify, Shared::kThreads, Shared::kMemory});
  app.ShowInShortHelp({"--target", "--format", "--device", "--memory"});
  app.AddChoice(
      "--device", &device, {"host", "cuda"},
      "memory to use: host for the memory of this machine, cuda for one CUDA device per process");
  app.AddCount("--deadline", &deadline, 1, kSecondsMax,
               "seconds after which the command ends by itself [default: never]");
  source.AddTo(app, false);
  source.AddMapTo(app);
  format.AddTo(app,
               "keys you omit keep the source's value. Any layout serves any trainer, but the "
               "layout of the trainer loads fastest");
  checkpoints::TargetSpec spec;
  cache::ServeOptions options;
  app.Check([&]() -> Status {
    SW_TRY_ASSIGN(options.kind, device::ParseKind(device));
    SW_TRY_ASSIGN(spec, format.Spec(app));
    if (address.empty()) return {};
    SW_TRY_ASSIGN(options.address, os::ParseAddress(address));
    if (options.address.is_local()) return {};
    return Fail(Errc::kUsage, address, ": expected an address unix:PATH");
  });
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    const cli::CommonFlags& flags = context.flags();
    if (flags.verify != Verify::kNone && flags.verify != Verify::kChecksums) {
      return Fail(Errc::kUsage,
                  "--verify: expected none or checksums, because ucp-load serve writes no files");
    }
    options.input = source.Options(flags);
    convert::SetTarget(*format.format, spec, &options.input.maps);
    options.load = {flags.verify == Verify::kChecksums, flags.threads, flags.memory_bytes};
    if (deadline) options.deadline = std::chrono::seconds(*deadline);
    SW_TRY_ASSIGN(const cache::Served served,
                  cache::Serve(context.comm(), options, spec, *format.format, context.sink()));
    Show(context, served);
    return {};
  });
}

int ServeStatusMain(int argc, const char* const* argv) {
  cli::App app(
      "ucp-load status",
      "Print the state of a checkpoint that ucp-load serve keeps in shared memory.",
      {{"unix:/run/user/1/load.sock --wait 600", "Waits until trainers can load the checkpoint."}});
  std::string address;
  TrustFlags trust;
  std::uint64_t wait = 0;
  app.Alone();
  app.AddInput(&address, "address of ucp-load serve, unix:PATH", "ADDRESS");
  app.AddCount("--wait", &wait, 0, kSecondsMax,
               "seconds to wait until the checkpoint is loaded; exit with code 3 if it is not");
  trust.AddTo(app);
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    return context.comm().OnRoot([&]() -> Status {
      SW_TRY_ASSIGN(os::Address where, os::ParseAddress(address));
      SW_TRY_ASSIGN(where.trusted_user, trust.User());
      SW_TRY_ASSIGN(json status,
                    cache::AskStatus(where, std::chrono::seconds(wait), StopOf(context.sink())));
      const auto number = [&](const char* key) {
        return status.contains(key) && status[key].is_number_unsigned()
                   ? status[key].get<std::uint64_t>()
                   : 0;
      };
      context.out() << "state     " << text::Printable(status.value("state", "")) << "\n"
                    << "source    " << text::Printable(status.value("source", "")) << "\n"
                    << "memory    " << FormatBytes(number("bytes_cached")) << " of "
                    << number("processes")
                    << (number("processes") == 1 ? " process on " : " processes on ")
                    << text::Printable(status.value("device", "")) << ", "
                    << FormatBytes(number("bytes_read")) << " read\n"
                    << "trainers  " << Plural(number("attached"), "rank") << " attached now, "
                    << number("attaches") << " since the start\n";
      context.SetResult(std::move(status));
      return {};
    });
  });
}

int ServeStopMain(int argc, const char* const* argv) {
  cli::App app("ucp-load stop",
               "Stop ucp-load serve and remove its checkpoint from shared memory. Trainers that "
               "are reading get ten seconds to finish.",
               {{"unix:/run/user/1/load.sock", "Stops ucp-load serve at this address."}});
  std::string address;
  TrustFlags trust;
  app.Alone();
  app.AddInput(&address, "address of ucp-load serve, unix:PATH", "ADDRESS");
  trust.AddTo(app);
  return app.Run(argc, argv, [&](cli::Context& context) -> Status {
    SW_TRY_ASSIGN(os::Address where, os::ParseAddress(address));
    SW_TRY_ASSIGN(where.trusted_user, trust.User());
    return cache::AskStop(where, StopOf(context.sink()));
  });
}

}  // namespace shardwright::apps
