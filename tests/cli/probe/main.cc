// SPDX-License-Identifier: Apache-2.0
// A command that does no work of its own. Its flags select how its body behaves, so that the tests
// can check everything around the body.

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/cli/app.h"

namespace {

using shardwright::Errc;
using shardwright::Fail;
using shardwright::Status;
using shardwright::cli::Context;
using shardwright::cli::Shared;

struct Options {
  std::string input;
  std::string output;
  std::vector<std::string> names;
  std::vector<std::string> warnings;
  std::vector<std::string> notes;
  std::optional<std::string> pack;
  std::string mode = "fast";
  std::string text;
  std::uint64_t units = 3;
  std::uint64_t unit_ms = 0;
  std::uint64_t unit_bytes = 1 << 20;
  bool stuck = false;
  std::uint64_t fail = 0;
  std::uint64_t raise = 0;
  std::uint64_t rank = UINT64_MAX;
  double ratio = 0.5;
  std::string throws = "nothing";
};

/// Plans forever and never checks for a stop request.
void PlanForEver(Context& context) {
  const shardwright::Interruptible planning(context.sink());
  context.sink().Pass("plan");
  while (true) std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

/// Processes the units, and stops between two of them on request.
Status Work(const Options& options, Context& context) {
  shardwright::Sink& sink = context.sink();
  const std::uint64_t total = options.units * options.unit_bytes;
  sink.Pass("read");
  sink.AddRead(total, 2);
  sink.Pass("write");
  for (std::uint64_t unit = 0; unit < options.units; ++unit) {
    sink.Progress(unit * options.unit_bytes, total);
    std::this_thread::sleep_for(std::chrono::milliseconds(options.unit_ms));
    sink.AddWritten(options.unit_bytes, 1);
    if (sink.stop_requested()) return Fail(Errc::kStopped, "stopped after a unit");
  }
  sink.Progress(total, total);
  return {};
}

Status Misbehave(const Options& options, Context& context) {
  const bool here = options.rank == UINT64_MAX ||
                    options.rank == static_cast<std::uint64_t>(context.comm().rank());
  if (!here) return {};
  if (options.raise != 0) raise(static_cast<int>(options.raise));
  if (options.throws == "memory") throw std::bad_alloc();
  if (options.throws == "error") throw std::runtime_error("thrown by a library");
  if (options.throws == "int") throw 7;
  if (options.fail == 0) return {};
  return FailErrno(static_cast<Errc>(options.fail),
                   options.fail == static_cast<std::uint64_t>(Errc::kIo) ? 28 : 0, options.input,
                   ": made to fail");
}

void Answer(const Options& options, Context& context) {
  const shardwright::cli::CommonFlags& flags = context.flags();
  nlohmann::json result;
  result["input"] = options.input;
  result["names"] = options.names;
  result["pack"] = options.pack ? nlohmann::json(*options.pack) : nlohmann::json(nullptr);
  result["mode"] = options.mode;
  result["text"] = options.text;
  result["ratio"] = options.ratio;
  result["threads"] = flags.threads;
  result["memory_bytes"] = flags.memory_bytes;
  result["verify"] = static_cast<int>(flags.verify);
  context.SetResult(std::move(result));
  if (flags.list) {
    using Table = shardwright::text::Table;
    Table table({{"NAME", Table::Align::kLeft, true}, {"BYTES", Table::Align::kRight, false}});
    table.AddRow({options.input, "4096"});
    for (const std::string& name : options.names) table.AddRow({name, "7"});
    context.Print(table);
  } else if (flags.explain) {
    context.out() << *flags.explain << ": one shard\n";
  } else {
    context.out() << options.input << " -> " << options.output << "\n";
  }
}

Status Body(const Options& options, Context& context) {
  for (const std::string& text : options.warnings) context.sink().Warn(text);
  for (const std::string& text : options.notes) context.sink().Note(text, 0);
  context.sink().Note("a detail", 2);
  Answer(options, context);
  if (options.stuck) PlanForEver(context);
  if (context.flags().describes()) return Misbehave(options, context);
  if (!context.flags().dry_run) {
    if (Status worked = Work(options, context); !worked) return worked;
  }
  return Misbehave(options, context);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  shardwright::cli::App app("probe", "Do what the flags say, to test what surrounds a command.",
                            {{"in out", "Run to the end."}, {"in --list", "Show a table."}});
  app.AddInputOutput(&options.input, &options.output);
  app.AddList("--name", &options.names, "one more name");
  app.AddList("--warn", &options.warnings, "warn with this text", "TEXT");
  app.AddList("--note", &options.notes, "note this text", "TEXT");
  app.AddOptionalValue("--pack", &options.pack, "zstd", "pack the output", "METHOD");
  app.AddChoice("--mode", &options.mode, {"fast", "slow"}, "which way");
  app.AddText("--text", &options.text, "any text");
  app.AddCount("--units", &options.units, 0, 1'000'000, "units of work");
  app.AddCount("--unit-ms", &options.unit_ms, 0, 60'000, "milliseconds per unit");
  app.AddFlag("--stuck", &options.stuck, "plan for ever");
  app.AddSize("--unit-bytes", &options.unit_bytes, "bytes per unit");
  app.AddReal("--ratio", &options.ratio, 0, 1, "a part of one");
  app.AddCount("--fail", &options.fail, 0, 75, "end with this code");
  app.AddCount("--raise", &options.raise, 0, 64, "send this signal to the process itself");
  app.AddCount("--rank", &options.rank, 0, 1'000'000, "the only rank that fails, raises or throws");
  app.AddChoice("--throw", &options.throws, {"nothing", "memory", "error", "int"}, "throw this");
  app.Use({Shared::kDryRun, Shared::kForce, Shared::kResume, Shared::kVerify, Shared::kThreads,
           Shared::kMemory, Shared::kList, Shared::kExplain});
  app.Check([&]() -> Status {
    if (options.mode == "slow" && !app.IsSet("--unit-ms")) {
      return Fail(Errc::kUsage, "--mode slow needs --unit-ms");
    }
    return {};
  });
  return app.Run(argc, argv, [&](Context& context) { return Body(options, context); });
}
