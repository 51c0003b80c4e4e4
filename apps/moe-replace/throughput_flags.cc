// SPDX-License-Identifier: Apache-2.0
#include "moe-replace/flags.h"
#include "support/base/limits.h"

namespace shardwright::apps {
namespace {

constexpr double kMostPauseSeconds = 1e6;

}  // namespace

void AddThroughput(cli::App& app, placement::EventsRequest* events) {
  placement::ThroughputOptions& options = events->throughput;
  app.Group("Throughput");
  app.AddReal("--step-time", &options.step_seconds, 1e-6, kMostPauseSeconds,
              "seconds of a training step with balance 1; reports samples trained");
  app.AddReal("--samples-per-gpu", &options.samples_per_gpu, 1e-6, 1e9,
              "samples of a used GPU in a step");
  app.AddReal("--expert-share", &options.expert_share, 0, 1,
              "part of --step-time that grows with the balance");
  app.AddReal("--detection-time", &options.detection_seconds, 0, kMostPauseSeconds,
              "seconds until a failure is detected");
  app.AddReal("--rebalance-time", &options.rebalance_seconds, 0, kMostPauseSeconds,
              "seconds of the pause for a new placement, without copies");
  app.AddReal("--restart-time", &options.restart_seconds, 0, kMostPauseSeconds,
              "seconds to restart, without reading a checkpoint");
  app.AddReal("--restore-time", &options.restore_seconds, 0, kMostPauseSeconds,
              "seconds to read a checkpoint");
  app.AddReal("--checkpoint-time", &options.checkpoint_seconds, 0, kMostPauseSeconds,
              "seconds of the pause to write a checkpoint");
  app.AddCount("--checkpoint-every", &options.checkpoint_every, 0, limits::kMoeTokens,
               "steps between checkpoints; 0: none");
  app.AddCount("--ep", &events->expert_parallel, 1, limits::kMoeDevices,
               "also simulate DeepSpeed with groups of N GPUs that share the experts: ds-ft keeps "
               "surviving replicas, ds restarts from a checkpoint");
  app.AddCount("--ds-checkpoint-every", &events->ds_checkpoint_every, 0, limits::kMoeTokens,
               "steps between checkpoints of ds; without the flag, --checkpoint-every");
}

Status CheckThroughput(const cli::App& app, const placement::EventsRequest& events) {
  if (!app.IsSet("--step-time")) {
    SW_TRY(app.Require({"--samples-per-gpu", "--expert-share", "--detection-time",
                        "--rebalance-time", "--restart-time", "--checkpoint-time", "--restore-time",
                        "--checkpoint-every", "--ep", "--ds-checkpoint-every"},
                       "--step-time"));
  }
  if (events.expert_parallel == 0) SW_TRY(app.Require({"--ds-checkpoint-every"}, "--ep"));
  return {};
}

}  // namespace shardwright::apps
