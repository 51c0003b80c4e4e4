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
#include "support/base/limits.h"
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

/// Adds flags of the model of a forward and backward pass.
void AddStepModel(cli::App& app, partial::TuneRequest* request) {
  partial::StepRequest& step = request->step;
  app.Group("Computed time of a forward and backward pass");
  app.AddReal("--gpu-flops", &step.gpu_flops, 0, 1e18,
              "operations per second that a GPU reaches, such as 6.2e13. Computes "
              "--forward-backward from the sizes of the job and these flags; 0: off");
  app.AddCount("--sequence-length", &step.sequence_length, 1, kMany, "tokens of a sequence");
  app.AddCount("--sequences", &step.sequences, 1, kMany,
               "sequences of a data-parallel rank in an iteration");
  app.AddCount("--top-k", &step.top_k, 1, limits::kMoeExperts,
               "number of experts that process each token in an MoE layer");
  app.AddCount(
      "--attention-layers", &step.attention_layers, 0, limits::kMoeLayers,
      "number of attention layers; 0: ignore attention scores and tensor-parallel reductions");
  app.AddCount("--hidden-size", &step.hidden_size, 1, kMany, "elements of a token between layers");
  app.AddSize("--token-bytes", &step.token_bytes,
              "bytes of a token that is sent to an expert; 0: two for each element");
  app.AddBandwidth("--gpu-bandwidth", &step.gpu_bandwidth,
                   "bytes per second between GPUs of a node; adds the time of tensor-parallel "
                   "reductions; 0: they take none");
}

/// Checks that times are either measured or computed, and that the model has all its inputs.
Status CheckStepModel(const cli::App& app, partial::TuneRequest* request) {
  partial::StepRequest& step = request->step;
  step.iteration_given = app.IsSet("--iteration-time");
  if (!(step.gpu_flops > 0)) {
    return app.Require({"--sequence-length", "--sequences", "--top-k", "--attention-layers",
                        "--hidden-size", "--token-bytes", "--gpu-bandwidth"},
                       "--gpu-flops");
  }
  SW_TRY(app.Exclude({"--forward-backward"}, "--gpu-flops, which computes it"));
  if (!step.sequence_length) {
    return Fail(Errc::kUsage, "--gpu-flops requires --sequence-length");
  }
  if (step.attention_layers > 0 && !step.hidden_size) {
    return Fail(Errc::kUsage, "--attention-layers requires --hidden-size");
  }
  const bool known = step.hidden_size || step.token_bytes > 0;
  if (request->network_bandwidth > 0 && !known) {
    return Fail(Errc::kUsage,
                "--network-bandwidth with --gpu-flops requires --hidden-size or --token-bytes");
  }
  if (step.gpu_bandwidth == 0) return {};
  if (request->tp == 1) return Fail(Errc::kUsage, "--gpu-bandwidth requires --tp above 1");
  if (step.attention_layers > 0) return {};
  return Fail(Errc::kUsage, "--gpu-bandwidth requires --attention-layers");
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
  app.AddCount("--tp", &request.tp, 1, partial::kMostJobRanks,
               "number of tensor-parallel ranks, each of which saves an equal part of a "
               "data-parallel rank's bytes");
  app.AddBandwidth("--network-bandwidth", &request.network_bandwidth,
                   "bytes per second from a rank to other nodes. Adds the column GEMINI, and with "
                   "--gpu-flops the time to send tokens to experts on other nodes; 0: off");
  app.AddText("--measure", &measure,
              "measure both bandwidths, in the FOLDER of the future store. Every rank writes, "
              "syncs and removes 256 MiB there, and copies as much in memory",
              "FOLDER");
  job.AddTo(app, &request.job, true);
  AddStepTimes(app, &request.job);
  AddStepModel(app, &request);
  app.Check([&]() -> Status {
    for (const char* flag : {"--persist-bandwidth", "--snapshot-bandwidth"}) {
      if (measure.empty() || !app.IsSet(flag)) continue;
      return Fail(Errc::kUsage, "--measure cannot be combined with ", flag);
    }
    SW_TRY(CheckStepModel(app, &request));
    return job.Complete(app, &request.job);
  });
  return app.Run(argc, argv,
                 [&](cli::Context& context) { return Tune(context, request, measure); });
}

}  // namespace shardwright::apps
