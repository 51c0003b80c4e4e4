// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>

#include "partial/planner/tune.h"
#include "pec-save/job_flags.h"
#include "pec-save/save_flags.h"
#include "pec-save/subcommands.h"
#include "support/base/bytes.h"
#include "support/base/stop.h"
#include "support/base/text.h"
#include "support/text/text.h"

namespace shardwright::apps {
namespace {

/// Measures both bandwidths of a rank, while all ranks do the same.
Result<partial::Bandwidths> Measure(cli::Context& context, const std::string& folder) {
  SW_TRY_ASSIGN(const partial::Bandwidths measured,
                partial::MeasureBandwidths(context.comm(), folder, context.sink()));
  const auto rate = [](double bytes_per_s) {
    return FormatBytes(static_cast<std::uint64_t>(bytes_per_s)) + "/s";
  };
  const int ranks = context.comm().size();
  context.out() << "measured  persist " << rate(measured.persist_bytes_per_s) << ", snapshot "
                << rate(measured.snapshot_bytes_per_s) << " of a rank"
                << (ranks > 1 ? ", the slowest of " + std::to_string(ranks) + " at once" : "")
                << ": " << FormatBytes(partial::kMeasuredBytes) << " written to "
                << text::Printable(folder) << " and synced, and as much copied\n\n";
  return measured;
}

Status Tune(cli::Context& context, const partial::TuneRequest& request, const std::string& folder) {
  Sink& sink = context.sink();
  const auto read = [&] {
    const Interruptible reading(sink);
    return partial::ReadJob(request.job, std::nullopt);
  };
  SW_TRY_ASSIGN(const partial::Job job, read());
  std::optional<partial::Bandwidths> measured;
  if (!folder.empty()) {
    SW_TRY_ASSIGN(measured, Measure(context, folder));
  }
  sink.Pass("tune");
  const Interruptible tuning_now(sink);
  SW_TRY_ASSIGN(const partial::Tuning tuning, partial::Tune(request, job, measured, StopOf(sink)));
  context.SetResult(partial::TuningJson(tuning));
  context.out() << partial::TuningText(tuning);
  if (!tuning.chosen.config.plt_in_limit) {
    context.sink().Warn(
        "the expected PLT exceeds the limit of " + Fixed(100 * request.plt_limit, 2) +
        " % with every K to persist that fits the interval; use faster storage or a larger "
        "--plt-limit");
  }
  return {};
}

}  // namespace

int TuneMain(int argc, const char* const* argv) {
  cli::App app("pec-save tune",
               "Choose K, K to persist and the checkpoint interval for a store, or for a model "
               "with the given sizes.",
               {{"store/ --fault-rate 0.0001",
                 "Chooses K and the interval for the model and ranks of a store."},
                {"--dp 64 --ep 16 --measure /scratch", "Measures both bandwidths in /scratch."}});
  partial::TuneRequest request;
  JobFlags job;
  std::string measure;
  app.ShowInShortHelp({"--fault-rate", "--iterations", "--measure", "--plt-limit", "--interval"});
  app.Group("Run");
  app.AddCount("--interval", &request.interval, 1, kMany,
               "iterations between checkpoints [default: the best interval]");
  app.AddReal("--fault-rate", &request.fault_rate, 0, 1, "faults per iteration");
  app.AddCount("--iterations", &request.iterations, 1, kMany, "length of the run in iterations");
  app.AddReal("--plt-limit", &request.plt_limit, 1e-9, 1, "acceptable share of lost tokens");
  app.AddReal("--lost-share", &request.lost_share, 0, 1,
              "share of the memory copies that a fault destroys [default: the share of one node]");
  app.AddCount("--zero", &request.zero_stage, 0, 3,
               "ZeRO stage. From stage 1, each rank saves its part of the optimizer state; with "
               "stage 3, also of the weights");
  app.AddText("--measure", &measure,
              "measure both bandwidths, in the FOLDER of the future store. Every rank writes, "
              "syncs and removes 256 MiB there, and copies as much in memory",
              "FOLDER");
  job.AddTo(app, &request.job, true);
  AddStepTimes(app, &request.job);
  app.Check([&]() -> Status {
    for (const char* flag : {"--persist-bandwidth", "--snapshot-bandwidth"}) {
      if (measure.empty() || !app.IsSet(flag)) continue;
      return Fail(Errc::kUsage, "--measure cannot be combined with ", flag);
    }
    return job.Complete(app, &request.job);
  });
  return app.Run(argc, argv,
                 [&](cli::Context& context) { return Tune(context, request, measure); });
}

}  // namespace shardwright::apps
